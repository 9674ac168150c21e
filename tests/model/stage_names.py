"""The stages of a walk's job: their tables in its spec, and the columns that stand for the model's values."""

from __future__ import annotations

import hashlib
from typing import Any

from contracts.encoding.arrays import pack_float32
from tests.model.state import Bounds
from tests.model.table import Stages

NUM_ROWS = 6
"""The rollouts of a batch: three prompts, two of each."""
PAIR: Stages = ((3, ()), (1, (1,)))
"""A stage takes the rollouts of each prompt, one that reads its column takes the batch."""
CHAIN: Stages = ((6, ()), (3, (1,)), (1, (1, 2)), (6, (3,)))
"""Every unit, one that reads two others, and one whose items all read the same one."""
NAMES = ("rollouts", "first", "second", "third", "fourth")
"""[stages]"""
UNITS = {6: "row", 3: "group", 1: "batch"}


def stage_tables(bounds: Bounds) -> list[dict[str, Any]]:
    """`[[stages]]` of the walk's job."""
    return [
        {
            "type": "external",
            "name": NAMES[stage],
            "inputs": [f"{NAMES[before]}_column" for before in after] or ["completion_ids"],
            "outputs": [{"name": f"{NAMES[stage]}_column", "type": "float32"}],
            "unit": UNITS[num_items],
            "lease_s": 3600.0,
            "max_attempts": bounds.item_attempts,
        }
        for stage, (num_items, after) in enumerate(bounds.stages, start=1)
    ]


def column_values(stage: int, value: tuple[Any, ...], num_rows: int) -> dict[str, list[bytes]]:
    """Numbers that tell what the model's value is, and so what it was made of."""
    number = int.from_bytes(hashlib.blake2b(repr((stage, value)).encode(), digest_size=3).digest(), "little")
    return {f"{NAMES[stage]}_column": [pack_float32([float(number)])] * num_rows}
