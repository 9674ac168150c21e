"""Where a trainer starts: at the iteration after the newest checkpoint of a version that the audit chain has.

    checkpoint ─▶ ranks ─▶ its versions are written ─▶ the chain has them ─▶ rewind, where the fence is ahead ─▶ open
        │                  (older ones first, where the window needs any)           each iteration of the window ─┘
        ├─ where Redis is older than it, the records between them go back into Redis (onbeat/loop/chain_file.py)
        └─ where there is none, a forked job takes another job's, with its optimizer state; the record of that job's
           chain which made the version stands as `forked` in the record of this one's iteration 0

Consumes:     the fence, the audit chain, in Redis and in the run folder, and the job's checkpoints.
Waits for:    the ranks, to load; Redis and the disk. The lease keeper ends a trainer that is asked to end meanwhile.
Unblocked by: nothing but itself: no generator works for a job before an iteration is open.
Produces:     the version that the ranks hold, and the older ones that the window is sampled with; its open
              iterations, which a trainer before may have left with batches that are published already; a rewind,
              where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType

from consumer.model.checkpoint import Checkpoint, latest_checkpoint, read_checkpoint, set_aside_after
from consumer.trainer.held_job import HeldJob
from contracts.checkpoints import MAX_STATE_BYTES, STATE_FILE
from contracts.encoding.digests import content_digest
from contracts.encoding.json_lines import read_plain
from contracts.errors import InvalidInput, OnbeatError
from contracts.events import AuditRecord, ForkedFrom, record_digest
from contracts.run_folder import RunFolder
from contracts.spec.fork import fork_problem, unusable_fork
from contracts.spec.job import JobSpec
from onbeat.audit.folder import read_spec
from onbeat.loop.chain_file import ChainFile
from onbeat.loop.trained_job import Succession


def start(job: HeldJob) -> Succession:
    """Restores, rewinds where the fence is ahead, and opens the window.

    Raises:
        InvalidInput, FenceViolation: Where the model, the version that it made, or a deterministic run's environment
            is not that of the chain.
    """
    side = job.side
    succession = Succession(job)
    checkpoints = job.folder.checkpoints
    checkpoint = latest_checkpoint(
        checkpoints, job_id=job.job_id, versions=succession.versions, older_than=job.window.older_than
    )
    fork: Checkpoint | None = None
    if checkpoint is not None:
        succession.go_on_from(checkpoint.state.policy_version, checkpoint.state.weights_digest)
        first = checkpoint.state.iteration + 1
    else:
        fork, job.forked = read_fork(job.folder.run_root, job.spec, succession.records)
        # The iterations of a forked job count from 0, whichever version it begins with.
        first = 0
    job.ranks.begin(checkpoint or fork)
    # The lease comes before the files, here and below: a trainer that was fenced off removes none of its successor's.
    side.renew()
    job.weights.store.clear_scratch()
    # A delta stands on the version before it.
    if checkpoint is not None:
        for stored in checkpoint.older:
            job.window.add(job.publish_stored(stored))
    manifest = job.probes.with_probe(job.publish_weights(first))
    succession.take_up(manifest)
    job.settled = manifest
    has_work = succession.has_work(first)
    job.recorder.begin(first if has_work else None)
    if has_work:
        succession.begin(first, lambda first: set_aside_after(checkpoints, first - 1))
    return succession


def read_fork(
    run_root: Path, spec: JobSpec, chain: Sequence[AuditRecord]
) -> tuple[Checkpoint | None, ForkedFrom | UnsetType]:
    """Reads the checkpoint of another job that a job without a checkpoint of its own begins with.

    Args:
        run_root: The root of the run folders.
        spec: The job's.
        chain: The audit chain of this job, which must have begun with the same version.

    Returns:
        The checkpoint, and its link for the audit chain; None and UNSET of a job that isn't forked.

    Raises:
        InvalidInput: Where the checkpoint isn't there, or isn't that of the chain; it names the spec's field.
    """
    fork = spec.fork
    if fork is UNSET:
        return None, UNSET
    source = RunFolder(run_root, fork.job)
    folder = source.checkpoint_after(fork.version - 1)
    try:
        checkpoint = read_checkpoint(folder)
        state = checkpoint.state
        link = _made_by(ChainFile(source), state.policy_version, state.weights_digest)
        if fork.weights_digest not in (UNSET, state.weights_digest):
            raise InvalidInput(f"its weights are {state.weights_digest[:12]}, the job was accepted with others")
        problem = fork_problem(read_spec(source), spec)
        if problem:
            raise InvalidInput(problem)
        forked = ForkedFrom(
            job_id=fork.job,
            policy_version=state.policy_version,
            weights_digest=state.weights_digest,
            state_digest=content_digest(read_plain(folder / STATE_FILE, max_bytes=MAX_STATE_BYTES)),
            link=link,
        )
    except (OnbeatError, OSError) as error:
        raise unusable_fork(fork, source, str(error)) from error
    begun = [record.forked for record in chain if record.policy_version == 0 and record.kind == "commit"]
    if begun and begun[-1] != forked:
        raise InvalidInput(
            f"version {fork.version} of {fork.job} is another than the one that the job began with",
            field="fork.version",
            cure="put that checkpoint back, or submit the job anew",
        )
    return checkpoint, forked


def _made_by(chain: ChainFile, version: int, weights_digest: str) -> str:
    """Returns the digest of the record that made a version. Raises InvalidInput where the chain has none."""
    # The newest first: a rewind may have made the version twice.
    for record in reversed(chain.after("")):
        is_of_version = record.policy_version + 1 == version and record.next_weights_digest == weights_digest
        if record.kind == "commit" and is_of_version:
            return record_digest(record)
    raise InvalidInput(f"its audit chain has no version {version} of these weights")
