"""A value of each type that crosses a process line, as the bytes golden/TYPE.msgpack, or golden/TYPE-NAME.msgpack.

A file that changes is a change of the wire: what is in Redis, or on its way, can no longer be read. After one that is
meant, `python -m tests.contract.golden_files` writes each value anew; a new type gets its value by `write`.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import contracts
from contracts.encoding.wire import Record, decode, encode
from contracts.events import IterationMetrics, TrajectoryMetrics

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.msgpack"))


ELSEWHERE = (
    "onbeat.recording.records",
    "gateway.metrics.stage_report",
    "gateway.metrics.stream_report",
    "gateway.timeline.report",
)
"""Modules outside contracts/ whose records are kept in files, or answered."""


def record_types() -> set[type[Record]]:
    """Every record that a module of contracts/ defines, or one of ELSEWHERE."""
    for module in pkgutil.walk_packages(contracts.__path__, "contracts."):
        importlib.import_module(module.name)
    for name in ELSEWHERE:
        importlib.import_module(name)
    found: set[type[Record]] = set()
    waiting: list[type[Record]] = [Record]
    while waiting:
        kinds = waiting.pop().__subclasses__()
        found.update(kinds)
        waiting += kinds
    return {kind for kind in found if kind.__module__.startswith("contracts.") or kind.__module__ in ELSEWHERE}


@functools.cache
def _kinds() -> dict[str, type[Record]]:
    return {kind.__name__: kind for kind in record_types()}


def kind_of(name: str) -> type[Record]:
    """The type that a file holds a value of: JobSpec of "JobSpec-lagging"."""
    return _kinds()[name.partition("-")[0]]


def golden_bytes(name: str) -> bytes:
    return (FOLDER / f"{name}.msgpack").read_bytes()


def golden(name: str) -> Any:
    """The value of a file."""
    return decode(golden_bytes(name), kind_of(name))


def trajectory_metrics(**changes: Any) -> TrajectoryMetrics:
    """Those of an iteration whose trajectories had some turns."""
    played = TrajectoryMetrics(
        turns_mean=2.25,
        turns_max=8,
        done_share=0.75,
        max_turns_share=0.25,
        max_tokens_share=0.0,
        observation_tokens_mean=35.5,
        environment_reward_mean=0.625,
        num_begun_again=0,
        environment={"calls": 1.5},
    )
    return replace(played, **changes)


def iteration_metrics(**changes: Any) -> IterationMetrics:
    """Those of iteration 3."""
    return replace(golden("IterationCommitted").metrics, **changes)


def write(value: Record, name: str = "") -> None:
    """Writes the file of a value; name: what tells it from others of its type."""
    path = FOLDER / f"{type(value).__name__}{'-' * bool(name)}{name}.msgpack"
    path.write_bytes(encode(value))


def main() -> None:
    for name in NAMES:
        write(golden(name), name.partition("-")[2])


if __name__ == "__main__":
    main()
