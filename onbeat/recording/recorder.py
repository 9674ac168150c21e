"""Writes what was trained into the run folder, where the spec's `[recording]` says so (records.py).

    published ─ take ─▶ in memory ─ trained, write ─▶ its file ─ iteration committed ─▶ the index; what is old goes

A disk that refuses costs the record, never the run: it is counted, logged, and tried again with the next batch. Nothing
here has a say in what is trained.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.encoding.wire import encode
from contracts.errors import OnbeatError
from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.base.process.crash_points import reach
from onbeat.base.process.folders import make_missing
from onbeat.data.rendering.token_texts import TokenTexts
from onbeat.recording.files import INDEX, RecordedFiles, folders_of, parts_of, write_record
from onbeat.recording.records import RecordedBatch, RecordedIteration, RecordedSample, RecordedSummary
from onbeat.recording.samples import samples_of
from onbeat.weights.files.tensor_folder import remove_folders, remove_scratch

log = logging.getLogger(__name__)

MOST_SAMPLES = 16
"""Completions of an iteration, of each purpose, that trackers get."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A batch that waits to be written."""

    prompts: PromptBatch
    """Under the version that sampled the batch."""
    batch: RolloutBatch
    """As published."""
    digest: str
    manifest: WeightManifest | None
    engine: str
    as_trained: RolloutBatch
    """With columns, and the rewards that they add."""


