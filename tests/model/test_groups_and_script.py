"""The model of hosts that form a trainer says what hosts.lua does: random walks, each call done on a real server."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from broker.connection.client import Broker, connect
from broker.hosts_side import HostGroup, HostKind, HostsSide
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import encode
from contracts.errors import Conflict, FencedOff, NotFound
from contracts.settings import StackSettings
from tests.builders import job_spec
from tests.every_key import fence_keys
from tests.model.groups import Bounds, Group, Host, Hosts, Move, State

BOUNDS = Bounds(most=3, faults=30)
NUM_WALKS, NUM_MOVES = 40, 120
LEASE_MS = 3_600_000
KIND = HostKind(code="c", torch="t", device="d", cpu="p")
REACHED = {
    *(f"forms: {word}" for word in ("formed", "stands")),
    *(f"joins: {word}" for word in ("joined", "none", "late", "full")),
    *(f"seals: {word}" for word in ("sealed", "few", "gone")),
    *(f"renews: {word}" for word in ("forming", "sealed", "gone")),
    *("acquires: acquired", "acquires: no_group", "dies", "its ranks die, and it leaves", "a lease ends"),
    *("forms, answer lost", "joins, answer lost", "seals, answer lost", "the last writes are lost"),
}


class Walk:
    """One walk; numbers of the model are known by what the server has handed out for them."""

    def __init__(self, broker: Broker, seed: int, seen: Counter[str]) -> None:
        self._broker, self._random, self._seen = broker, random.Random(seed), seen
        self._job_id, _ = JobStore(broker).create(job_spec(name=uuid.uuid4().hex))
        self._keys = broker.job_keys(self._job_id)
        self._machine = Hosts(BOUNDS, frozenset())
        self._state: State = self._machine.first_state()
        self._numbers = {0: 0}
        self._disk: dict[str, bytes] = {}
        self._trainers: dict[int, TrainerSide] = {}

    def run(self) -> None:
        for _ in range(NUM_MOVES):
            options = list(self._machine.moves(self._state))
            weights = [(0.1 if one.is_fault else 1.0) / (3 + self._seen[one.name]) for one in options]
            move = self._random.choices(options, weights)[0]
            self._does(move)
            self._seen[move.name] += 1
            self._state = move.state
            self._check(move.name)

    def _does(self, move: Move) -> None:
        call = {"forms": self._form, "joins": self._join, "seals": self._seal, "renews": self._renew}
        name, _, answer = move.name.partition(": ")
        name = name.removesuffix(", answer lost")
        host = self._state.hosts[move.who] if 0 <= move.who < BOUNDS.hosts else Host(0)
        if name in call:
            outcome, group = call[name](host)
            assert not answer or outcome == answer, move
            after = move.state.group
            told = zip(
                (after.number, after.formed, after.sealed), (group.number, group.formed, group.sealed), strict=True
            )
            for number, real in told:
                assert self._numbers.setdefault(number, real) == real, move
        elif name == "acquires":
            assert self._acquire(host) == answer or not answer, move
        elif name.startswith("its ranks die"):
            self._side(host).leave(self._numbers[host.formed], "its ranks died")
        elif name == "a lease ends":
            self._edit(lambda group: self._lapsed(group, move.who))
        elif name == "writes reach the disk":
            self._disk = {key: dumped for key in self._rows() if (dumped := self._broker.redis.dump(key))}  # type: ignore[misc]
        elif name == "the last writes are lost":
            self._lose_writes()

    def _form(self, host: Host) -> tuple[str, HostGroup]:
        is_formed, group = self._side(host).form(group_of(BOUNDS.least, BOUNDS.most))
        return "formed" if is_formed else "stands", group

    def _join(self, host: Host) -> tuple[str, HostGroup]:
        return self._side(host).join(KIND)

    def _seal(self, host: Host) -> tuple[str, HostGroup]:
        return self._side(host).seal(self._numbers[host.formed])

    def _renew(self, host: Host) -> tuple[str, HostGroup]:
        return self._side(host).renew(self._numbers[host.formed], self._numbers[host.sealed])

    def _acquire(self, host: Host) -> str:
        side = TrainerSide(self._broker, self._job_id, owner=str(host.sealed), lease_s=LEASE_MS / 1000)
        try:
            side.acquire(self._numbers[host.sealed])
        except Conflict:
            return "no_group"
        self._trainers[host.sealed] = side
        return "acquired"

    def _side(self, host: Host) -> HostsSide:
        return HostsSide(self._broker, self._job_id, host=str(host.name), ranks=2)

    @staticmethod
    def _lapsed(group: HostGroup, name: int) -> HostGroup:
        members = [msgspec.structs.replace(one, until_ms=1) if one.host == str(name) else one for one in group.members]
        return msgspec.structs.replace(group, members=tuple(members))

    def _edit(self, change: Callable[[HostGroup], HostGroup]) -> None:
        self._broker.redis.set(self._keys.hosts, encode(change(self._read())))

    def _rows(self) -> list[str]:
        return [self._keys.hosts, *fence_keys(self._keys)]

    def _lose_writes(self) -> None:
        newest = max(self._numbers.values())
        while int(self._broker.now_s() * 1000) <= newest:
            pass
        for key in self._rows():
            self._broker.redis.delete(key)
            if key in self._disk:
                self._broker.redis.restore(key, 0, self._disk[key])

    def _read(self) -> HostGroup:
        packed = self._broker.redis.get(self._keys.hosts)
        return msgspec.msgpack.decode(packed, type=HostGroup)  # type: ignore[arg-type]

    def _check(self, name: str) -> None:
        model: Group = self._state.group
        if not self._broker.redis.exists(self._keys.hosts):
            assert model == Group(), name
            return
        group = self._read()
        numbers = (group.number, group.formed, group.sealed)
        assert numbers == tuple(self._numbers[one] for one in (model.number, model.formed, model.sealed)), name
        assert [one.host for one in group.members] == [str(one) for one in model.members], name
        assert [one.host for one in group.members if one.until_ms == 1] == [
            str(one) for one in model.members if one in model.lapsed
        ], name
        assert self._holder() == model.holder, name

    def _holder(self) -> int:
        """The sealed number whose trainer's epoch is the newest one."""
        for sealed, side in self._trainers.items():
            try:
                side.renew()
            except FencedOff:
                continue
            return sealed
        return 0


