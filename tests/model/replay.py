"""One walk through the model, move by move on a real server: both must answer the same and hold the same."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from typing import Any

import pytest

from broker.fence import read_fence
from broker.generator_side import Claim, GeneratorSide
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import decode
from contracts.errors import BrokerUnavailable, WrongEngine
from contracts.events import AuditRecord
from contracts.jobs import JobState
from contracts.rollouts import PromptBatch
from contracts.versions import WeightManifest
from tests.integration.fence_checks import read
from tests.integration.fence_parts import AnswerLosingBroker, let_expire, manifest
from tests.model.move import Move
from tests.model.moves import moves
from tests.model.real import LONG_S, RealFence, answer_of, digest_text, engine_text
from tests.model.server import COMMIT, FREE, NONE, REWIND, VARIANTS, known
from tests.model.stage_replay import StageReplay, stage_tables
from tests.model.state import COMMITS, DISPATCHES, ENDS, SETTLE, Bounds, State, Trainer
from tests.model.trainer_moves import made_by

BOUNDS = Bounds(faults=15, is_deterministic=False, may_remove=True, may_damage=True, max_attempts=15, max_epochs=14)
OF_A_RESTART = ("writes reach the disk", "the last writes are lost")
"""Likely in a job with stages, or with two kinds of engines: they have to fall between a claim and its put, or its
publication."""
WORDS = {"missing": "lacks its columns", "other": "not what the ledger records"}
"""What the trainer's side says of what it reads beside the functions."""
OF_ITEMS = ("puts", "fails its item", "gives back its item", "stage worker dies")
WRITES_OF_A_TRAINER = (
    *("rewind", "announces", "opens", "claims rollouts", "reconciles", "renews", "commits", "dispatches"),
    *("ends the job", "fails the job", "gives the job up", "reads columns"),
)
LIKELY_IN = {
    COMMITS: ("writes reach the disk",),
    SETTLE: ("the last writes are lost", "trainer dies", "acquires from"),
    DISPATCHES: ("the last writes are lost",),
    ENDS: ("acquires from", "the job is given up", "ends the job"),
}
"""What is worth trying while a trainer is in such a phase: blind draws seldom get there."""


def _weight(move: Move, phases: set[int], *, restarts: bool) -> float:
    """How often it is drawn. Faults are rare: a run that meets too many gets nowhere."""
    if restarts and move.name in OF_A_RESTART:
        return 0.8
    if any(move.name.startswith(names) for phase, names in LIKELY_IN.items() if phase in phases):
        return 2.0
    if move.name.startswith("claims") and move.name.endswith("answer lost"):
        return 0.005
    if move.name == "the newest checkpoint is damaged":
        return 0.1
    if move.name.startswith(("the job is given up", "fails the job")):
        return 0.02
    return 0.03 if move.is_fault or (move.who < 0 and move.name != "the job is resumed") else 1.0


