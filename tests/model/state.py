"""A state of the whole: the server, its disk, the processes at work, and what lies in the trainers' folder."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.model.server import ANY, NONE, Opening, Server, nothing

START, REWINDS, ANNOUNCE, OPEN, GATHER, STEPPED, COMMITS, DISPATCHES, SETTLE, ENDS = range(1, 11)
IDLE: tuple[Any, ...] = ()
UNHEARD = 1
"""Behind the claim of a worker whose answer was lost: it holds nothing, and asks again."""


class Trainer(NamedTuple):
    phase: int
    epoch: int
    iteration: int
    versions: tuple[int, ...]
    """The digests of the versions that its window may be sampled with, oldest first; the last are its own weights."""
    trained: tuple[tuple[Any, ...], ...]
    """[batches] (copies in the gradient, content, digest of the sampler, and in a job with stages its columns or ()),
    () for none."""
    last: int
    """Id of the iteration's newest rollout that it was given."""
    link: tuple[int, ...]
    """The audit record that its next one follows."""
    at: int = 0
    """How many versions it has announced, or how many iterations it has opened, at its start."""
    engine: int = ANY
    """The kind of engine that sampled what it was given first; ANY while it was given nothing, or is not told."""

    @property
    def digest(self) -> int:
        """The digest of the weights in its memory."""
        return self.versions[-1]


class Engine(NamedTuple):
    """The engine of a generator, as it is: no script knows it."""

    is_wrong: bool
    """It computes otherwise than the trainer from now on, until it is made anew."""
    shown: tuple[int, ...]
    """[versions] The digest of the version that it has shown last, NONE for none or where it failed since."""


class State(NamedTuple):
    server: Server
    disk: tuple[()] | tuple[Server, int]
    """What a server that dies knows again, and how many writes came after it."""
    workers: tuple[tuple[Any, ...], ...]
    """[generators, stage workers] The claim that each holds; () for none. Or one whose answer was lost, and UNHEARD."""
    trainers: tuple[Trainer | tuple[()], ...]
    checkpoints: tuple[tuple[int, ...], ...]
    """[iterations] The digest of the version that it made, after those of the older ones that lie beside it; or ()."""
    clock: int
    """The newest epoch that was ever handed out."""
    era: int
    """Restarts of the server: ids of stream entries grow with it."""
    faults: int
    is_done: bool
    engines: tuple[Engine, ...] = ()
    """[generators] () in a job whose versions need no proof."""


class Bounds(NamedTuple):
    """The instance that is explored."""

    trainers: int = 2
    generators: int = 2
    batches: int = 2
    iterations: int = 2
    faults: int = 1
    lag: int = 0
    """max_policy_lag."""
    is_bounded: bool = False
    """The `bounded` schedule: any version of the range samples. Else exactly the oldest."""
    evaluations: int = 0
    """So many of an iteration's batches, the last ones, evaluate: its own version samples them."""
    first_batches: int = 99
    """So many of an iteration's batches go out with its opening; the others follow."""
    checkpoint_every: int = 1
    """Iterations; the last one is followed by a checkpoint in any case."""
    lost_writes: int = 3
    """Most writes that a restart loses."""
    is_deterministic: bool = True
    """Else a replay makes other weights, and a second attempt other completions."""
    kinds: int = 1
    """Kinds of engines that its generators sample with, each to other bits; with one they name none."""
    may_end: bool = True
    """A job fails or is given up, at any time, and is resumed."""
    may_remove: bool = False
    """A job that has ended is removed, while processes that know it come late."""
    may_damage: bool = False
    """The newest checkpoint is damaged: a start skips it, and rewinds by one more iteration."""
    max_attempts: int = 4
    stages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(items of a batch, the stages whose outputs it reads, from 1) of each; none: a batch goes to the trainer."""
    stage_workers: int = 0
    """Each serves every stage."""
    stages_vary: bool = False
    """Two stage workers make different columns of the same inputs."""
    item_attempts: int = 9
    """Attempts of an item before its batch is dead; the faults never use up the default."""
    max_waiting: int = 99
    """Batches that may wait for columns at once."""
    room: int = 99
    """Published batches that fit into the server's memory."""
    proves: bool = False
    """A generator's engine shows each version before it samples with it (I11). Else versions have no probe."""
    max_epochs: int = 8
    """More than the faults can lead to; a mutation that restarts trainers for ever ends here."""

    @property
    def last_iteration(self) -> int:
        return self.iterations - 1

    def first_state(self) -> State:
        num_versions = self.iterations + 1
        num_provers = self.generators if self.proves else 0
        server = nothing(self.batches, num_versions, num_open=self.lag + 1, num_provers=num_provers)
        workers = (IDLE,) * (self.generators + self.stage_workers)
        trainers = ((),) * self.trainers
        engines = (Engine(is_wrong=False, shown=(NONE,) * num_versions),) * num_provers
        return State(server, (), workers, trainers, ((),) * self.iterations, 0, 0, 0, False, engines)

    def is_generator(self, worker: int) -> bool:
        return worker < self.generators

    def max_attempts_of(self, stage: int) -> int:
        return self.item_attempts if stage else self.max_attempts

    def engine_of(self, worker: int) -> int:
        """The kind that this generator names; stage workers name none."""
        return ANY if self.kinds == 1 or not self.is_generator(worker) else 1 + worker % self.kinds

    def evaluates(self, batch: int) -> bool:
        return batch >= self.batches - self.evaluations

    def stages_of(self, batch: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The stages that this batch passes: evaluations pass none."""
        return () if self.evaluates(batch) else self.stages

    def versions_of(self, iteration: int, batch: int = 0) -> tuple[int, int]:
        """(oldest, newest) version that may sample it."""
        oldest = max(0, iteration - self.lag)
        if self.evaluates(batch):
            return iteration, iteration
        return oldest, iteration if self.is_bounded else oldest

    def sent(self, iteration: int, newest_made: int) -> tuple[tuple[int, int], ...]:
        """(batch, pinned version or NONE) of those batches that the versions up to `newest_made` can sample."""
        sent = []
        for batch in range(self.batches):
            is_pinned = self.lag > 0 and self.evaluates(batch)
            if not is_pinned or iteration <= newest_made:
                sent.append((batch, iteration if is_pinned else NONE))
        return tuple(sent)

    def opening(self, iteration: int, newest_made: int) -> Opening:
        oldest = max(0, iteration - self.lag)
        newest = iteration if self.is_bounded else oldest
        return Opening(iteration, oldest, newest, self.sent(iteration, newest_made)[: self.first_batches])
