"""Where the files of a job are, below the run root that trainers, generators and the gateway share.

{run_root}/{job_id}/
    spec.json                  the JobSpec as submitted
    metrics.jsonl              IterationMetrics, a line an iteration
    timeline.jsonl             TimelineSpan
    evaluations.jsonl          EvaluationScore
    audit.json                 its audit chain and last status: `onbeat demo` and `onbeat.train` write it
    chain.jsonl                AuditRecord, a line for each that the fence took (onbeat/loop/chain_file.py)
    trainer.log                what its trainers wrote on stderr, one after the other; trainer.log.1: before 32 MiB
    weights/v000003/           safetensors of version 3, or its delta; elsewhere, if the stack has a weight root
    checkpoints/i000010/       state after iteration 10 was trained: it resumes at 11
    checkpoints/aside/         those that a start could not go on from; trainer_state/ has one, too
    rollouts/i000010/          recorded batches of iteration 10
    trainer_state/v000011/     what an external trainer keeps of version 11
    reward_curve.png timeline.png summary.json     made by `onbeat demo`
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from contracts.encoding.names import check_job_id
from contracts.encoding.wire import Record

VERSION = "v"
"""First letter of the folders that are numbered by version."""
CHECKPOINT = "i"
"""First letter of the folders that are numbered by iteration."""


STACK_FILE = "stack.json"
"""File of the run root of a running `onbeat up`, by which its commands find it."""


class RunFolder:
    """The paths of a job's files; nothing is written here. Each process that reads or writes a file creates its own."""

    def __init__(self, run_root: Path, job_id: str, *, weight_root: Path | None = None) -> None:
        """Makes the paths of a job's files.

        Args:
            run_root: The folder of all run folders.
            job_id: The job.
            weight_root: The folder of the published versions; None where it is the run root.

        Raises:
            NotFound: It is no job's id, wherever it came from: it would be a path out of the run root.
        """
        self.run_root = run_root
        self.weight_root = weight_root or run_root
        self.job_id = check_job_id(job_id)
        self.path = run_root / job_id
        self.spec = self.path / "spec.json"
        self.metrics = self.path / "metrics.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.audit = self.path / "audit.json"
        self.chain = self.path / "chain.jsonl"
        self.trainer_log = self.path / "trainer.log"
        self.weights = self.weight_root / job_id / "weights"
        self.checkpoints = self.path / "checkpoints"
        self.trainer_state = self.path / "trainer_state"

    def weights_of(self, policy_version: int) -> Path:
        return self.weights / f"{VERSION}{policy_version:06d}"

    def checkpoint_after(self, iteration: int) -> Path:
        return self.checkpoints / f"{CHECKPOINT}{iteration:06d}"

    def trainer_state_of(self, policy_version: int) -> Path:
        return self.trainer_state / f"{VERSION}{policy_version:06d}"

    def relative(self, path: Path) -> str:
        """Returns the path below the run root, or, for a version's, below the weight root, as its manifest has it."""
        root = self.weight_root if path.is_relative_to(self.weights) else self.run_root
        return path.relative_to(root).as_posix()


def number_of(path: str | PurePath, letter: str) -> int | None:
    """Returns the number in the name of a version's or checkpoint's folder.

    None stands for another name, which a folder has while it is written.
    """
    match = re.fullmatch(rf"{letter}([0-9]{{6,18}})", PurePath(path).name)
    return int(match[1]) if match else None


def numbered(parent: Path, letter: str) -> list[tuple[int, Path]]:
    """Returns (number, folder) of the numbered folders in `parent`, by number; [] where there is no such parent."""
    if not parent.is_dir():
        return []
    numbers = [(number_of(path, letter), path) for path in parent.iterdir()]
    return sorted((number, path) for number, path in numbers if number is not None and path.is_dir())


class Removal(Record, frozen=True, kw_only=True):
    """Notes that the keys of a job are gone, so that its files are to go as well."""

    at_s: float
    """Unix time at which the keys went."""
