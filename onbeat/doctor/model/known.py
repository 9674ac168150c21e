"""Bytes that models of common sizes need, by their published shapes: no folder of them has to be there.

    known_models/NAME/config.json ─▶ model on the meta device ─▶ sizes ─▶ alternatives.py, a row for each way to train

`onbeat doctor --sizes` shows the table, docs/memory.md has it, and comments of configs/recipes/ are held against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from contracts.spec.trainer import LoraSpec
from onbeat.client.spec_file import parse_spec
from onbeat.doctor.model.alternatives import LORA, alternatives
from onbeat.doctor.model.job import LEAST_SPEC
from onbeat.doctor.model.memory import ModelSizes
from onbeat.doctor.model.report import SizesRow
from onbeat.doctor.model.shape import shape_of, sizes_of

KNOWN = Path(__file__).parents[1] / "known_models"
TABLE = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B")
"""The models of the table, from the smallest to the largest."""
TABLE_JOB = (
    "model.dtype=bfloat16",
    "rollout.prompts_per_batch=8",
    "rollout.group_size=8",
    "rollout.max_prompt_tokens=512",
    "rollout.sampling.max_new_tokens=1024",
)
"""Keys of the table's job, beside the defaults: a pass has 8,192 tokens."""


@cache
def known_sizes(name: str, lora: LoraSpec | None) -> ModelSizes:
    """Returns the sizes of a known model.

    Args:
        name: The name of its folder in known_models/.
        lora: The adapters; None: the model is trained.
    """
    return sizes_of(shape_of(KNOWN / name, torch.bfloat16), out_of_reach=(), lora=lora)


def sizes_table(models: Sequence[str] = TABLE) -> list[SizesRow]:
    """Returns two rows for each model, whole and by adapters, for a trainer on one GPU."""
    job = parse_spec({**LEAST_SPEC, "model": {"path": "model"}}, TABLE_JOB)
    rows: list[SizesRow] = []
    for model in models:
        steps = list(alternatives(job, lambda lora, model=model: known_sizes(model, lora), device="cuda"))
        whole = [step for step in steps if LORA not in step.keys]
        adapters = [step for step in steps if LORA in step.keys]
        rows.append(SizesRow(model=model, trained="whole", steps=tuple(whole)))
        rows.append(SizesRow(model=model, trained="adapters", steps=tuple(adapters)))
    return rows