class Recorder:
    """Records the batches of one job, under one trainer epoch; the spec's policy chooses them, and may choose none.

    The trainer makes it, and one thread at a time calls it.
    """

    def __init__(self, folder: RunFolder, spec: JobSpec, *, token_texts: Callable[[], TokenTexts]) -> None:
        """Touches no file.

        Args:
            folder: The job's run folder.
            spec: The job's spec.
            token_texts: Loads what makes the texts of tokens, before the first record is written.
        """
        self._policy = spec.recording_policy
        self._spec = spec
        self._load_token_texts = token_texts
        self._files = RecordedFiles(folder)
        self._waiting: dict[str, Recorded] = {}
        self._written: dict[str, RecordedSummary] = {}
        """Batches of the open iteration that are on disk."""
        self._manifests: dict[str, WeightManifest] = {}
        self._bytes: dict[int, int] = {}
        """Iteration → bytes of its records."""
        self._versions: dict[int, Mapping[str, int]] = {}
        """Recorded iteration → the folders of its versions, and their bytes."""
        self._samples: list[RecordedSample] = []
        """Completions of the open iteration for trackers, MOST_SAMPLES of each purpose."""
        self._engine = ""
        self._num_left_out = 0
        self._has_complained = False

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return self._load_token_texts()

    @property
    def kept_versions(self) -> frozenset[str]:
        """The folders of versions that stay for the batches that they sampled: the newest, as far as there is room."""
        folders: set[str] = set()
        left = self._policy.max_version_bytes
        for iteration in sorted(self._versions, reverse=True):
            new = {folder: size for folder, size in self._versions[iteration].items() if folder not in folders}
            if sum(new.values()) > left:
                break
            left -= sum(new.values())
            folders |= new.keys()
        return frozenset(folders)

    def begin(self, first: int | None) -> None:
        """Takes up the records of earlier trainers, and removes those that are made again.

        Args:
            first: The iteration that is trained first; None where all are committed.
        """
        try:
            remove_scratch(self._files.path)
            for iteration in self._files.iterations():
                if first is not None and iteration >= first:
                    self._remove(iteration)
                    continue
                self._bytes[iteration] = self._files.num_bytes(iteration)
                self._versions[iteration] = self._index_of(iteration)
        except OSError as error:
            self._complain(f"earlier records: {error.strerror}")

    def takes(self, batch: RolloutBatch) -> bool:
        """Returns True where the batch is recorded."""
        return self._spec.records(batch.batch_id, batch.purpose)

    def take(
        self,
        batch: RolloutBatch,
        *,
        prompts: PromptBatch,
        digest: str,
        manifests: Iterable[WeightManifest],
        engine: Callable[[], str],
        as_trained: RolloutBatch | None = None,
    ) -> None:
        """Keeps a batch that `takes` chose in memory until it is trained.

        Args:
            batch: The batch as published.
            prompts: The prompts that it answers.
            digest: The digest of the batch as published.
            manifests: The versions of the window.
            engine: Asks for the kind of engine that samples the job, which stays the same.
            as_trained: The batch with what stages made of it; None where it is trained as published.
        """
        self._engine = self._engine or engine()
        version = batch.policy_version, batch.weights_digest
        manifest = next(
            (known for known in manifests if (known.policy_version, known.weights_digest) == version),
            None,
        )
        self._waiting[batch.batch_id] = Recorded(
            prompts=replace(prompts, policy_version=batch.policy_version, weights_digest=batch.weights_digest),
            batch=batch,
            digest=digest,
            manifest=manifest,
            engine=self._engine,
            as_trained=as_trained or batch,
        )

    def write(
        self,
        batch_id: str,
        *,
        advantages: Sequence[float] | None = None,
        trainer_logprobs: Sequence[bytes | None] | None = None,
    ) -> None:
        """Writes a batch that was taken; does nothing for any other."""
        taken = self._waiting.pop(batch_id, None)
        if taken is None:
            return
        try:
            record = self._record(taken, advantages, trainer_logprobs)
            self._write_batch(record)
        except (OSError, OnbeatError) as error:
            self._left_out(batch_id, error.strerror or "" if isinstance(error, OSError) else str(error))
            return
        if taken.manifest is not None:
            self._manifests[taken.manifest.directory] = taken.manifest
        self._written[batch_id] = _summary(taken)
        if self._spec.trackers:
            self._note_samples(record)

    def commit(self, iteration: int, *, deviation: float = 1.0) -> None:
        """Lists what was written of an iteration that is committed, and removes what is kept no longer.

        Args:
            iteration: The number of the iteration.
            deviation: The number that its advantages were divided by.
        """
        # Training batches come before those of an evaluation.
        written = sorted(self._written.values(), key=lambda summary: (summary.purpose != "train", summary.index))
        index = RecordedIteration(
            iteration=iteration,
            batches=tuple(written),
            versions=folders_of(self._manifests.values()),
            deviation=deviation,
            num_left_out=self._num_left_out,
        )
        if written or self._num_left_out:
            self._write_index(index)
        self._waiting.clear()
        self._written, self._manifests, self._num_left_out = {}, {}, 0
        self._has_complained = False
        for old in sorted(self._bytes)[: -self._policy.keep_iterations]:
            self._remove(old)

    def take_samples(self) -> list[RecordedSample]:
        """Returns completions of the iteration that was committed last, for trackers; none in a job without any."""
        samples, self._samples = self._samples, []
        return samples

    def _note_samples(self, record: RecordedBatch) -> None:
        purpose = record.batch.purpose
        left = MOST_SAMPLES - sum(sample.purpose == purpose for sample in self._samples)
        self._samples += itertools.islice(samples_of(record), max(0, left))

    def _record(
        self, taken: Recorded, advantages: Sequence[float] | None, trainer_logprobs: Sequence[bytes | None] | None
    ) -> RecordedBatch:
        rollouts = [rollout for group in taken.batch.groups for rollout in group.rollouts]
        tokens = sorted({token for rollout in rollouts for token in unpack_int32(rollout.completion.token_ids)})
        rewards = tuple(rollout.reward for group in taken.as_trained.groups for rollout in group.rollouts)
        return RecordedBatch(
            prompt_batch=taken.prompts,
            batch=replace(taken.batch, columns=taken.as_trained.columns),
            batch_digest=taken.digest,
            # Sampled again, a batch is compared token by token: the version's probe says nothing more.
            manifest=taken.manifest and replace(taken.manifest, probe=UNSET),
            engine=taken.engine,
            rewards=rewards if self._spec.stages else UNSET,
            advantages=None if advantages is None else tuple(advantages),
            trainer_logprobs=None if trainer_logprobs is None else tuple(trainer_logprobs),
            piece_ids=pack_int32(tokens),
            pieces=self._token_texts.of(tokens),
        )

    def _write_batch(self, record: RecordedBatch) -> None:
        """Raises OSError, and OnbeatError where it is larger than all records may be."""
        data = encode(record)
        iteration = record.batch.iteration
        if not self._make_room(len(data), iteration):
            raise OnbeatError(f"{len(data)} bytes don't fit beside this iteration's", field="recording.max_bytes")
        path = self._files.path_of(record.batch.batch_id)
        make_missing(path.parent)
        self._bytes.setdefault(iteration, 0)
        self._bytes[iteration] += write_record(path, data)
        reach("consumer.recording")

    def _write_index(self, index: RecordedIteration) -> None:
        path = self._files.folder_of(index.iteration) / INDEX
        try:
            make_missing(path.parent)
            self._bytes[index.iteration] = self._bytes.get(index.iteration, 0) + write_record(path, index)
        except OSError as error:
            self._complain(f"iteration {index.iteration}: {error.strerror}")
            return
        self._versions[index.iteration] = index.versions

    def _make_room(self, num_bytes: int, iteration: int) -> bool:
        """Removes the oldest iterations until so many bytes fit; False where they don't beside those of `iteration`."""
        if self._bytes.get(iteration, 0) + num_bytes > self._policy.max_bytes:
            return False
        while sum(self._bytes.values()) + num_bytes > self._policy.max_bytes:
            self._remove(min(recorded for recorded in self._bytes if recorded != iteration))
        return True

    def _remove(self, iteration: int) -> None:
        self._bytes.pop(iteration, None)
        self._versions.pop(iteration, None)
        folder = self._files.folder_of(iteration)
        if folder.is_dir():
            remove_folders([folder])

    def _index_of(self, iteration: int) -> Mapping[str, int]:
        try:
            return self._files.index(iteration).versions
        except OnbeatError:
            return {}  # without an index no batch of it is shown, or sampled again

    def _left_out(self, batch_id: str, why: str) -> None:
        self._num_left_out += 1
        self._complain(f"batch {batch_id}: {why}")

    def _complain(self, what: str) -> None:
        """Says it once an iteration: the run goes on."""
        if not self._has_complained:
            log.warning("the rollouts of this iteration can't be recorded; the run goes on: %s", what)
        self._has_complained = True


def _summary(taken: Recorded) -> RecordedSummary:
    batch = taken.batch
    rewards = [rollout.reward for group in taken.as_trained.groups for rollout in group.rollouts]
    return RecordedSummary(
        batch_id=batch.batch_id,
        purpose=batch.purpose,
        index=parts_of(batch.batch_id)[2],
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        generator_id=batch.generator_id,
        num_groups=len(batch.groups),
        num_completions=batch.num_completions,
        reward_mean=math.fsum(reward / len(rewards) for reward in rewards),
        batch_digest=taken.digest,
    )
