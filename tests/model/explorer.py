"""Every reachable state of an instance, breadth first, up to renaming generators, batches and trainers."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from tests.model.invariants import broken_in
from tests.model.move import Move
from tests.model.moves import moves
from tests.model.server import DONE, LEASED, REMOVED, Batch, Claim, Item, Off, Server, Slot
from tests.model.state import Bounds, State

Names = tuple[int, ...]
"""Old name → new name."""
NEEDS_SUCCESS = "stuck: the job can't succeed any more"


class Result(NamedTuple):
    num_states: int
    num_transitions: int
    depth: int
    seconds: float
    breaks: str
    """The first invariant that broke, or NEEDS_SUCCESS; "" for a protocol that is right."""
    trace: tuple[str, ...]
    """A shortest way there."""
    is_complete: bool = True
    """Else the search ended at its bound: every state nearer than `depth` was looked at, none for a way out."""


class Machine(Protocol):
    """What is explored: a protocol with its processes, under some bounds."""

    def first_state(self) -> Any: ...

    def moves(self, state: Any) -> Iterator[Any]:
        """Each a `Move`, or what has its fields."""
        ...

    def canonical(self, state: Any) -> Any:
        """The state that stands for it and for all that differ from it by names."""
        ...

    def broken_in(self, state: Any) -> str: ...

    def is_success(self, state: Any) -> bool: ...


class Symmetry:
    """The smallest of all renamings stands for a state.

    Generators of one kind of engine have no order, and neither have the batches of an iteration that the same versions
    may sample. Iterations that share a slot share its renaming.
    """

    def __init__(self, bounds: Bounds) -> None:
        training = range(bounds.batches - bounds.evaluations)
        evaluations = range(len(training), bounds.batches)
        of_slot = [
            (*some, *others)
            for some in itertools.permutations(training)
            for others in itertools.permutations(evaluations)
        ]
        num_workers = bounds.generators + bounds.stage_workers
        kinds = [(bounds.is_generator(who), bounds.engine_of(who)) for who in range(num_workers)]
        workers = [
            names
            for names in itertools.permutations(range(num_workers))
            if all(kinds[old] == kinds[new] for old, new in enumerate(names))
        ]
        slots = list(itertools.product(of_slot, repeat=bounds.lag + 1))
        self._renamings = [(names, batches) for names in workers for batches in slots][1:]
        self._is_deterministic, self._stages_vary = bounds.is_deterministic, bounds.stages_vary
        self._servers: dict[tuple[Server, int], Server] = {}

    def canonical(self, state: State) -> State:
        state = state._replace(trainers=tuple(sorted(state.trainers)))
        return min([state, *(self._renamed(state, index) for index in range(len(self._renamings)))])

    def _renamed(self, state: State, index: int) -> State:
        names, slots = self._renamings[index]
        claims: list[Claim] = [()] * len(names)
        for old, claim in enumerate(state.workers):
            if claim:
                batch = slots[claim[0] % len(slots)][claim[1]]
                source = self._source(claim[5], names) if claim[2] else claim[5]
                claims[names[old]] = (claim[0], batch, *claim[2:5], source, *claim[6:])
        trainers = []
        for one in state.trainers:
            if one and one.trained:
                batches = slots[one.iteration % len(slots)]
                trained: list[tuple[int, ...]] = [()] * len(batches)
                for old, mine in enumerate(one.trained):
                    trained[batches[old]] = self._trained(mine, names) if mine else ()
                one = one._replace(trained=tuple(trained))
            trainers.append(one)
        trainers.sort()
        disk = (self._server(state.disk[0], index), state.disk[1]) if state.disk else ()
        server = self._server(state.server, index)
        renamed = State(server, disk, tuple(claims), tuple(trainers), *state[4:])
        return renamed._replace(engines=_permuted(state.engines, names))

    def _trained(self, mine: tuple[Any, ...], names: Names) -> tuple[Any, ...]:
        columns = tuple(
            tuple(tuple(self._value(value, names) for value in stage) for stage in items) for items in mine[3:]
        )
        return (mine[0], self._content(mine[1], names), mine[2], *columns)

    def _server(self, server: Server, index: int) -> Server:
        known = self._servers.get((server, index))
        if known is None:
            names, slots = self._renamings[index]
            renamed = (self._slot(*both, names) for both in zip(server.slots, slots, strict=True))
            proofs = _permuted(server.proofs, names)
            known = self._servers[server, index] = server._replace(slots=tuple(renamed), proofs=proofs)
        return known

    def _slot(self, slot: Slot, batches: Names, names: Names) -> Slot:
        renamed = list(slot.batches)
        for old, batch in enumerate(slot.batches):
            if batch:
                items = tuple(
                    tuple(self._item(one, stage, batches, names) for one in of_stage)
                    for stage, of_stage in enumerate(batch.items)
                )
                batch = Batch(batch.pin, batch.left, items)
            renamed[batches[old]] = batch
        rollouts = (
            (one[0], batches[one[1]], *one[2:4], self._content(one[4], names), *one[5:]) for one in slot.rollouts
        )
        return Slot(tuple(renamed), tuple(rollouts))

    def _item(self, item: Item, stage: int, batches: Names, names: Names) -> Item:
        if item[:1] == (LEASED,):
            return (*item[:2], names[item[2]], item[3])
        if item[:1] != (DONE,):
            return item
        if stage:
            return (DONE, self._value(item[1], names))
        content, generator, attempt, rollout = item[1]
        content = self._content(content, names)
        if rollout:
            rollout = (batches[rollout[0]], *rollout[1:3], content, *rollout[4:])
        return (DONE, (content, names[generator], attempt, rollout))

    def _value(self, value: tuple[Any, ...], names: Names) -> tuple[Any, ...]:
        if not value:
            return ()
        return (self._source(value[0], names), names[value[1]] if self._stages_vary else value[1])

    def _source(self, source: tuple[Any, ...], names: Names) -> tuple[Any, ...]:
        if not source or (self._is_deterministic and not self._stages_vary):
            return source
        return (self._content(source[0], names), *(self._value(value, names) for value in source[1:]))

    def _content(self, content: int, names: Names) -> int:
        return content if self._is_deterministic else content // 4 * 4 + names[content % 4]


def _permuted(of_generators: tuple[Any, ...], names: Names) -> tuple[Any, ...]:
    """What each generator has, under its new name."""
    renamed = list(of_generators)
    for old, value in enumerate(of_generators):
        renamed[names[old]] = value
    return tuple(renamed)


class Fence:
    """The fence of a job, as a `Machine`."""

    def __init__(self, bounds: Bounds, off: Off) -> None:
        self._bounds, self._off = bounds, off
        self.canonical = Symmetry(bounds).canonical
        self.first_state = bounds.first_state

    def moves(self, state: State) -> Iterator[Move]:
        return moves(state, self._bounds, self._off)

    def broken_in(self, state: State) -> str:
        return broken_in(state, self._bounds)

    def is_success(self, state: State) -> bool:
        return state.is_done or state.server.job == REMOVED


class Exploration:
    """One breadth-first search; `run` answers what it found."""

    def __init__(self, machine: Machine, *, max_states: int = 5_000_000) -> None:
        self._machine, self._max_states = machine, max_states
        self._states: list[Any] = []
        self._index: dict[Any, int] = {}
        self._parents = array("i")
        self._sources, self._targets = array("i"), array("i")
        """The moves that are no faults: a job heals by them."""
        self._num_transitions = 0
        self._depth = 0
        self._is_complete = True

    def run(self) -> Result:
        began_s = time.perf_counter()
        breaks, trace = self._search()
        if not breaks and self._is_complete:
            stuck = self._first_stuck()
            if stuck is not None:
                breaks, trace = NEEDS_SUCCESS, self._trace(stuck)
        seconds = time.perf_counter() - began_s
        num_states = len(self._states)
        return Result(num_states, self._num_transitions, self._depth, seconds, breaks, trace, self._is_complete)

    def _search(self) -> tuple[str, tuple[str, ...]]:
        self._add(self._machine.canonical(self._machine.first_state()), -1)
        at, level_ends = 0, 1
        while at < len(self._states):
            if len(self._states) >= self._max_states:
                self._is_complete = False
                break
            if at == level_ends:
                self._depth, level_ends = self._depth + 1, len(self._states)
            for move in self._machine.moves(self._states[at]):
                self._num_transitions += 1
                known = self._add(self._machine.canonical(move.state), at)
                if not move.is_fault:
                    self._sources.append(at)
                    self._targets.append(known)
                breaks = move.breaks or self._machine.broken_in(move.state)
                if breaks:
                    return breaks, (*self._trace(at), _line(move))
            at += 1
        return "", ()

    def _add(self, state: Any, parent: int) -> int:
        known = self._index.setdefault(state, len(self._states))
        if known == len(self._states):
            self._states.append(state)
            self._parents.append(parent)
        return known

    def _first_stuck(self) -> int | None:
        """The nearest state from which no move that is not a fault leads to success."""
        sources_of: list[list[int]] = [[] for _ in self._states]
        for source, target in zip(self._sources, self._targets, strict=True):
            sources_of[target].append(source)
        heals = bytearray(len(self._states))
        waiting = [index for index, state in enumerate(self._states) if self._machine.is_success(state)]
        for index in waiting:
            heals[index] = 1
        while waiting:
            for source in sources_of[waiting.pop()]:
                if not heals[source]:
                    heals[source] = 1
                    waiting.append(source)
        first = heals.find(0)
        return None if first == -1 else first

    def _trace(self, index: int) -> tuple[str, ...]:
        """Names are those of each state's own renaming: process 0 may be 1 in the next line."""
        lines: list[str] = []
        while (parent := self._parents[index]) != -1:
            for move in self._machine.moves(self._states[parent]):
                if self._index.get(self._machine.canonical(move.state)) == index:
                    lines.append(_line(move))
                    break
            index = parent
        return tuple(reversed(lines))


def explore(bounds: Bounds, off: Off = frozenset(), *, max_states: int = 5_000_000) -> Result:
    return Exploration(Fence(bounds, off), max_states=max_states).run()


def _line(move: Any) -> str:
    whose = "" if move.who < 0 else f"{move.who}: "
    of = f" ({'/'.join(str(part) for part in move.place)})" if move.place else ""
    return f"{whose}{move.name}{of}"
