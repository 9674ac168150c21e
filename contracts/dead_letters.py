"""A dead letter tells of one batch that was given up. The gateway answers with it, and `onbeat watch` shows it."""

from __future__ import annotations

from contracts.encoding.wire import Record


class DeadPrompt(Record, frozen=True, kw_only=True):
    """A prompt of a dead batch, as the data set or an environment wrote it: show it as text, never as markup."""

    prompt_id: str
    text: str


class DeadLetter(Record, frozen=True, kw_only=True):
    """A batch that failed too often."""

    entry_id: str
    """Its entry of the job's stream of dead batches."""
    at_s: float
    """Unix time by the server's clock."""
    batch_id: str
    iteration: int
    reason: str
    attempts: int
    """Times that it was handed out; 0 in a letter that an older Onbeat wrote."""
    prompts: tuple[DeadPrompt, ...] = ()
    """() where they aren't kept: Redis holds those of the newest letters, up to a size (docs/redis.md)."""
    can_retry: bool
    """True where a resume of the job, or `POST …/dead/{entry_id}/retry`, samples the batch anew."""
    why_not: str = ""
    """Why it can't be tried again."""


class DeadLetters(Record, frozen=True, kw_only=True):
    """The dead letters of a job, newest first."""

    letters: tuple[DeadLetter, ...]
