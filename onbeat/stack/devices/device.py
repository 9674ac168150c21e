"""The device that a stack computes on where ONBEAT_DEVICE names none: CUDA where torch sees it, else the CPU.

no device file of a driver ─▶ cpu, and nothing is imported
one is there ─▶ a process asks torch ─▶ cuda or cpu
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Literal

from contracts.settings import StackSettings

ASK = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
ANSWERS_WITHIN_S = 60.0
"""A first import of torch from a cold disk takes a while."""
DEVICE_FILES = "nvidia[0-9]*"
"""Files of the NVIDIA driver. Under WSL `dxg` stands in their place."""


@functools.cache
def name_of_gpu(dev: Path = Path("/dev")) -> str:
    """Returns the name of the GPU that torch sees; "" where it sees none.

    A process of its own asks, since torch takes seconds to import and keeps memory of the GPU that it has looked at.
    """
    if not any(dev.glob(DEVICE_FILES)) and not (dev / "dxg").exists():
        return ""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def chosen_device() -> Literal["cpu", "cuda"]:
    """Returns the device of a stack whose operator names none."""
    return "cuda" if name_of_gpu() else "cpu"


def device_in_words(settings: StackSettings, *, is_chosen: bool) -> str:
    """Says what a stack computes on, and by whose choice.

    Args:
        settings: The stack's.
        is_chosen: True where ONBEAT_DEVICE names the device.
    """
    if is_chosen:
        return f"{settings.device}, as ONBEAT_DEVICE says"
    if settings.device == "cuda":
        return f"cuda: torch sees {name_of_gpu()} (ONBEAT_DEVICE=cpu for the CPU)"
    return "cpu: torch sees no GPU"
