"""A trainer that foreign code has ended: the line is kept, and ends the job where the trainer before met the same one.

    KeyError in a library ─▶ kept with the job ─▶ another trainer starts ─┬─▶ progress: forgotten
                                                                         └─▶ the same words: the job fails with them

A fault that is in the code, the model or the data comes again in each trainer. Five of them would say no more, and take
five times as long. What ends a trainer from outside (a signal, Redis, a fence that moved) has no such line.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from pathlib import Path

from broker.job_store import JobStore
from contracts.errors import OnbeatError, kind_and_text

log = logging.getLogger(__name__)


def line_of(error: BaseException) -> str:
    """Returns an exception in a line, with the place that raised it: `AttributeError: no head_dim (cost.py:56)`."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return kind_and_text(error)
    return f"{kind_and_text(error)} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


def ends_job(jobs: JobStore, job_id: str, line: str, *, trainer_epoch: int | None = None) -> bool:
    """Keeps the line by which this trainer ends. Returns True where the job has failed with it.

    Called once in the life of a trainer: a second call would take the first one's line for another trainer's.

    Args:
        jobs: The job store.
        job_id: The job.
        line: As `line_of` returns it.
        trainer_epoch: Of a trainer that holds the job; None before it does.
    """
    # The trainer ends whatever becomes of this: where Redis is away, its successor has no line to compare.
    with contextlib.suppress(OnbeatError):
        if jobs.note_trainer_fault(job_id, line):
            reason = f"{line}; so two trainers in a row ended by the same error, before any progress"
            log.error("job %s failed: %s", job_id, reason)
            jobs.fail(job_id, reason, trainer_epoch=trainer_epoch)
            return True
    return False
