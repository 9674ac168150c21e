"""Checks the probes of an audit chain (I11): a function of its records, as `chain.py` is.

What it proves:

- each version has a probe of the same rows, whose log-probs are finite;
- versions with equal weights have equal log-probs.

A run that was made before versions had probes has none, which is a note and no gap.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from contracts.events import AuditRecord
from contracts.probes import FLOORS, LogProbs, ProbedVersion
from contracts.spec.job import JobSpec
from contracts.spec.rollout import ProbeShape


@dataclass
class ChainProbes:
    """The probes of the records that were checked so far. `verify_run` creates it, and `check` changes it."""

    first: ProbedVersion | None = None
    """The first probe of the chain; None before it."""
    num_without: int = 0
    """Commits before it, of versions that have none."""
    logprobs: dict[str, LogProbs] = field(default_factory=dict)
    """Weights digest → the log-probs that it was first published with."""

    def check(self, record: AuditRecord, spec: JobSpec, name: str) -> Iterator[str]:
        """Checks the probe of the version that a commit made, and in iteration 0 that of the version before it.

        Args:
            record: The record of the commit; records have to come in the order of the chain.
            spec: The job.
            name: The record's name, with which each gap begins.

        Yields:
            A sentence for each gap.
        """
        if not record.next_weights_digest and record.probe:
            yield f"{name}: it has the probe of a version, and made none"
            return
        probes = {"probe": record.probe} if record.next_weights_digest else {}
        if record.iteration == 0 or record.first_probe:
            probes["first_probe"] = record.first_probe
        if not any(probes.values()):
            self.num_without += bool(probes)
            if probes and self.first is not None:
                yield f"{name}: the version that it made has no probe, and those before it have one"
            return
        if not spec.rollout.has_probes:
            yield f"{name}: its version has a probe, and the spec asks for none (rollout.probe.rows is 0)"
            return
        versions = {"probe": record.policy_version + 1, "first_probe": 0}
        digests = {"probe": record.next_weights_digest, "first_probe": record.weights_digest}
        for key, probe in probes.items():
            if not probe:
                yield f"{name}: version {versions[key]} has no probe, and the other version of the record has one"
            elif key == "first_probe" and record.iteration:
                yield f"{name}: it names the probe of version 0, which iteration 0 alone begins with"
            else:
                yield from self._check_one(probe, spec, digests[key], f"{name}: the probe of version {versions[key]}")

    def _check_one(self, probe: ProbedVersion, spec: JobSpec, weights_digest: str, name: str) -> Iterator[str]:
        first = self.first = self.first or probe
        if probe.rows != first.rows:
            yield f"{name} has other rows than the first one of the chain"
            return
        logprobs = numbers_of(probe.logprobs)
        # The chain doesn't say whether the model is a mixture of experts, whose probe may have more rows.
        shapes = {spec.rollout.probe_shape(is_rough=is_rough) for is_rough in (False, True)}
        is_possible = any(_may_have(shape, len(logprobs), spec) for shape in shapes)
        if not is_possible or len(probe.logprobs) != len(first.logprobs):
            num_rows = " or ".join(map(str, sorted({shape.num_rows for shape in shapes})))
            yield f"{name} has {len(probe.logprobs)} bytes of log-probs, which {num_rows} rows don't have"
            return
        if not all(math.isfinite(number) for number in logprobs):
            yield f"{name} has log-probs that are not finite"
            return
        known = numbers_of(self.logprobs.setdefault(weights_digest, probe.logprobs))
        if largest_gap(logprobs, known)[0] > FLOORS[spec.model.dtype]:
            yield f"{name} has other log-probs than the same weights had before"

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Returns what a verdict has to say of versions without a probe."""
        if not self.num_without or not spec.rollout.has_probes:
            return ()
        if self.first is not None:
            return (
                f"{self.num_without} iterations were committed before the first probe: nothing shows what the "
                "engines computed with their versions",
            )
        return (
            "no version of this run has a probe (its trainer is one's own, or of an Onbeat before probes): nothing "
            "shows what the engines computed with them",
        )


def _may_have(shape: ProbeShape, num_logprobs: int, spec: JobSpec) -> bool:
    """Returns True where a probe of this shape may have so many log-probs."""
    # A row is shorter than the spec says where the model takes, or the job samples, no longer one.
    most_scored = min(shape.most_scored, spec.rollout.version_probe.tokens // 2)
    return num_logprobs / shape.num_rows in range(1, most_scored + 1)


def probes_of(records: Iterable[AuditRecord]) -> dict[int, ProbedVersion]:
    """Returns the probe of each version of a chain; of one that was made again after a rewind the newest."""
    probes: dict[int, ProbedVersion] = {}
    for record in records:
        if record.kind == "rewind":
            # Versions that it takes back are of the run no more.
            probes = {version: probe for version, probe in probes.items() if version <= record.iteration}
        if record.first_probe:
            probes[0] = record.first_probe
        if record.probe:
            probes[record.policy_version + 1] = record.probe
    return probes


def numbers_of(logprobs: LogProbs) -> array[float]:
    """Returns float32 numbers, whose bytes are little-endian as on all machines that Onbeat runs on, without a rest."""
    numbers = array("f")
    numbers.frombytes(logprobs[: len(logprobs) // numbers.itemsize * numbers.itemsize])
    return numbers


def largest_gap(logprobs: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Returns the largest gap, |a - b| / (1 + |b|), and its place; of no numbers 0."""
    gaps = [abs(number - right) / (1 + abs(right)) for number, right in zip(logprobs, expected, strict=True)]
    largest = max(gaps, default=0.0)
    return largest, gaps.index(largest) if gaps else 0
