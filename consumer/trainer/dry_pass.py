"""The dry pass at a trainer's start: the job's largest micro-batch has room, or the job ends with the number to set.

    room          the peak, in the log and as an event of the job          ─▶ the first batch
    no room       one process tries halves of it, down to one row ─▶ the job fails with the first that has room;
                  of several ranks the job fails at once, with a half that was not tried

Consumes:     an open window, whose batches generators sample meanwhile; where they take turns with the trainer, its
              turn.
Waits for:    one pass of the ranks.
Unblocked by: the ranks.
Produces:     `MemoryMeasured`, or the job's end.

A trainer that is killed meanwhile has committed nothing, so its successor makes the pass again. The one that was killed
may hold its memory a moment longer, so a successor of one process that finds no room tries once more before it says so.

A trainer that goes on with a job which has committed an iteration makes none: the batches of the trainer before had
room, and a takeover is to take no longer than it must. Memory that runs out there ends the trainer, and the job where
the next one has no room either (repeated_fault.py).
"""

from __future__ import annotations

import logging
import time

from consumer.model.memory import LEAST_TOKENS, cure_of, device_bytes, has_words_of_memory
from consumer.ranks.dry_pass import DryPass, LongestRow, longest_row
from consumer.trainer.held_job import HeldJob
from contracts.encoding.arrays import ITEM_BYTES
from contracts.encoding.wire import changed
from contracts.errors import InvalidInput, Unavailable
from contracts.events import MemoryMeasured, TrainerStarted

FIELD = "trainer.max_tokens_per_micro_batch"
PREDECESSOR_GONE_S = 3.0
"""By then the system has the memory back of a trainer that was killed, and of its ranks."""

log = logging.getLogger(__name__)


def dry_pass(job: HeldJob) -> None:
    """Passes the largest micro-batch of a job, and reports its memory.

    Raises:
        InvalidInput: There is no room; it names the key, and the number to set.
        Unavailable: As the ranks do.
    """
    policy = job.ranks.learner.policy
    prompts = job.window.prompt_batches.training_prompts
    row = longest_row(
        job.spec,
        longest_prompt=max(len(prompt.token_ids) for prompt in prompts) // ITEM_BYTES,
        context_tokens=policy.context_tokens,
    )
    try:
        passed = _passed(job, row)
    except Unavailable as error:
        if not has_words_of_memory(error.foreign):
            raise
        # One of several ranks had no room, and they have lost step: none of them can try a smaller pass.
        raise _refusal(job, row, error.foreign, fitting=None) from error
    if passed.problem and _has_predecessor(job):
        log.warning(
            "the dry pass is repeated, because the trainer before may still have held memory: %s", passed.problem
        )
        job.pause(PREDECESSOR_GONE_S)
        passed = _passed(job, row)
    if passed.problem:
        fitting = _fitting(job, row)
        raise _refusal(job, row, passed.problem, fitting=fitting)
    if not passed.peak_bytes:
        return
    device = policy.model.device
    measured = MemoryMeasured(
        at_s=time.time(),
        device=device.type,
        num_tokens=passed.num_tokens,
        peak_bytes=passed.peak_bytes,
        usable_bytes=device_bytes(device),
    )
    log.info("%s", measured.in_words, extra={"facts": {"peak_bytes": measured.peak_bytes}})
    job.tell(measured)


def _has_predecessor(job: HeldJob) -> bool:
    """Returns True where another trainer of the job has begun before this one, which has said so of itself by now."""
    events = [event for _, event in job.jobs.events_after(job.job_id, "0-0")]
    return sum(isinstance(event, TrainerStarted) for event in events) > 1


def _passed(job: HeldJob, row: LongestRow) -> DryPass:
    """Has the ranks make one pass, under the deadline of an iteration. Raises as the keeper and the ranks do."""
    job.keeper.check()
    with job.keeper.training(longest_pass_s=job.spec.timeouts.iteration_s):
        return job.ranks.dry_pass(row)


def _refusal(job: HeldJob, row: LongestRow, problem: str, *, fitting: int | None) -> InvalidInput:
    """Returns the error for a pass without room. fitting: as `cure_of` takes it."""
    says = (
        f"out of memory in the dry pass, of {row.pass_tokens} tokens in rows of up to "
        f"{row.prompt_tokens + row.response_tokens}: {problem}"
    )
    cure = cure_of(job.spec, loads=False, fitting=fitting)
    field = FIELD
    if fitting == 0:
        # A row is never cut: what bounds it is the key that is at fault.
        field, _ = job.spec.longest_completion()
    return InvalidInput(says, field=field, cure=cure)


def _fitting(job: HeldJob, row: LongestRow) -> int:
    """Returns the first half, quarter, … of the bound of a pass that has room; 0 where none has.

    A pass has one row at least, so that no bound below a row helps.
    """
    least = max(LEAST_TOKENS, row.prompt_tokens + row.response_tokens)
    tokens = row.pass_tokens
    while tokens > least:
        tokens = max(least, tokens // 2)
        if not _passed(job, changed(row, pass_tokens=tokens)).problem:
            return tokens
    return 0
