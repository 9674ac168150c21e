"""What the journal says of a change, and how the command line asks for it."""

from __future__ import annotations

from contracts.encoding.wire import Record, convert
from onbeat.base.http.access import JOURNAL_PATH
from onbeat.client.gateway import GatewayClient


class JournalLine(Record, frozen=True, kw_only=True):
    """A change of a job that a gateway has made."""

    at_s: float
    """Unix time by the server's clock."""
    who: str
    """The name of the key."""
    action: str
    """submit, cancel, resume, retry, delete, verify, export or cancel_task."""
    job_id: str
    """The job; of cancel_task the task."""
    address: str
    """Where the request came from."""


class JournalLines(Record, frozen=True, kw_only=True):
    """Newest first."""

    lines: tuple[JournalLine, ...]


def ask_for_lines(client: GatewayClient, job_id: str = "", *, limit: int) -> JournalLines:
    """Who changed the job, or any; needs a key with the scope admin."""
    return convert(client.ask("GET", JOURNAL_PATH, params={"limit": limit, "job_id": job_id}), JournalLines)
