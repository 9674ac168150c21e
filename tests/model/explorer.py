"""Every reachable state of an instance, breadth first, up to renaming generators, batches and trainers."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import NamedTuple

from tests.model.fence import REMOVED, Off, Server
from tests.model.invariants import broken_in
from tests.model.moves import moves
from tests.model.state import Bounds, State

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
    """The smallest of all renamings stands for a state."""

    def __init__(self, bounds: Bounds) -> None:
        generators = list(itertools.permutations(range(bounds.generators)))
        batches = list(itertools.permutations(range(bounds.batches)))
        self._renamings = [(g, b) for g in generators for b in batches][1:]
        self._is_deterministic = bounds.is_deterministic
        self._servers: dict[tuple[Server, int], Server] = {}

    def canonical(self, state: State) -> State:
        state = state._replace(trainers=tuple(sorted(state.trainers)))
        return min([state, *(self._renamed(state, index) for index in range(len(self._renamings)))])

    def _renamed(self, state: State, index: int) -> State:
        generators, batches = self._renamings[index]
        claims: list[tuple[int, ...]] = [()] * len(generators)
        for old, claim in enumerate(state.generators):
            claims[generators[old]] = (claim[0], batches[claim[1]], *claim[2:]) if claim else ()
        trainers = []
        for one in state.trainers:
            if one and one.trained:
                trained: list[tuple[int, ...]] = [()] * len(batches)
                for old, mine in enumerate(one.trained):
                    trained[batches[old]] = (mine[0], self._content(mine[1], generators), mine[2]) if mine else ()
                one = one._replace(trained=tuple(trained))
            trainers.append(one)
        trainers.sort()
        disk = (self._server(state.disk[0], index), state.disk[1]) if state.disk else ()
        return State(self._server(state.server, index), disk, tuple(claims), tuple(trainers), *state[4:])

    def _server(self, server: Server, index: int) -> Server:
        known = self._servers.get((server, index))
        if known is None:
            known = self._servers[server, index] = self._renamed_server(server, *self._renamings[index])
        return known

    def _renamed_server(self, server: Server, generators: tuple[int, ...], batches: tuple[int, ...]) -> Server:
        renamed = list(server.batches)
        for old, (ledger, entry) in enumerate(server.batches):
            if len(ledger) == 4:
                ledger = (ledger[0], self._content(ledger[1], generators), generators[ledger[2]], ledger[3])
            if entry and entry[3] >= 0:
                entry = (*entry[:3], generators[entry[3]])
            renamed[batches[old]] = (ledger, entry)
        rollouts = tuple(
            (one[0], batches[one[1]], *one[2:4], self._content(one[4], generators), *one[5:]) for one in server.rollouts
        )
        return server._replace(batches=tuple(renamed), rollouts=rollouts)

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
            for name, who, after, is_fault, breaks, batch in moves(self._states[at], self._bounds, self._off):
                self._num_transitions += 1
                known = self._add(self._symmetry.canonical(after), at)
                if not is_fault:
                    self._sources.append(at)
                    self._targets.append(known)
                breaks = breaks or broken_in(after)
                if breaks:
                    return breaks, (*self._trace(at), _line(name, who, batch))
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
            for name, who, after, _, _, batch in moves(self._states[parent], self._bounds, self._off):
                if self._index.get(self._symmetry.canonical(after)) == index:
                    lines.append(_line(name, who, batch))
                    break
            index = parent
        return tuple(reversed(lines))


def explore(bounds: Bounds, off: Off = frozenset(), *, max_states: int = 5_000_000) -> Result:
    return Exploration(bounds, off, max_states=max_states).run()


def _line(name: str, who: int, batch: int) -> str:
    whose = "" if who < 0 else f"{who}: "
    return f"{whose}{name}" + (f" (batch {batch})" if batch >= 0 else "")
