"""The result of a chaos campaign, round by round, and the file that has it from the first round on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from contracts.encoding.wire import Record, encode_json
from contracts.errors import InvalidInput

TRAINER_FAULTS = ("kill trainer", "pause trainer")
EXPECTED = (
    "every round has a fault that was seen to happen and to be healed, succeeds, verifies, trains each batch once, and "
    "ends with the digest of the undisturbed run where the job is deterministic"
)


class Hit(Record, frozen=True, kw_only=True):
    """A process that got a signal, or whose engine was disturbed, with the proof of its effect and of its healing."""

    name: str
    """The name of a service of the stack, or `trainer`."""
    pid: int
    signal: int
    """0 where its engine was disturbed."""
    seen: str
    """ended or stopped, as its process was seen after the signal, or computed wrongly; "" where it was none of them."""
    healed: str
    """The first later sign that this was healed; "" without one."""

    @property
    def is_proven(self) -> bool:
        return bool(self.seen and self.healed)


class Fault(Record, frozen=True, kw_only=True):
    """A fault that was done: its time, kind and target, and the processes that it hit."""

    at_s: float
    """Since the round's job was submitted."""
    kind: str
    target: str
    at_work: bool = False
    """True: a trainer had committed or rewound. False: it was starting."""
    hits: tuple[Hit, ...] = ()

    @property
    def is_proven(self) -> bool:
        """True where each of its processes was seen to end, or to stand still, and to be healed."""
        return bool(self.hits) and all(hit.is_proven for hit in self.hits)


class RoundResult(Record, frozen=True, kw_only=True):
    number: int
    job_id: str
    status: str
    from_submission: bool
    """True: the round's faults began with the submission. False: with the first open iteration."""
    opened_s: float | None
    """First seen with an open iteration, since its submission; None if it never was."""
    faults: tuple[Fault, ...]
    wall_s: float
    rewinds: int
    rejected: dict[str, int]
    repeats: int = 0
    """Runs before this one in which no fault was proven: they were calm, and show nothing."""
    problems: tuple[str, ...]
    """Why the round is a finding; () where the run ended as the undisturbed one."""


class Baseline(Record, frozen=True, kw_only=True):
    """The facts of a campaign that are known when the undisturbed run has ended."""

    seed: int
    schedule: str
    max_policy_lag: int
    generators: int
    stage_workers: int
    digest: str
    """The undisturbed run's, which is synchronous unless the job lags; "" where the job is not deterministic."""
    undisturbed_s: float
    """How long that one trained, from its first open iteration."""
    window_s: float
    """The faults of a round fall into as many seconds."""
    rounds: int


class CampaignResult(Baseline, frozen=True, kw_only=True):
    """The record that `onbeat chaos --json` prints, and that `--out` writes to a file."""

    rounds_run: int
    """Fewer than `rounds`: it goes on, or was interrupted."""
    faults: int
    faults_proven: int
    """How many of them were seen to happen and to be healed."""
    faults_by_kind: dict[str, int]
    trainers_hit: int
    """Kills and pauses of trainers."""
    trainers_hit_at_work: int
    """How many of these came in the middle of iterations."""
    rewinds: int
    rejected: dict[str, int]
    """Refused publications by reason."""
    findings: tuple[RoundResult, ...]
    wall_s: float
    passed: bool
    """No round that was run is a finding."""
    results: tuple[RoundResult, ...]


def unproven(faults: Sequence[Fault]) -> str:
    """Says why these faults disturbed nothing that was seen; "" where a fault is proven."""
    if any(fault.is_proven for fault in faults):
        return ""
    names = [f"{fault.kind} ({fault.target})" for fault in faults]
    if not names:
        return "no fault came"
    return f"no fault was proven to have happened and to be healed, of {', '.join(names)}"


def summed(
    baseline: Baseline, results: Sequence[RoundResult], *, wall_s: float, kinds: Sequence[str]
) -> CampaignResult:
    """Sums up the campaign so far.

    Args:
        baseline: The facts of the undisturbed run.
        results: The rounds.
        wall_s: Seconds since the campaign's start.
        kinds: Every fault that it draws from; those that never came count 0.
    """
    faults = [fault for result in results for fault in result.faults]
    rejected: Counter[str] = Counter()
    for result in results:
        rejected.update(result.rejected)
    findings = tuple(result for result in results if result.problems)
    return CampaignResult(
        **msgspec.structs.asdict(baseline),
        rounds_run=len(results),
        faults=len(faults),
        faults_proven=sum(fault.is_proven for fault in faults),
        faults_by_kind={kind: sum(fault.kind == kind for fault in faults) for kind in kinds},
        trainers_hit=sum(fault.kind in TRAINER_FAULTS for fault in faults),
        trainers_hit_at_work=sum(fault.at_work for fault in faults),
        rewinds=sum(result.rewinds for result in results),
        rejected=dict(sorted(rejected.items())),
        findings=findings,
        wall_s=round(wall_s, 1),
        passed=not findings,
        results=tuple(results),
    )


class ResultFile:
    """A JSON file that is whole after every round: a campaign that is interrupted keeps what it has shown."""

    def __init__(self, path: Path, circumstances: dict[str, Any]) -> None:
        """Checks that the file can be written.

        Args:
            path: The file.
            circumstances: Date, machine, commit and command.

        Raises:
            InvalidInput: The folder can't be written.
        """
        self._path = path
        self._head = {"benchmark": "chaos", **circumstances, "expected": EXPECTED}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"cannot be written: {error}", field="--out") from error

    def write(self, result: CampaignResult) -> None:
        body = self._head | msgspec.json.decode(encode_json(result))
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(body, indent=1) + "\n")
            aside.replace(self._path)
        except OSError as error:
            raise InvalidInput(f"cannot be written: {error}", field="--out") from error
