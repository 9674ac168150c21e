"""A state of the whole: the server, its disk, the processes at work, and what lies in the trainers' folder."""

from __future__ import annotations

from typing import NamedTuple

from tests.model import fence
from tests.model.fence import Server

START, REWINDS, ANNOUNCE, OPEN, GATHER, STEPPED, COMMITS, SETTLE, ENDS = range(1, 10)
IDLE: tuple[int, ...] = ()


class Trainer(NamedTuple):
    phase: int
    epoch: int
    iteration: int
    digest: int
    """The digest of the weights in its memory."""
    trained: tuple[tuple[int, ...], ...]
    """[batches] (copies in the gradient, content), () for none."""
    last: int
    """Id of the newest rollout it was given."""
    link: tuple[int, ...]
    """The audit record that its next one follows."""


class State(NamedTuple):
    server: Server
    disk: tuple[()] | tuple[Server, int]
    """What a server that dies knows again, and how many writes came after it."""
    generators: tuple[tuple[int, ...], ...]
    """[generators] The claim that each holds."""
    trainers: tuple[Trainer | tuple[()], ...]
    checkpoints: tuple[int, ...]
    """[iterations] Digest of the version that it made, -1 for none."""
    clock: int
    """The newest epoch that was ever handed out."""
    era: int
    """Restarts of the server: ids of stream entries grow with it."""
    faults: int
    is_done: bool


class Bounds(NamedTuple):
    """The instance that is explored."""

    trainers: int = 2
    generators: int = 2
    batches: int = 2
    iterations: int = 2
    faults: int = 1
    first_batches: int = 99
    """So many of an iteration's batches go out with its opening; the others follow."""
    lost_writes: int = 3
    """Most writes that a restart loses."""
    is_deterministic: bool = True
    """Else a replay makes other weights, and a second attempt other completions."""
    may_end: bool = True
    """A job fails or is given up, at any time, and is resumed."""
    may_remove: bool = False
    """A job that has ended is removed, while processes that know it come late."""
    max_attempts: int = 4
    max_epochs: int = 8
    """More than the faults can lead to; a mutation that restarts trainers for ever ends here."""

    def first_state(self) -> State:
        server = fence.nothing(self.batches, self.iterations + 1)
        generators, trainers = (IDLE,) * self.generators, ((),) * self.trainers
        return State(server, (), generators, trainers, (-1,) * self.iterations, 0, 0, 0, False)
