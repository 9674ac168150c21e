"""The generator of examples/ as a deterministic job's: it seeds each prompt, and computes with one thread."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import torch

import onbeat.client

PROGRAM = Path(__file__).parents[3] / "examples" / "generator.py"

if __name__ == "__main__":
    torch.set_num_threads(1)
    own = functools.partial(onbeat.client.Producer, reproducible=True)
    onbeat.client.Producer = own  # pyright: ignore[reportAttributeAccessIssue]
    runpy.run_path(str(PROGRAM))
