"""Where a trainer starts: at the iteration after the newest checkpoint of a version that the audit chain has.

    checkpoint ─▶ ranks ─▶ its versions are written ─▶ the chain has them ─▶ rewind, where the fence is ahead ─▶ open
        │                  (older ones first, where the window needs any)           each iteration of the window ─┘
        └─ where Redis is older than it, the records between them go back into Redis (onbeat/loop/chain_file.py)

Consumes:     the fence, the audit chain, in Redis and in the run folder, and the job's checkpoints.
Waits for:    the ranks, to load; Redis and the disk. The lease keeper ends a trainer that is asked to end meanwhile.
Unblocked by: nothing but itself: no generator works for a job before an iteration is open.
Produces:     the version that the ranks hold, and the older ones that the window is sampled with; its open
              iterations, which a trainer before may have left with batches that are published already; a rewind,
              where there is one.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from broker.fence import FenceState
from consumer.model.checkpoint import Checkpoint, latest_checkpoint, set_aside_after
from consumer.trainer.held_job import HeldJob
from contracts.events import TrainerStarted, record_digest
from contracts.spec import JobSpec
from onbeat.loop.chain import (
    check_same_environment,
    check_same_run,
    furthest_commit,
    needs_rewind,
    rewind_record,
)
from onbeat.loop.chain_file import read_chain, restored
from onbeat.process.crash_points import reach

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Started:
    """What the loop goes on with."""

    first: int | None
    """The iteration that is trained first; None where every one is committed."""
    last_link: str
    """Digest of the newest record of the audit chain, which the next one has to name."""
    furthest: int
    """The last iteration that was ever committed, rewound or not; -1 for none."""


def start(held: HeldJob) -> Started:
    """Restores, rewinds where the fence is ahead, and opens the window.

    Raises InvalidInput or FenceViolation where the model, the version that it made, or a deterministic run's
    environment is not the one of the chain.
    """
    side, job_id = held.side, held.folder.job_id
    known = read_chain(held.jobs, job_id, held.spec, held.chain_file)
    # The newest one of a version that the chain has, and that the job's iterations still reach.
    versions = known.versions(side.fence().committed, held.spec.iterations)
    checkpoint = latest_checkpoint(
        held.folder.checkpoints, job_id=job_id, versions=versions, older_than=held.window.older_than
    )
    if checkpoint is not None:
        state = checkpoint.state
        known = restored(known, side, policy_version=state.policy_version, weights_digest=state.weights_digest)
    fence, chain, last_link = side.fence(), known.records, known.last_link
    first = next_iteration(checkpoint)
    held.ranks.begin(checkpoint)
    # The lease comes before the files, here and below: a trainer that was fenced off removes none of its successor's.
    side.renew()
    held.weights.clear_scratch()
    # A delta stands on the version before it.
    for stored in checkpoint.older if checkpoint else ():
        held.window.add(held.publish_stored(stored))
    manifest = held.publish_weights(first)
    check_same_run(chain, manifest, held.spec)
    check_same_environment(chain, held.window.environment, held.spec)
    held.window.add(manifest)
    held.settled = manifest
    epoch = side.trainer_epoch
    held.tell(TrainerStarted(at_s=time.time(), trainer_epoch=epoch, next_iteration=first, resumed=bool(chain)))
    has_work = not is_finished(fence, checkpoint, held.spec)
    held.recorder.begin(first if has_work else None)
    if has_work:
        if needs_rewind(fence, first, held.window.digests):
            log.warning("the fence is at iteration %d, the newest checkpoint resumes at %d", fence.iteration, first)
            record = rewind_record(last_link, manifest, trainer_epoch=epoch)
            side.rewind(record)
            held.chain_file.append(record)
            last_link = record_digest(record)
            held.weights.remove_after(first)
        _open(held, first)
    return Started(first=first if has_work else None, last_link=last_link, furthest=furthest_commit(chain))


def _open(held: HeldJob, first: int) -> None:
    """Announces the versions, then opens the window, or goes on with what is open of it: the fence opens no iteration
    whose version has no manifest. Rollouts that generators have published into it are trained in their turn."""
    for manifest in held.window.manifests:
        held.side.publish_weights(manifest, oldest_kept=held.window.oldest_version(first))
    set_aside_after(held.folder.checkpoints, first - 1)
    for opening in held.window.begin(first):
        held.side.open_iteration(opening, held.window.digests)
        reach("consumer.after_opening")


def next_iteration(checkpoint: Checkpoint | None) -> int:
    """The first one that was not trained yet."""
    return checkpoint.state.iteration + 1 if checkpoint else 0


def is_finished(fence: FenceState, checkpoint: Checkpoint | None, spec: JobSpec) -> bool:
    """Every iteration is committed, and the last weights are in a checkpoint."""
    return fence.committed >= spec.last_iteration and next_iteration(checkpoint) == spec.iterations