def test_every_call_of_the_hosts_has_the_same_outcome_on_a_real_server(settings: StackSettings) -> None:
    broker, seen = connect(settings), Counter[str]()
    for seed in range(NUM_WALKS):
        try:
            Walk(broker, seed, seen).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert REACHED - seen.keys() == set()


def group_of(least: int, most: int) -> HostGroup:
    """What a host that forms a generation says about it."""
    return HostGroup(
        **{"number": 0, "formed": 0, "sealed": 0, "members": (), "refused": (), "reason": ""},
        **{"least": least, "most": most, "lease_ms": LEASE_MS, "kind": KIND, "address": "10.0.0.1 1", "key": "00"},
    )


def refused(group: HostGroup) -> list[tuple[str, str]]:
    return [(one.host, one.why) for one in group.refused]


@pytest.mark.parametrize("name", ["code", "torch", "device", "cpu"])
def test_a_host_of_another_kind_is_refused_by_name_and_noted(settings: StackSettings, name: str) -> None:
    broker = connect(settings)
    job_id, _ = JobStore(broker).create(job_spec(name=uuid.uuid4().hex))
    assert HostsSide(broker, job_id, host="a", ranks=1).form(group_of(1, 2))[0]
    other = msgspec.structs.replace(KIND, **{name: "another"})
    outcome, group = HostsSide(broker, job_id, host="b", ranks=1).join(other)
    assert outcome == f"other_{name}"
    assert refused(group) == [("b", f"other_{name}")]
    assert [one.host for one in group.members] == ["a"]


def test_a_host_that_does_not_reach_the_leader_is_noted_until_it_joins(settings: StackSettings) -> None:
    broker = connect(settings)
    job_id, _ = JobStore(broker).create(job_spec(name=uuid.uuid4().hex))
    first, second = (HostsSide(broker, job_id, host=name, ranks=1) for name in ("a", "b"))
    first.form(group_of(1, 2))
    outcome, group = second.join(KIND, reaches=False)
    assert (outcome, refused(group)) == ("unreachable", [("b", "unreachable")])
    outcome, group = second.join(KIND)
    assert (outcome, group.in_words) == ("joined", "offered: a, b; refused: none")


def test_a_host_that_looks_is_told_what_stands_and_is_noted_as_late_where_it_would_come(
    settings: StackSettings,
) -> None:
    broker = connect(settings)
    job_id, _ = JobStore(broker).create(job_spec(name=uuid.uuid4().hex))
    first, second = (HostsSide(broker, job_id, host=name, ranks=1) for name in ("a", "b"))
    assert second.look(waits=True)[0] == "none"
    formed = first.form(group_of(1, 2))[1].formed
    outcome, group = second.look(waits=True)
    assert (outcome, refused(group)) == ("forming", [])
    assert first.seal(formed)[0] == "sealed"
    outcome, group = second.look()
    assert (outcome, refused(group)) == ("late", [])
    outcome, group = second.look(waits=True)
    assert (outcome, refused(group)) == ("late", [("b", "late")])


def test_a_host_that_offers_its_ranks_to_a_removed_job_brings_nothing_of_it_back(settings: StackSettings) -> None:
    broker = connect(settings)
    side = HostsSide(broker, "job-gone", host="a", ranks=1)
    for call in (lambda: side.form(group_of(1, 2)), side.look, lambda: side.join(KIND)):
        with pytest.raises(NotFound, match="there is no such job"):
            call()
    assert not broker.redis.exists(broker.job_keys("job-gone").hosts)
