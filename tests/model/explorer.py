"""Every reachable state of an instance, breadth first, up to renaming generators, batches and trainers."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import Any, NamedTuple

from tests.model.invariants import broken_in
from tests.model.move import Move
from tests.model.moves import moves
from tests.model.server import DONE, LEASED, PUBLISHED, REMOVED, Off, Rows, Server, Slot
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
        generators = [
            names
            for names in itertools.permutations(range(bounds.generators))
            if all(bounds.engine_of(old) == bounds.engine_of(new) for old, new in enumerate(names))
        ]
        slots = list(itertools.product(of_slot, repeat=bounds.lag + 1))
        workers = list(itertools.permutations(range(bounds.workers)))
        self._renamings = [(mine, batches, names) for mine in generators for batches in slots for names in workers][1:]
        self._is_deterministic, self._stages_vary = bounds.is_deterministic, bounds.stages_vary
        self._servers: dict[tuple[Server, int], Server] = {}

    def canonical(self, state: State) -> State:
        state = state._replace(trainers=tuple(sorted(state.trainers)))
        return min([state, *(self._renamed(state, index) for index in range(len(self._renamings)))])

    def _renamed(self, state: State, index: int) -> State:
        generators, slots, workers = self._renamings[index]
        claims: list[tuple[int, ...]] = [()] * len(generators)
        for old, claim in enumerate(state.generators):
            if claim:
                claims[generators[old]] = (claim[0], slots[claim[0] % len(slots)][claim[1]], *claim[2:])
        trainers = []
        for one in state.trainers:
            if one and one.trained:
                batches = slots[one.iteration % len(slots)]
                trained: list[tuple[int, ...]] = [()] * len(batches)
                for old, mine in enumerate(one.trained):
                    trained[batches[old]] = self._trained(mine, generators, workers) if mine else ()
                one = one._replace(trained=tuple(trained))
            trainers.append(one)
        trainers.sort()
        disk = (self._server(state.disk[0], index), state.disk[1]) if state.disk else ()
        held: list[tuple[Any, ...]] = [()] * len(workers)
        for old, item in enumerate(state.workers):
            if item:
                of_slot = slots[item[0] % len(slots)]
                source = self._source(item[5], generators, workers)
                held[workers[old]] = (item[0], of_slot[item[1]], *item[2:5], source, *item[6:])
        server = self._server(state.server, index)
        return State(server, disk, tuple(claims), tuple(trainers), *state[4:9], tuple(held))

    def _trained(self, mine: tuple[Any, ...], generators: Names, workers: Names) -> tuple[Any, ...]:
        columns = tuple(
            tuple(tuple(self._value(value, generators, workers) for value in stage) for stage in items)
            for items in mine[3:]
        )
        return (mine[0], self._content(mine[1], generators), mine[2], *columns)

    def _server(self, server: Server, index: int) -> Server:
        known = self._servers.get((server, index))
        if known is None:
            generators, slots, workers = self._renamings[index]
            renamed = (self._slot(*both, generators, workers) for both in zip(server.slots, slots, strict=True))
            known = self._servers[server, index] = server._replace(slots=tuple(renamed))
        return known

    def _slot(self, slot: Slot, batches: Names, generators: Names, workers: Names) -> Slot:
        renamed = list(slot.batches)
        for old, (ledger, entry) in enumerate(slot.batches):
            if ledger and ledger[0] == PUBLISHED:
                ledger = (PUBLISHED, self._content(ledger[1], generators), generators[ledger[2]], *ledger[3:])
            if entry and entry[3] >= 0:
                entry = (*entry[:3], generators[entry[3]])
            renamed[batches[old]] = (ledger, entry)
        rollouts = tuple(
            (one[0], batches[one[1]], *one[2:4], self._content(one[4], generators), *one[5:]) for one in slot.rollouts
        )
        rows: list[Rows | tuple[()]] = [()] * len(slot.rows)
        for old, one in enumerate(slot.rows):
            rows[batches[old]] = self._rows(one, batches, generators, workers) if one else ()
        return Slot(tuple(renamed), rollouts, tuple(rows))

    def _rows(self, rows: Rows, batches: Names, generators: Names, workers: Names) -> Rows:
        payload = rows.payload
        if payload:
            payload = (batches[payload[0]], *payload[1:3], self._content(payload[3], generators), *payload[4:])
        items = tuple(tuple(self._item(one, generators, workers) for one in stage) for stage in rows.items)
        return Rows(payload, rows.left, items)

    def _item(self, item: tuple[Any, ...], generators: Names, workers: Names) -> tuple[Any, ...]:
        if item[:1] == (DONE,):
            return (DONE, self._value(item[1], generators, workers))
        return (*item[:2], workers[item[2]], *item[3:]) if item[:1] == (LEASED,) else item

    def _value(self, value: tuple[Any, ...], generators: Names, workers: Names) -> tuple[Any, ...]:
        if not value:
            return ()
        maker = workers[value[1]] if self._stages_vary else value[1]
        return (self._source(value[0], generators, workers), maker)

    def _source(self, source: tuple[Any, ...], generators: Names, workers: Names) -> tuple[Any, ...]:
        if not source or (self._is_deterministic and not self._stages_vary):
            return source
        values = (self._value(value, generators, workers) for value in source[1:])
        return (self._content(source[0], generators), *values)

    def _content(self, content: int, generators: tuple[int, ...]) -> int:
        return content if self._is_deterministic else content // 4 * 4 + generators[content % 4]


class Exploration:
    """One breadth-first search; `run` answers what it found."""

    def __init__(self, bounds: Bounds, off: Off = frozenset(), *, max_states: int = 5_000_000) -> None:
        self._bounds, self._off, self._max_states = bounds, off, max_states
        self._symmetry = Symmetry(bounds)
        self._states: list[State] = []
        self._index: dict[State, int] = {}
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
        self._add(self._symmetry.canonical(self._bounds.first_state()), -1)
        at, level_ends = 0, 1
        while at < len(self._states):
            if len(self._states) >= self._max_states:
                self._is_complete = False
                break
            if at == level_ends:
                self._depth, level_ends = self._depth + 1, len(self._states)
            for move in moves(self._states[at], self._bounds, self._off):
                self._num_transitions += 1
                known = self._add(self._symmetry.canonical(move.state), at)
                if not move.is_fault:
                    self._sources.append(at)
                    self._targets.append(known)
                breaks = move.breaks or broken_in(move.state, self._bounds)
                if breaks:
                    return breaks, (*self._trace(at), _line(move))
            at += 1
        return "", ()

    def _add(self, state: State, parent: int) -> int:
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
        ends = (index for index, state in enumerate(self._states) if state.is_done or state.server.job == REMOVED)
        waiting = list(ends)
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
            for move in moves(self._states[parent], self._bounds, self._off):
                if self._index.get(self._symmetry.canonical(move.state)) == index:
                    lines.append(_line(move))
                    break
            index = parent
        return tuple(reversed(lines))


def explore(bounds: Bounds, off: Off = frozenset(), *, max_states: int = 5_000_000) -> Result:
    return Exploration(bounds, off, max_states=max_states).run()


def _line(move: Move) -> str:
    whose = "" if move.who < 0 else f"{move.who}: "
    of = f" (batch {move.iteration}/{move.batch})" if move.batch >= 0 else ""
    return f"{whose}{move.name}{of}"