class Walk:
    """Draws moves by a seed, and does each of them twice."""

    def __init__(self, broker: AnswerLosingBroker, seed: int, seen: Counter[str], bounds: Bounds = BOUNDS) -> None:
        self._broker, self._random, self._bounds = broker, random.Random(seed), bounds
        spec: dict[str, Any] = {"stages": stage_tables(bounds)} if bounds.stages else {}
        self._real = RealFence(broker, bounds, rollout__max_attempts=bounds.max_attempts, **spec)
        self._state = bounds.first_state()
        self._sides: list[TrainerSide | None] = [None] * bounds.trainers
        self._generators = [
            GeneratorSide(self._broker, self._real.job_id, f"g{i}", engine=engine_text(bounds.engine_of(i)) or None)
            for i in range(bounds.generators)
        ]
        for side in self._generators:
            side.wait_for_prompts(0.001)  # each knows the job's spec, as one that has claimed does
        self._claims: list[Claim | None] = [None] * bounds.generators
        self._numbers = [0] * bounds.generators
        """[generators] The number of the newest claim of each, whether it has heard of it or not."""
        self._stages = StageReplay(self._broker, self._real, bounds) if bounds.stages else None
        self._disk: dict[str, bytes] = {}
        self._seen = seen

    def run(self, num_moves: int) -> None:
        for _ in range(num_moves):
            # An answer of claim_rollouts that was lost: test_fence_properties.py.
            every = moves(self._state, self._bounds, frozenset())
            options = [one for one in every if one.name != "claims rollouts, answer lost" and self._is_first(one)]
            if not options:
                return
            # What the walks before have done seldom is done sooner.
            phases = {one.phase for one in self._state.trainers if one}
            restarts = bool(self._stages) or self._bounds.kinds > 1
            weights = [_weight(one, phases, restarts=restarts) / (5 + self._seen[one.name]) for one in options]
            move = self._random.choices(options, weights)[0]
            self._state = self._does(move, options)
            self._seen[move.name] += 1
            if not self._state.is_done:
                self._real.check(self._state.server, move.name)
                if self._stages:
                    self._stages.check(self._state.server, move.name)

    def _is_first(self, move: Move) -> bool:
        """Whether a claim of an expired lease would get it: a new batch of an older iteration comes before it."""
        server = self._state.server
        if move.name == "claims an item again":
            return True
        if move.name.startswith("claims an item"):
            return bool(move.state.workers[move.who]) and not self._is_behind(move)
        if not move.name.startswith("claims from"):
            return True
        older = [one.iteration for one in server.window if one.iteration < move.iteration]
        return not any(entry and not entry[2] for one in older for _, entry in server.slot_of(one).batches)

    def _is_behind(self, move: Move) -> bool:
        """Whether an item of the same stage is free in an older iteration."""
        stage, server = move.state.workers[move.who][2], self._state.server
        older = [server.slot_of(one.iteration).rows for one in server.window if one.iteration < move.iteration]
        return any(item[:1] == (FREE,) for slot in older for rows in slot if rows for item in rows.items[stage])

    def _does(self, move: Move, options: list[Move]) -> State:
        """The state after it. Which of its batches a claim gets is the server's choice."""
        if move.who < 0:
            self._server_does(move)
        elif move.name.startswith("acquires"):
            self._broker.redis.hset(self._real.keys.fence, "lease_until", "1")
            side = self._real.trainer(uuid.uuid4().hex)
            self._real.epochs[move.state.server.epoch] = side.acquire()
            self._sides[move.who] = side
        elif move.name in ("finds its commit lost", "writes its checkpoint", "writes the last checkpoint"):
            self._trainer_confirms(move)
        elif move.name.startswith(WRITES_OF_A_TRAINER):
            if not move.name.startswith("renews its lease") or move.batch == NONE:
                self._trainer_calls(move)
        elif self._stages and move.name.startswith("claims an item"):
            return self._stages.claim(self._state, move, options)
        elif self._stages and move.name.startswith(OF_ITEMS):
            self._stages.does(self._state, move)
        elif move.name.startswith("claims"):
            return self._claim(move, options)
        else:
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
            side.publish_weights(manifest(digest // VARIANTS, digest_text(digest)), oldest_kept=kept)
        elif name == "opens":
            opening = bounds.opening(iteration + trainer.at, iteration)
            versions = {digest // VARIANTS: digest_text(digest) for digest in trainer.versions}
            side.open_iteration(real.opening(opening), versions)
        elif name == "claims rollouts":
            side.claim_rollouts(iteration, max_batches=8)
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

    def _read_columns(self, side: TrainerSide, trainer: Trainer) -> None:
        assert self._stages
        unread = [batch for batch, mine in enumerate(trainer.trained) if mine and not mine[3]]
        content, digest = trainer.trained[unread[0]][1:3]
        batch = self._real.rollouts(trainer.iteration, unread[0], content=content, digest=digest)
        rows = self._state.server.slot_of(trainer.iteration).rows[unread[0]]
        items = tuple(tuple(one[1] for one in stage) for stage in rows.items) if rows and not rows.left else ()
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
        side.commit(record, trained, event=None, opening=opening, made=(iteration + 1, digest_text(made)))

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

    # Generators

    def _claim(self, move: Move, options: list[Move]) -> State:
        real, server, who = self._real, self._state.server, move.who
        if move.name.startswith("claims from"):
            entry = server.slot_of(move.iteration).batches[move.batch][1]
            batch_id = real.batch_id(move.iteration, move.batch)
            prompts = read(self._broker, real.keys).slot_of(move.iteration).prompts
            entry_id = next(one[0] for one in prompts if one[1] == batch_id)
            let_expire(self._broker, real.keys, f"g{entry[3]}", entry_id, iteration=move.iteration)
        claim = self._answer(move)
        if move.name == "claims again":
            assert claim.number == self._numbers[who]
        self._claims[who], self._numbers[who] = claim, claim.number
        same = [
            one
            for one in options
            if (one.name, one.who) == (move.name, who)
            and real.batch_id(one.iteration, one.batch) == claim.prompt_batch.batch_id
            and one.state.generators[who][2] in (NONE, *self._digests(claim))
        ]
        assert len(same) == 1, f"the model knows no {move.name} of {claim.prompt_batch.batch_id}"
        oldest = min(one.iteration for one in options if (one.name, one.who) == (move.name, who))
        assert same[0].iteration == (oldest if move.name.startswith(("claims: ", "claims,")) else move.iteration)
        return same[0].state

    def _answer(self, move: Move) -> Claim:
        """The claim that the server gives, also where its generator never hears of it."""
        side = self._generators[move.who]
        if move.name != "claims, answer lost":
            claim = side.claim(LONG_S, held=self._held(move))
            assert claim is not None, move
            return claim
        self._broker.loses_next_answer = True
        with pytest.raises(BrokerUnavailable):
            side.claim(LONG_S)
        _, entry, attempt, number, payload, packed = self._broker.lost
        return Claim(
            prompt_batch=decode(payload, PromptBatch),
            entry_id=entry.decode(),
            number=number,
            attempt=attempt,
            manifest=decode(packed, WeightManifest),
        )

    def _digests(self, claim: Claim) -> list[int]:
        """The digests of the model that a claim's version may be."""
        first = VARIANTS * claim.manifest.policy_version
        every = range(first, first + VARIANTS)
        return [digest for digest in every if digest_text(digest) == claim.manifest.weights_digest]

    def _held(self, move: Move) -> tuple[int, str] | None:
        """The weights that the generator holds at this claim; those of a version that is gone are none of the range."""
        digest = move.state.generators[move.who][2]
        there = known(self._state.server.versions, 0, self._bounds.iterations)
        held = self._random.choice((digest, digest, there[0], digest + 1, NONE))
        return None if held == NONE else (held // VARIANTS, digest_text(held))

    def _generator_does(self, move: Move) -> None:
        claim, mine = self._claims[move.who], self._state.generators[move.who]
        if move.name == "asks for work: wrong_engine":
            with pytest.raises(WrongEngine, match="is sampled with"):
                self._generators[move.who].claim(LONG_S)
        elif move.name == "takes a copy":
            owner = self._state.server.slot_of(move.iteration).batches[move.batch][1][3]
            self._claims[move.who] = self._claims[owner]
        elif move.name.startswith("publishes"):
            assert claim is not None
            batch = self._real.rollouts(mine[0], mine[1], content=4 * mine[4] + move.who, digest=mine[2])
            outcome = self._generators[move.who].publish(claim, batch).value
            assert move.name in (f"publishes: {outcome}", "publishes, answer lost"), outcome
        elif move.name.startswith("fails"):
            assert claim is not None
            assert move.name == f"fails its batch: {self._generators[move.who].fail(claim, 'no reward').value}"
        elif move.name.startswith("gives back"):
            assert claim is not None
            assert move.name == f"gives back its batch: {self._generators[move.who].release(claim, 'no mount').value}"

    # The server

    def _server_does(self, move: Move) -> None:
        real = self._real
        if move.name == "writes reach the disk":
            self._disk = real.dump()
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
