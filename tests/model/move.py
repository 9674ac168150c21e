"""One step of the whole, and what each kind of step does to the state."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.model.server import Server
from tests.model.state import Bounds, Engine, State, Trainer


class Move(NamedTuple):
    name: str
    who: int
    state: State
    is_fault: bool = False
    breaks: str = ""
    """The invariant that this step breaks."""
    place: tuple[int, ...] = ()
    """In the table of leased work; of a proof the digest that is shown."""


def wrote(state: State, server: Server, bounds: Bounds) -> State:
    """The server wrote; what lies too many writes back is on its disk by now."""
    disk = state.disk
    if server == state.server:
        return state
    if disk:
        disk = (disk[0], disk[1] + 1) if disk[1] < bounds.lost_writes else ()
    return state._replace(server=server, disk=disk)


def with_trainer(state: State, who: int, trainer: Trainer | tuple[()]) -> State:
    return state._replace(trainers=(*state.trainers[:who], trainer, *state.trainers[who + 1 :]))


def with_worker(state: State, who: int, claim: tuple[Any, ...]) -> State:
    return state._replace(workers=(*state.workers[:who], claim, *state.workers[who + 1 :]))


def with_engine(state: State, who: int, engine: Engine) -> State:
    return state._replace(engines=(*state.engines[:who], engine, *state.engines[who + 1 :]))
