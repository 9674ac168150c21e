"""The group of hosts whose ranks are one trainer: its functions, who calls them when, and what is forbidden.

Hosts offer themselves. One forms a generation, others join it, its leader seals it, and then each starts the ranks of
its place in the list that was sealed. Each renews its membership; a member whose lease is over ends the generation, and
with it the trainer's epoch.

A number is handed out at each forming and each sealing. `off` names the checks that a mutation leaves out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model.explorer import Exploration, Result
from tests.model.server import Off


class Group(NamedTuple):
    """What the server holds."""

    number: int = 0
    """The newest that was handed out, as far as this server knows."""
    formed: int = 0
    """The number of the generation that stands; 0 for none."""
    sealed: int = 0
    """The number that it got when it was sealed; 0 while it forms."""
    members: tuple[int, ...] = ()
    """Hosts in the order in which they joined; the first one leads."""
    lapsed: tuple[int, ...] = ()
    """Members whose leases are over."""
    holder: int = 0
    """The sealed number under which a trainer holds the newest epoch; 0 for none."""


class Host(NamedTuple):
    """What a host knows."""

    name: int
    """Host and life: a process that starts again has another name."""
    formed: int = 0
    """The generation that it formed or joined; 0 for none."""
    sealed: int = 0
    """That under which its ranks run; 0 while none do."""
    members: tuple[int, ...] = ()
    """Those that its ranks were told."""


class State(NamedTuple):
    group: Group
    disk: Group | None
    """What a server that dies, or another one that takes its place, knows again."""
    hosts: tuple[Host, ...]
    clock: int
    """The newest number that was ever handed out."""
    faults: int


class Bounds(NamedTuple):
    """The instance that is explored."""

    hosts: int = 3
    least: int = 2
    most: int = 2
    faults: int = 2


class Move(NamedTuple):
    name: str
    who: int
    state: State
    is_fault: bool = False
    breaks: str = ""
    place: tuple[int, ...] = ()


CLOCK = "group.clock"
"""Without this check it matters how far apart two numbers are."""

# Functions


def ended(group: Group, off: Off) -> Group:
    """end_group: no trainer of it holds an epoch any more."""
    return Group(group.number, holder=group.holder if "end.fences" in off else 0)


def standing(group: Group, off: Off) -> Group:
    """Every function looks first whether a member's lease is over."""
    return ended(group, off) if group.lapsed and "group.lapsed" not in off else group


def _next_number(group: Group, clock: int, off: Off) -> int:
    return group.number + 1 if CLOCK in off else max(group.number, clock) + 1


def form(group: Group, host: int, *, clock: int, off: Off) -> tuple[str, Group]:
    group = standing(group, off)
    if group.formed and group.members[:1] == (host,) and not group.sealed and "form.again" not in off:
        return "formed", group
    if group.formed and "form.stands" not in off:
        return "stands", group
    number = _next_number(group, clock, off)
    return "formed", Group(number, number, 0, (host,), (), group.holder)


def join(group: Group, host: int, *, most: int, off: Off) -> tuple[str, Group]:
    group = standing(group, off)
    if not group.formed:
        return "none", group
    if host in group.members and not group.sealed and "join.again" not in off:
        return "joined", group
    if group.sealed and "join.late" not in off:
        return "late", group
    if len(group.members) >= most and "join.full" not in off:
        return "full", group
    return "joined", group._replace(members=(*group.members, host))


def seal(group: Group, formed: int, *, least: int, clock: int, off: Off) -> tuple[str, Group]:
    group = standing(group, off)
    if not group.formed or (group.formed != formed and "seal.formed" not in off):
        return "gone", group
    if group.sealed and "seal.again" not in off:
        return "sealed", group
    if len(group.members) < least and "seal.least" not in off:
        return "few", group
    number = group.formed if "seal.number" in off else _next_number(group, clock, off)
    return "sealed", group._replace(number=max(group.number, number), sealed=number)


def renew(group: Group, host: int, formed: int, sealed: int, off: Off) -> tuple[str, Group]:
    """sealed: under which its ranks run, or 0."""
    group = standing(group, off)
    if host not in group.members or (group.formed != formed and "renew.formed" not in off):
        return "gone", group
    if sealed not in (0, group.sealed) and "renew.sealed" not in off:
        return "gone", group
    return "sealed" if group.sealed else "forming", group


def leave(group: Group, host: int, formed: int, off: Off) -> Group:
    group = standing(group, off)
    if host not in group.members or group.formed != formed:
        return group
    if "leave.ends" in off:
        return group._replace(members=tuple(one for one in group.members if one != host))
    return ended(group, off)


