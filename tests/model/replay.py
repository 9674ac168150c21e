"""One walk through the model, move by move on a real server: both must answer the same and hold the same."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterator

import pytest

from broker.fence import read_fence
from broker.trainer_side import TrainerSide
from contracts.errors import BrokerUnavailable
from contracts.events import AuditRecord
from contracts.jobs import JobState
from tests.integration.fence_parts import AnswerLosingBroker, lose_prompts
from tests.model import fence
from tests.model.generator_replay import GeneratorReplay, is_free
from tests.model.move import Move
from tests.model.moves import moves
from tests.model.real import answer_of, digest_text
from tests.model.server import COMMIT, NONE, REWIND, VARIANTS
from tests.model.stage_replay import StageReplay
from tests.model.state import COMMITS, DISPATCHES, ENDS, SETTLE, Bounds, State, Trainer
from tests.model.tally import Tally
from tests.model.trainer_moves import made_by
from tests.model.wrong_calls import OFF

BOUNDS = Bounds(faults=15, is_deterministic=False, may_remove=True, may_damage=True, max_attempts=15, max_epochs=14)
OF_A_RESTART = ("writes reach the disk", "the last writes are lost")
"""Likely in a job with stages, or with two kinds of engines: they have to fall between a claim and its put, or its
publication."""
WORDS = {"missing": "lacks its columns", "other": "not what the ledger records"}
"""What the trainer's side says of what it reads beside the functions."""
OF_ITEMS = ("puts", "fails its item", "gives back its item")
WRITES_OF_A_TRAINER = (
    *("rewind", "announces", "opens", "claims rollouts", "reconciles", "renews", "commits", "dispatches"),
    *("ends the job", "fails the job", "gives the job up", "reads columns"),
)
UNREAD = 0
"""Beside the phases: a trainer was given a batch whose columns it hasn't read."""
LIKELY_IN = {
    UNREAD: ("the last writes are lost", "reads columns: missing"),
    COMMITS: ("writes reach the disk",),
    SETTLE: ("the last writes are lost", "trainer dies", "acquires from"),
    DISPATCHES: ("the last writes are lost",),
    ENDS: ("acquires from", "the job is given up", "ends the job"),
}
"""What is worth trying while a trainer is in such a phase: blind draws seldom get there."""


def _weight(move: Move, phases: set[int], *, restarts: bool, proves: bool) -> float:
    """How often it is drawn. Faults are rare: a run that meets too many gets nowhere."""
    if proves and move.name in ("claims, answer lost", "proves: refused"):
        return 0.3
    if any(move.name.startswith(names) for phase, names in LIKELY_IN.items() if phase in phases):
        return 2.0
    if restarts and move.name in OF_A_RESTART:
        return 0.8
    if move.name.startswith("claims") and move.name.endswith("answer lost"):
        return 0.005
    if move.name.startswith("fails its item by the same words"):
        return 0.008  # a batch that is dead so early has no late calls
    if move.name in ("the newest checkpoint is damaged", "its engine goes wrong"):
        return 0.1
    if move.name == "makes its engine anew":
        return 0.3
    if move.name.startswith(("the job is given up", "fails the job")):
        return 0.02
    return 0.03 if move.is_fault or (move.who < 0 and move.name != "the job is resumed") else 1.0


def _label(move: Move) -> str:
    """What was seen of a move: of stage 0, and of those after it."""
    return f"{move.name} (of a stage)" if any(move.place[2:3]) else move.name


