"""What is said of batches that were given up, and how the command line asks for it."""

from __future__ import annotations

from contracts.encoding.wire import Record, convert
from contracts.jobs import JobStatus
from onbeat.client.gateway import GatewayClient, segment


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
    """() where they aren't kept: Redis holds those of the newest letters, up to a size (docs/operate.md)."""
    can_retry: bool
    """Whether `POST …/dead/{entry_id}/retry` queues the job again, which samples the batch anew."""
    why_not: str = ""
    """Why it can't be tried again."""


class DeadLetters(Record, frozen=True, kw_only=True):
    """Newest first."""

    letters: tuple[DeadLetter, ...]


def ask_for_letters(client: GatewayClient, job_id: str, *, limit: int) -> tuple[DeadLetter, ...]:
    """The newest dead batches of a job, newest first."""
    return convert(client.of_job("GET", job_id, "/dead", params={"limit": limit}), DeadLetters).letters


def retry(client: GatewayClient, job_id: str, entry_id: str) -> JobStatus:
    """Queues the job of a dead batch again; may be repeated while it is queued."""
    return convert(client.of_job("POST", job_id, f"/dead/{segment(entry_id)}/retry"), JobStatus)
