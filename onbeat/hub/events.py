"""The lines that the process of a fetch and its parent exchange: JSON, one record a line.

parent ─ HubOrder, on stdin ─▶ fetch_process.py ─ HubEvent, HubEvent, … on stdout ─▶ parent

Parent and process are of one installation, and live together: nothing else reads these lines.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.wire import Record
from onbeat.hub.store import HubRequest

Count = Annotated[int, Meta(ge=0, le=2**62)]


class HubOrder(Record, frozen=True, kw_only=True):
    """The order of a fetch."""

    request: HubRequest
    root: str
    """The folder of all that was fetched."""
    max_bytes: Count
    """Bytes that this folder may take."""


class Fetched(Record, frozen=True, kw_only=True):
    """A request that is on this host, whole."""

    request: HubRequest
    """At the commit that its revision had."""
    folders: tuple[str, ...]
    num_bytes: Count
    """All bytes of its files."""
    is_new: bool
    """False where it was there already."""


class HubEvent(Record, frozen=True, kw_only=True):
    """A step of a fetch, or its end, which has `fetched` or a problem."""

    bytes_done: Count = 0
    """Bytes that came over the network."""
    bytes_total: Count = 0
    """Bytes of the request's files; 0 before they are known."""
    is_local: bool = False
    """True while this host compares a file, or waits for another process that fetches the same."""
    fetched: Fetched | UnsetType = UNSET
    problem: str = ""
    """Why it can't be fetched; "" where it can."""
    cure: str = ""
    is_lasting: bool = False
    """True for a problem of the request itself, False for one of the network or the disk."""
