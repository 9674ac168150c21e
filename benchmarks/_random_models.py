"""Models with random weights that jobs beside TRL train, and the demo's tokenizer beside them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks._results import REPOSITORY
from benchmarks.trainer import SHAPES

TOKENIZER = REPOSITORY / "configs/models/two-digit-addition"


def make_8m(folder: Path) -> None:
    """Writes 8.3 M random weights; tokens above the tokenizer's 99 decode to nothing."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=80,
        intermediate_size=1088,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    save_with_tokenizer(Qwen3ForCausalLM(config), folder)


def make_135m(folder: Path) -> None:
    """Writes 106 M random weights, most of whose tokens can't be read, as in the smaller model."""
    torch.manual_seed(0)
    config: Any = SHAPES["smollm2-135m"]()
    config.vocab_size, config.eos_token_id, config.bos_token_id, config.pad_token_id = 512, 1, None, 0
    model: Any = LlamaForCausalLM(config)
    save_with_tokenizer(model.to(torch.bfloat16), folder)


def save_with_tokenizer(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
