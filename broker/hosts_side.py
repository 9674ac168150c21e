"""The hosts whose ranks are one trainer: a host's side of scripts/hosts.lua, which says what each call does."""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from broker.connection.client import Broker
from broker.keys import OpenKeys
from contracts.encoding.wire import Record, decode
from contracts.errors import NotFound

REFUSALS = {
    "full": "there are hosts enough",
    "late": "the others have begun",
    "other_code": "it runs another Onbeat",
    "other_torch": "it has another torch",
    "other_device": "its ranks compute on another device, or with other threads",
    "other_cpu": "it has another kind of CPU, whose bits may differ",
    "unreachable": "it cannot reach the first host",
}
"""Why a host's offer is refused, in words."""
MOST_NAMED = 8
"""Hosts that are named in one line."""


class HostKind(Record, frozen=True, kw_only=True):
    """The kind of a host: the bits of a gradient depend on it, so that it is alike on all hosts of a trainer (I7)."""

    code: str
    """Digest of our packages' files."""
    torch: str
    device: str
    """With the threads that each rank computes with."""
    cpu: str


class Member(Record, frozen=True, kw_only=True):
    """A host of a generation."""

    host: str
    """The id of its consumer, of this life."""
    ranks: int
    joined_ms: int
    until_ms: int
    """The end of its lease, by the server's clock."""


class Refused(Record, frozen=True, kw_only=True):
    """A host whose offer was refused."""

    host: str
    why: str
    at_ms: int


class HostGroup(Record, frozen=True, kw_only=True):
    """The hosts of a job, as the server holds them.

    scripts/hosts.lua alone writes it; each call of HostsSide answers it.
    """

    number: int
    formed: int
    """The number of the generation that stands; 0 for none."""
    sealed: int
    """The number that it got when it was sealed; 0 while it forms."""
    members: tuple[Member, ...]
    """In the order in which they joined; the first one leads."""
    refused: tuple[Refused, ...]
    """Since this generation, or the last one, was formed; oldest first."""
    reason: str
    """Why the last generation ended."""
    least: int = 0
    most: int = 0
    lease_ms: int = 0
    kind: HostKind | None = None
    address: str = ""
    """HOST PORT where its leader listens."""
    key: str = ""
    """In hex; orders and answers of its ranks are signed by one that is made of it."""

    @property
    def in_words(self) -> str:
        """Says which hosts have offered their ranks, and which were refused and why."""
        hosts = [member.host for member in self.members]
        still_out = [refusal for refusal in self.refused if refusal.host not in hosts][-MOST_NAMED:]
        refused = ", ".join(f"{refusal.host}: {REFUSALS.get(refusal.why, refusal.why)}" for refusal in still_out)
        return f"offered: {', '.join(hosts[:MOST_NAMED]) or 'none'}; refused: {refused or 'none'}"


def hosts_waited_for(broker: Broker, job_id: str, *, least: int, now_s: float) -> str:
    """Says what a job of several hosts waits for while no trainer holds it.

    Args:
        broker: The broker.
        job_id: The job.
        least: The fewest hosts that make its trainer up.
        now_s: Unix time by the server's clock.
    """
    with broker.call():
        packed: bytes | None = broker.redis.get(broker.job_keys(job_id).hosts)  # type: ignore[assignment]
    if packed is None:
        return f"{least} hosts, and none offers its ranks: start consumers with ONBEAT_NETWORK"
    group = decode(packed, HostGroup)
    # until_ms is ms of the server's clock, now_s seconds of it.
    if any(member.until_ms <= 1000 * now_s for member in group.members):
        group = replace(group, members=(), sealed=0)  # as the script has it in its next call
    if group.sealed:
        return f"the ranks of {len(group.members)} hosts"
    return f"{least} hosts, {len(group.members)} are there ({group.in_words})"


class HostsSide:
    """The offers of one host to one job; the host's consumer creates it, for the life of a trainer.

    Each call answers its outcome and the job's hosts as they then stand.
    """

    def __init__(self, broker: Broker, job_id: str, *, host: str, ranks: int) -> None:
        self._broker = broker
        self._job_id = job_id
        self._host = host
        self._ranks = ranks

    def form(self, about: HostGroup) -> tuple[bool, HostGroup]:
        """Begins a generation, which this host leads.

        Args:
            about: Its least, most, lease_ms, kind, address and key.

        Returns:
            True where it was begun, also by a call whose answer was lost; False where another one stands.
        """
        names = ("least", "most", "lease_ms", "kind", "address", "key")
        outcome, group = self._call("form", about={name: getattr(about, name) for name in names})
        return outcome == "formed", group

    def look(self, *, waits: bool = False) -> tuple[Literal["none", "forming", "late"], HostGroup]:
        """Looks whether a generation stands; `late`: it is sealed. waits: notes then that this host would come."""
        return self._call("look", about={"waits": waits})  # type: ignore[return-value]

    def join(self, kind: HostKind, *, reaches: bool = True) -> tuple[str, HostGroup]:
        """Offers this host's ranks.

        Args:
            kind: The kind of this host.
            reaches: It reaches the leader at its address.

        Returns:
            `joined`, `none` where no generation forms now, or a word of REFUSALS.
        """
        return self._call("join", about={"kind": kind, "reaches": reaches})

    def seal(self, formed: int) -> tuple[Literal["sealed", "few", "gone"], HostGroup]:
        """Closes the generation `formed` to further hosts, so that all may start; the leader calls it."""
        return self._call("seal", formed=formed)  # type: ignore[return-value]

    def renew(self, formed: int, sealed: int) -> tuple[Literal["forming", "sealed", "gone"], HostGroup]:
        """Renews this host's lease. sealed: the number under which its ranks run; 0 while none do."""
        return self._call("renew", formed=formed, sealed=sealed)  # type: ignore[return-value]

    def leave(self, formed: int, reason: str) -> None:
        """Ends the generation, unless it has ended."""
        self._call("leave", formed=formed, about={"reason": reason})

    def _call(self, call: str, *, formed: int = 0, sealed: int = 0, about: object = None) -> tuple[str, HostGroup]:
        """Runs one call of scripts/hosts.lua. Raises NotFound for a job that was removed."""
        outcome, *packed = self._broker.run(
            "hosts",
            job=self._job_id,
            call=call,
            host=self._host,
            ranks=self._ranks,
            formed=formed,
            sealed=sealed,
            about=about,
        )
        if outcome == b"unknown":
            raise NotFound("there is no such job", field=OpenKeys(self._job_id).job, cure="`onbeat jobs` lists them")
        return outcome.decode(), decode(packed[0], HostGroup)