def acquire(group: Group, sealed: int, off: Off) -> tuple[str, Group]:
    """acquire_trainer by rank 0 of the leader's host."""
    group = standing(group, off)
    if group.sealed != sealed and "acquire.sealed" not in off:
        return "no_group", group
    return "acquired", group._replace(holder=sealed)


# Who calls them


class Hosts:
    """The `Machine` of an instance."""

    def __init__(self, bounds: Bounds, off: Off) -> None:
        self._bounds, self._off = bounds, off
        self._orders = list(itertools.permutations(range(bounds.hosts)))

    def first_state(self) -> State:
        return State(Group(), None, tuple(map(Host, range(self._bounds.hosts))), 0, 0)

    def moves(self, state: State) -> Iterator[Move]:
        may_fail = state.faults < self._bounds.faults
        for who, host in enumerate(state.hosts):
            for name, answer, group, after in self._calls(state, host):
                yield self._called(state, who, f"{name}: {answer}", group, after)
                if may_fail and after != host:
                    lost = self._called(state, who, f"{name}, answer lost", group, host)
                    yield lost._replace(state=lost.state._replace(faults=state.faults + 1), is_fault=True)
            if may_fail:
                yield from self._misfortunes(state, who, host)
        yield from self._lapses(state, may_fail)
        if may_fail and state.disk is None:
            yield Move("writes reach the disk", -1, state._replace(disk=state.group))
        if may_fail and state.disk is not None:
            back = state._replace(group=state.disk, disk=None, faults=state.faults + 1)
            yield Move("the last writes are lost", -1, back, is_fault=True)

    def _calls(self, state: State, host: Host) -> Iterator[tuple[str, str, Group, Host]]:
        """(call, its answer, what the server holds then, what the host knows then)."""
        group, off, clock = state.group, self._off, state.clock
        idle = Host(host.name)
        if not host.formed:
            answer, after = form(group, host.name, clock=clock, off=off)
            yield "forms", answer, after, idle._replace(formed=after.formed if answer == "formed" else 0)
            answer, after = join(group, host.name, most=self._bounds.most, off=off)
            yield "joins", answer, after, idle._replace(formed=after.formed if answer == "joined" else 0)
            return
        answer, after = renew(group, host.name, host.formed, host.sealed, off)
        runs = host._replace(sealed=after.sealed, members=after.members) if not host.sealed else host
        yield "renews", answer, after, {"gone": idle, "forming": host, "sealed": runs}[answer]
        if host.sealed and host.members[0] == host.name:
            answer, after = acquire(group, host.sealed, off)
            # A trainer that is refused ends, and its host leaves.
            yield "acquires", answer, after, host if answer == "acquired" else idle
        is_leader = group.members[:1] == (host.name,)
        if not host.sealed and is_leader:
            answer, after = seal(group, host.formed, least=self._bounds.least, clock=clock, off=off)
            runs = host._replace(sealed=after.sealed, members=after.members)
            yield "seals", answer, after, {"gone": idle, "few": host, "sealed": runs}[answer]

    def _called(self, state: State, who: int, name: str, group: Group, after: Host) -> Move:
        hosts = (*state.hosts[:who], after, *state.hosts[who + 1 :])
        before = standing(state.group, frozenset())
        is_replaced = before.formed != 0 and group.formed not in (0, before.formed)
        breaks = "one: a generation is replaced whose members all live" if is_replaced else ""
        made = state._replace(group=group, hosts=hosts, clock=max(state.clock, group.number))
        return Move(name, who, made, breaks=breaks)

    def _misfortunes(self, state: State, who: int, host: Host) -> Iterator[Move]:
        fresh = Host(max(_names(state)) + 1)
        if host.formed:
            left = leave(state.group, host.name, host.formed, self._off)
            move = self._called(state, who, "its ranks die, and it leaves", left, Host(host.name))
            yield move._replace(state=move.state._replace(faults=state.faults + 1), is_fault=True)
            died = self._called(state, who, "dies", state.group, fresh)
            yield died._replace(state=died.state._replace(faults=state.faults + 1), is_fault=True)

    def _lapses(self, state: State, may_fail: bool) -> Iterator[Move]:
        """The lease of one that is gone ends by itself; one that lives is paused, or cut off."""
        at_work = {host.name for host in state.hosts if host.formed}
        for name in state.group.members:
            is_gone = name not in at_work
            if name not in state.group.lapsed and (is_gone or may_fail):
                lapsed = tuple(sorted((*state.group.lapsed, name)))
                after = state._replace(group=state.group._replace(lapsed=lapsed))
                after = after if is_gone else after._replace(faults=state.faults + 1)
                yield Move("a lease ends", name, after, is_fault=not is_gone)

    def canonical(self, state: State) -> State:
        """Hosts have no order, names of the dead and numbers mean only that they are the same, or newer."""
        return min((self._renamed(state, order) for order in self._orders), key=_order)

    def _renamed(self, state: State, order: tuple[int, ...]) -> State:
        names = {state.hosts[old].name: new for new, old in enumerate(order)}
        numbers = self._numbers(state)
        newest = state.clock if CLOCK in self._off else len(numbers) - 1

        def new(members: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(names.setdefault(name, len(names)) for name in members)

        def of(group: Group) -> Group:
            number = group.number if CLOCK in self._off else newest
            members, lapsed = new(group.members), tuple(sorted(new(group.lapsed)))
            return Group(number, numbers[group.formed], numbers[group.sealed], members, lapsed, numbers[group.holder])

        group, disk = of(state.group), state.disk and of(state.disk)
        hosts = (
            Host(names[one.name], numbers[one.formed], numbers[one.sealed], new(one.members))
            for one in (state.hosts[old] for old in order)
        )
        return State(group, disk, tuple(hosts), newest, state.faults)

    def _numbers(self, state: State) -> dict[int, int]:
        """Number → its place among those that are known: by the clock, the next one is newer than each of them."""
        groups = (state.group, state.disk) if state.disk else (state.group,)
        asked = {0, *(number for group in groups for number in (group.formed, group.sealed, group.holder))}
        asked |= {number for host in state.hosts for number in (host.formed, host.sealed)}
        if CLOCK in self._off:
            return {number: number for number in asked}
        return {number: place for place, number in enumerate(sorted(asked))}

    def broken_in(self, state: State) -> str:
        running = [host for host in state.hosts if host.sealed]
        for host in running:
            members = host.members
            if not self._bounds.least <= len(members) <= self._bounds.most or len(set(members)) < len(members):
                return f"size: ranks run on {len(members)} hosts, {len(set(members))} different ones"
            if host.name not in members:
                return "member: a host runs ranks of a generation that isn't its own"
        for one, other in itertools.combinations(running, 2):
            if one.sealed == other.sealed and (one.formed, one.members) != (other.formed, other.members):
                return "same: two hosts run one generation, and were told of different ones"
        if state.group.holder not in (0, state.group.sealed):
            return "trainer: one holds the job whose generation isn't the sealed one that lives"
        return ""

    def is_success(self, state: State) -> bool:
        group = state.group
        running = {host.name for host in state.hosts if host.sealed == group.sealed}
        return bool(group.sealed) and group.holder == group.sealed and not set(group.members) - running


def _names(state: State) -> Iterator[int]:
    for group in (state.group, state.disk or state.group):
        yield from group.members
    for host in state.hosts:
        yield host.name
        yield from host.members


def _order(state: State) -> tuple[Any, ...]:
    return (state.group, state.disk or (), state.hosts)


def explored(bounds: Bounds, off: str = "") -> Result:
    return Exploration(Hosts(bounds, frozenset({off} - {""}))).run()


class Mutation(NamedTuple):
    off: str
    bounds: Bounds
    breaks: str
    """Begins the name of what breaks; "" where nothing does."""
    means: str
    """In words."""


PAIR = Bounds(faults=1)
"""Two of three hosts."""
TRIO = Bounds(most=3, faults=1)
INSTANCES = (PAIR, TRIO, Bounds())
MUTATIONS = (
    Mutation("group.lapsed", PAIR, "stuck", "a member whose lease is over stays"),
    Mutation("group.clock", PAIR, "same", "numbers are counted, and not by the clock as well"),
    Mutation("end.fences", PAIR, "trainer", "the end of a generation leaves its trainer the job"),
    Mutation("form.stands", PAIR, "one", "form_group beside a generation that lives"),
    Mutation("form.again", Bounds(), "", "a leader that hasn't heard that it formed waits for the end of its lease"),
    Mutation("join.late", TRIO, "same", "join_group of a sealed generation"),
    Mutation("join.full", PAIR, "size", "join_group of more hosts than the job takes"),
    Mutation("join.again", PAIR, "size", "join_group of a host that is a member, and hasn't heard so"),
    Mutation("seal.least", PAIR, "size", "seal_group of fewer hosts than the job needs"),
    Mutation("seal.formed", Bounds(), "same", "seal_group of another generation, which a restart brought back"),
    Mutation("seal.number", PAIR, "same", "a sealed generation keeps its number, and may be sealed twice"),
    Mutation("seal.again", Bounds(), "", "a leader that hasn't heard that it sealed seals anew: the members leave"),
    Mutation("renew.formed", Bounds(), "same", "renew_host of another generation, in which it is a member, too"),
    Mutation("renew.sealed", PAIR, "stuck", "renew_host by ranks of a seal that a restart has lost"),
    Mutation("leave.ends", PAIR, "size", "a member that leaves is only taken from the list"),
    Mutation("acquire.sealed", PAIR, "trainer", "acquire_trainer by a generation that has ended"),
)
