"""The record of what was trained, as the spec's `[recording]` says, or a little of it; what writes it is an extra.

    published ─ take ─▶ in memory ─ trained, write ─▶ its file ─ iteration committed, commit ─▶ the index

It costs the record, never the run, where a disk refuses, and has no say in what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import UNSET

from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.spec.recording import RecordingSpec
from contracts.versions import WeightManifest
from onbeat.base.process.entry_points import UnknownEntryPoint, load_entry_point
from onbeat.data.rendering.pieces import Pieces

GROUP, NAME = "onbeat.recorders", "rollouts"


class Recorder:
    """The records of one job, of one that has none as it stands here. One thread at a time calls it."""

    @property
    def kept_versions(self) -> frozenset[str]:
        """The folders of versions that stay for the batches that they sampled."""
        return frozenset()

    def begin(self, first: int | None) -> None:
        """Takes up earlier trainers' records; those from `first` on are made again. first: None where nothing is."""

    def takes(self, batch: RolloutBatch) -> bool:
        """Whether the batch is recorded."""
        return False

    def take(
        self,
        batch: RolloutBatch,
        *,
        asked: PromptBatch,
        digest: str,
        manifests: Iterable[WeightManifest],
        engine: Callable[[], str],
        as_trained: RolloutBatch | None = None,
    ) -> None:
        """Keeps a batch that `takes` chose in memory until it is trained.

        manifests: the versions of the window. engine: asks for the kind of engine that samples the job, which stays.
        as_trained: with what stages made of it; None where it is as published.
        """

    def write(
        self,
        batch_id: str,
        *,
        advantages: Sequence[float] | None = None,
        trainer_logprobs: Sequence[bytes | None] | None = None,
    ) -> None:
        """Writes a batch that was taken; any other is none of the record."""

    def commit(self, iteration: int, *, deviation: float = 1.0) -> None:
        """Lists what was written of an iteration that is committed, and removes what is kept no longer."""


def recording_of(spec: JobSpec) -> RecordingSpec | None:
    """Says what of a job is recorded; None: nothing.

    A spec without the table has about one batch of each iteration, in 64 MiB, and no version more than without.
    """
    policy = spec.recording
    if policy is UNSET:
        return RecordingSpec(share=1 / spec.rollout.batches_per_iteration, max_bytes=64 * 1024**2, max_version_bytes=0)
    return policy if policy and (policy.share or policy.evaluations) else None


def recorder_of(folder: RunFolder, spec: JobSpec, pieces: Callable[[], Pieces]) -> Recorder:
    """Makes that of a job. pieces: makes the texts of its tokens.

    Raises UnknownEntryPoint where nothing writes the records that the spec asks for.
    """
    policy = recording_of(spec)
    if policy is None:
        return Recorder()
    try:
        make = load_entry_point(GROUP, NAME, field="recording")
    except UnknownEntryPoint:
        if spec.recording is UNSET:
            return Recorder()
        raise
    return make(folder, spec, policy, pieces=pieces())
