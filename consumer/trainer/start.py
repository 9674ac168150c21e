"""Where a trainer starts: at the iteration after the newest checkpoint of a version that the audit chain has.

    checkpoint ─▶ ranks ─▶ its versions are written ─▶ the chain has them ─▶ rewind, where the fence is ahead ─▶ open
        │                  (older ones first, where the window needs any)           each iteration of the window ─┘
        ├─ where Redis is older than it, the records between them go back into Redis (onbeat/loop/chain_file.py)
        └─ where there is none, a forked job takes another job's (fork.py)

Consumes:     the fence, the audit chain, in Redis and in the run folder, and the job's checkpoints.
Waits for:    the ranks, to load; Redis and the disk. The lease keeper ends a trainer that is asked to end meanwhile.
Unblocked by: nothing but itself: no generator works for a job before an iteration is open.
Produces:     the version that the ranks hold, and the older ones that the window is sampled with; its open
              iterations, which a trainer before may have left with batches that are published already; a rewind,
              where there is one.
"""

from __future__ import annotations

from consumer.model.checkpoint import latest_checkpoint, set_aside_after
from consumer.trainer.fork import read_fork
from consumer.trainer.held_job import HeldJob
from onbeat.loop.trained_job import Succession


def start(held: HeldJob) -> Succession:
    """Restores, rewinds where the fence is ahead, and opens the window.

    Raises InvalidInput or FenceViolation where the model, the version that it made, or a deterministic run's
    environment is not the one of the chain.
    """
    side, succession, checkpoints = held.side, Succession(held), held.folder.checkpoints
    checkpoint = latest_checkpoint(
        checkpoints, job_id=held.job_id, versions=succession.versions, older_than=held.window.older_than
    )
    if checkpoint is not None:
        succession.go_on_from(checkpoint.state.policy_version, checkpoint.state.weights_digest)
    first, fork = checkpoint.state.iteration + 1 if checkpoint else 0, None
    if checkpoint is None:
        fork, held.forked = read_fork(held.folder.run_root, held.spec, succession.records)
    held.ranks.begin(checkpoint or fork)
    # The lease comes before the files, here and below: a trainer that was fenced off removes none of its successor's.
    side.renew()
    held.weights.clear_scratch()
    # A delta stands on the version before it.
    for stored in checkpoint.older if checkpoint else ():
        held.window.add(held.publish_stored(stored))
    manifest = held.publish_weights(first)
    succession.take_up(manifest)
    held.settled = manifest
    # Without any, every iteration is committed, and the last weights are in a checkpoint.
    has_work = succession.committed < held.spec.last_iteration or first != held.spec.iterations
    held.recorder.begin(first if has_work else None)
    if has_work:
        succession.begin(first, lambda first: set_aside_after(checkpoints, first - 1))
    return succession
