"""The checkpoints of one job, as its trainer uses them: which one it starts from, when one is written, which stay."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker.trainer_side import TrainerSide
from consumer.gradient.saved_state import adapter_state
from consumer.model.checkpoint import (
    Checkpoint,
    forget_after,
    keep_newest_and_best,
    latest_checkpoint,
    write_checkpoint,
)
from consumer.ranks.base import Ranks
from consumer.trainer.report import sampled_scores
from contracts.events import AuditRecord, CheckpointWritten, JobEvent, versions_of
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.versions import WeightManifest
from process.crash_points import reach


class KeptCheckpoints:
    """Of one trainer."""

    def __init__(
        self,
        spec: JobSpec,
        folder: RunFolder,
        *,
        side: TrainerSide,
        ranks: Ranks,
        tell: Callable[[JobEvent], None],
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._side = side
        self._ranks = ranks
        self._tell = tell

    def latest(self, chain: list[AuditRecord], *, committed: int) -> Checkpoint | None:
        """The newest one of a version that the chain has, and that the job's iterations still reach."""
        versions = versions_of(chain, min(committed, self._spec.iterations))
        return latest_checkpoint(self._folder.checkpoints, job_id=self._folder.job_id, versions=versions)

    def forget_after(self, iteration: int) -> None:
        """`checkpoint.forget_after`; for who has just shown that it holds the job."""
        forget_after(self._folder.checkpoints, iteration)

    def due_after(self, iteration: int) -> bool:
        done = iteration + 1
        return done % self._spec.trainer.checkpoint_every_iterations == 0 or done == self._spec.iterations

    def write_missing(self, manifest: WeightManifest) -> None:
        """`write`, unless it is there already or nothing was trained."""
        version = manifest.policy_version
        if version > 0 and not self._folder.checkpoint_after(version - 1).exists():
            self.write(manifest)

    def write(self, manifest: WeightManifest) -> None:
        """Of the version that a commit has made; the commit is on the server's disk before (I4)."""
        iteration = manifest.policy_version - 1
        self._side.confirm(iteration)
        target = self._folder.checkpoint_after(iteration)
        write_checkpoint(
            target,
            job_id=self._folder.job_id,
            iteration=iteration,
            weights_digest=manifest.weights_digest,
            save=self._ranks.save,
            adapters=adapter_state(self._ranks.learner.policy),
        )
        reach("consumer.after_checkpoint")
        keep_newest_and_best(
            self._folder.checkpoints, self._spec.trainer.keep_checkpoints, scores=sampled_scores(self._folder)
        )
        self._tell(
            CheckpointWritten(
                at_s=time.time(),
                iteration=iteration,
                directory=self._folder.relative(target),
                weights_digest=manifest.weights_digest,
            )
        )