class Walk(GeneratorReplay):
    """Draws moves by a seed, and does each of them twice."""

    def __init__(self, broker: AnswerLosingBroker, seed: int, seen: Counter[str], bounds: Bounds = BOUNDS) -> None:
        super().__init__(broker, random.Random(seed), bounds)
        self._sides: list[TrainerSide | None] = [None] * bounds.trainers
        self._stages = StageReplay(broker, self._real, bounds, self._random) if bounds.stages else None
        self._tally, self._disk, self._newest_on_disk = Tally(), dict[str, bytes](), dict[tuple[int, int], int]()
        self._seen = seen

    def run(self, num_moves: int) -> None:
        for _ in range(num_moves):
            options = [one for one in moves(self._state, self._bounds, OFF) if self._is_first(one)]
            if not options:
                return
            options += self._beside_the_model()
            # What the walks before have done seldom is done sooner.
            phases = {one.phase for one in self._state.trainers if one}
            if any(len(mine) > 3 and not mine[3] for one in self._state.trainers if one for mine in one.trained):
                phases.add(UNREAD)
            restarts = bool(self._stages) or self._bounds.kinds > 1
            weights = [
                _weight(one, phases, restarts=restarts, proves=self._bounds.proves) / (5 + self._seen[_label(one)])
                for one in options
            ]
            move = self._random.choices(options, weights)[0]
            before = self._state.server
            self._state = self._does(move, options)
            self._tally.note(move, before, self._state.server, self._num_bytes)
            self._seen[_label(move)] += 1
            if self._state.is_done:
                return
            name = "; ".join((move.name, *self._calls_beside()))
            self._tally.check(self._real.check(self._state.server, name), name)
            if self._stages:
                self._stages.check(self._state.server, name)

    def _beside_the_model(self) -> Iterator[Move]:
        """A prompt goes from its stream, and nothing else with it: no move of the model does that, and its trainer
        finds it."""
        for opened in self._state.server.window:
            for index, batch in enumerate(self._state.server.slot_of(opened.iteration).batches):
                if batch and batch.prompts and not batch.made and not batch.is_dead:
                    place = (opened.iteration, index, 0, 0)
                    lost = self._state._replace(server=self._state.server.with_item(place, ()))
                    yield Move("a prompt is lost", -1, lost, True, place=place)
        if self._state.server.window:
            for who, claim in enumerate(self._state.workers):
                if not claim and not self._bounds.is_generator(who):
                    yield Move("works on several items", who, self._state)

    def _calls_beside(self) -> Iterator[str]:
        """Does some of wrong_calls.py, those that change nothing; yields what was called and said."""
        server = self._state.server
        asked = [
            self._others.of_trainer(self._state),
            self._others.of_generator(self._state, self._generators),
            *([self._stages.calls.wrong_call(self._state)] if self._stages else []),
        ]
        for call in asked:
            if call is None:
                continue
            outcome, after = call.model(server)
            if after != server:
                continue
            name = f"{call.name}: {outcome}"
            said = answer_of(call.real)
            is_granted = outcome in call.words and not isinstance(said, str)
            assert is_granted or (isinstance(said, str) and outcome in said), (name, said)
            if call.name.startswith("publishes"):
                self._tally.note_publication(outcome, server, is_new=False)
            self._seen.update(f"{call.name}: {word}, and nothing changes" for word in set(outcome.split()))
            yield name

    def _is_first(self, move: Move) -> bool:
        """Whether a claim would get it: what is free in an older iteration comes before it.

        Which batch a generator gets that claims what is free, the server says.
        """
        if not move.place or not move.name.startswith("claims") or move.name.startswith("claims again"):
            return True
        iteration, _, stage, _ = move.place
        if stage and not move.state.workers[move.who]:
            return False  # a claim of several items passes over the batch that it buries
        if not stage and not move.name.startswith("claims from"):
            return True
        server = self._state.server
        older = [one.iteration for one in server.window if one.iteration < iteration]
        return not any(is_free(server, one, stage) for one in older)

    def _does(self, move: Move, options: list[Move]) -> State:
        """The state after it. Which of its batches a claim gets is the server's choice."""
        if move.who < 0:
            self._server_does(move)
        elif move.name.startswith("acquires"):
            self._broker.redis.hset(self._real.keys.fence, "lease_until", "1")
            side = self._real.trainer(uuid.uuid4().hex)
            epoch = side.acquire()
            assert epoch > max(self._real.epochs.values()), "an epoch was handed out twice (I4)"
            self._real.epochs[move.state.server.epoch] = epoch
            self._sides[move.who] = side
            self._others.trainers.append((move.state.server.epoch, side))
        elif move.name in ("finds its commit lost", "writes its checkpoint", "writes the last checkpoint"):
            self._trainer_confirms(move)
        elif move.name.startswith(WRITES_OF_A_TRAINER):
            self._trainer_calls(move)
        elif self._stages and move.name == "works on several items":
            return self._stages.calls.works(self._state, move.who)
        elif self._stages and any(move.place[2:3]) and move.name.startswith("claims"):
            return self._stages.claim(self._state, move, options)
        elif self._stages and any(move.place[2:3]) and move.name.startswith(OF_ITEMS):
            self._stages.does(self._state, move)
        elif move.name.endswith(": buried"):
            return self._buries(move)
        elif move.name.startswith("claims"):
            return self._claim(move, options)
        elif move.name == "takes a copy" and self._is_to_hedge(move):
            self._tally.counted["hedged"] += 1
            return self._claim(move, options)
        elif move.name.startswith("proves"):
            self._tally.counted[self._proves(move)] += 1
        elif move.name not in ("worker dies", "its engine goes wrong", "makes its engine anew"):
            self._generator_does(move)
        return move.state

    def _trainer(self, move: Move) -> tuple[Trainer, TrainerSide]:
        trainer, side = self._state.trainers[move.who], self._sides[move.who]
        assert isinstance(trainer, Trainer)
        assert side is not None
        return trainer, side

    def _trainer_confirms(self, move: Move) -> None:
        trainer, side = self._trainer(move)
        is_lost = "lost the commit" in str(answer_of(lambda: side.confirm(trainer.iteration)))
        assert is_lost == (move.name == "finds its commit lost")

    def _trainer_calls(self, move: Move) -> None:
        trainer, side = self._trainer(move)
        name, _, outcome = move.name.partition(": ")
        name = name.removesuffix(", answer lost")
        self._broker.loses_next_answer = move.name == "claims rollouts, answer lost"
        refusal = answer_of(lambda: self._call(side, trainer, name))
        is_alive = bool(move.state.trainers[move.who])
        if refusal:
            word = WORDS.get(outcome, outcome) if name == "reads columns" else outcome
            assert word in refusal, (refusal, move)
            assert not is_alive, move
        else:
            # A trainer that was given what it can't use has got it from the server all the same.
            assert is_alive or name in ("claims rollouts", "fails the job", "gives the job up") or move.state.is_done, (
                move
            )

    def _call(self, side: TrainerSide, trainer: Trainer, name: str) -> None:
        iteration, bounds, real = trainer.iteration, self._bounds, self._real
        kept = max(0, iteration - bounds.lag)
        if name == "rewind":
            side.rewind(self._record(REWIND, trainer, {}))
        elif name in ("announces", "announces the next"):
            digest = trainer.versions[trainer.at] if name == "announces" else made_by(trainer, bounds)
            side.publish_weights(real.manifest(digest), oldest_kept=kept)
        elif name == "opens":
            opening = bounds.opening(iteration + trainer.at, iteration)
            versions = {digest // VARIANTS: digest_text(digest) for digest in trainer.versions}
            side.open_iteration(real.opening(opening), versions)
        elif name == "claims rollouts":
            self._claim_rollouts(side, trainer)
        elif name == "reconciles":
            side.reconcile(iteration, real.batches(iteration, bounds.sent(iteration, iteration)))
        elif name == "dispatches":
            sent = bounds.sent(iteration + 1, iteration + 1)
            side.dispatch(iteration + 1, real.batches(iteration + 1, tuple(one for one in sent if one[1] != NONE)))
        elif name.startswith("renews"):
            side.renew()
        elif name == "reads columns":
            self._read_columns(side, trainer)
        elif name in ("ends the job", "fails the job", "gives the job up"):
            end = JobState.SUCCEEDED if name == "ends the job" else JobState.FAILED
            real.jobs.move(real.job_id, end, trainer_epoch=side.trainer_epoch)
        else:
            self._commit(side, trainer)

    def _claim_rollouts(self, side: TrainerSide, trainer: Trainer) -> None:
        """All that there is, in one call or in two, some of it read ahead by a wait."""
        server, iteration = self._state.server, trainer.iteration
        _, _, rollouts = fence.claim_rollouts(server, trainer.epoch, iteration, trainer.last, OFF)
        if self._broker.loses_next_answer:
            with pytest.raises(BrokerUnavailable):
                side.claim_rollouts(iteration, max_batches=8)
            return
        if self._random.random() < 0.3:
            side.wait_for_rollouts(iteration, 0.001)
        arrived, num_dead = side.claim_rollouts(iteration, max_batches=self._random.choice((1, 8)))
        arrived += side.claim_rollouts(iteration, max_batches=8)[0]
        assert [one.digest for one in arrived] == [
            self._real.digest_of(one[2], one[1], content=one[4], digest=one[3]) for one in rollouts
        ]
        batches = server.slot_of(iteration).batches
        assert num_dead == sum(bool(batch and batch.is_dead) for batch in batches)

    def _read_columns(self, side: TrainerSide, trainer: Trainer) -> None:
        assert self._stages
        unread = [batch for batch, mine in enumerate(trainer.trained) if mine and not mine[3]]
        content, digest = trainer.trained[unread[0]][1:3]
        batch = self._real.rollouts(trainer.iteration, unread[0], content=content, digest=digest)
        there = self._state.server.slot_of(trainer.iteration).batches[unread[0]]
        is_whole = there and there.made and not there.left
        items = tuple(tuple(one[1] for one in stage) for stage in there.items[1:]) if there and is_whole else ()
        self._stages.check_columns(side, batch, items)

    def _commit(self, side: TrainerSide, trainer: Trainer) -> None:
        iteration, real = trainer.iteration, self._real
        trained = {
            real.batch_id(iteration, batch): real.digest_of(iteration, batch, content=mine[1], digest=mine[2])
            for batch, mine in enumerate(trainer.trained)
            if mine
        }
        far, made = iteration + self._bounds.lag + 1, made_by(trainer, self._bounds)
        opening = None
        if far <= self._bounds.last_iteration:
            opening = real.opening(self._bounds.opening(far, iteration + 1))
        record = self._record(COMMIT, trainer, trained)
        side.commit(record, trained, event=None, opening=opening, next_version=(iteration + 1, digest_text(made)))

    def _record(self, kind: int, trainer: Trainer, trained: dict[str, str]) -> AuditRecord:
        record = self._real.record(
            kind,
            trainer.iteration,
            digest=trainer.digest,
            epoch=trainer.epoch,
            previous=self._real.links[trainer.link],
            trained=trained,
        )
        self._real.note((kind, trainer.iteration, trainer.epoch), record)
        return record

    # The server

    def _server_does(self, move: Move) -> None:
        real = self._real
        if move.name == "writes reach the disk":
            self._disk = real.dump()
            self._newest_on_disk = dict(self._others.newest)
            self._tally.writes_reach_the_disk()
        elif move.name == "a prompt is lost":
            iteration, index = move.place[:2]
            lose_prompts(self._broker, real.keys, real.batch_id(iteration, index), iteration=iteration)
        elif move.name == "the job is given up":
            real.jobs.move(real.job_id, JobState.FAILED, reason="its trainers end")
            real.epochs[move.state.server.epoch] = read_fence(self._broker, real.keys).trainer_epoch
        elif move.name == "the job is removed":
            self._broker.redis.hset(real.keys.fence, "lease_until", "1")
            real.jobs.remove(real.job_id)
        elif move.name == "the job is resumed":
            real.jobs.resume(real.job_id)
            real.jobs.move(real.job_id, JobState.RUNNING)
            real.epochs[move.state.server.epoch] = read_fence(self._broker, real.keys).trainer_epoch
        elif move.name == "the last writes are lost":
            real.restore(self._disk)
            self._others.newest = dict(self._newest_on_disk)
            self._tally.last_writes_are_lost()
