"""One walk through the model, move by move on a real server: both must answer the same and hold the same."""

from __future__ import annotations

import random
import uuid
from collections import Counter

from broker.connection.client import Broker
from broker.generator_side import Claim, GeneratorSide
from broker.job_store import JobStore
from broker.keys import GENERATOR_GROUP, JobKeys
from broker.trainer_side import Opening, TrainerSide, read_fence
from contracts.errors import Conflict, FencedOff, FenceViolation
from contracts.events import AuditRecord, record_digest
from contracts.jobs import JobState
from contracts.rollouts import PromptBatch, RolloutBatch, batch_digest
from tests.builders import job_spec, prompt_batch, rollout_batch
from tests.integration.fence_checks import check_claims, read, word_of
from tests.integration.fence_parts import manifest, weights_digest
from tests.model import fence
from tests.model.fence import VARIANTS
from tests.model.moves import Move, moves
from tests.model.state import COMMITS, ENDS, SETTLE, Bounds, State, Trainer

LONG_S = 3600.0
BOUNDS = Bounds(faults=12, is_deterministic=False, max_attempts=30, max_epochs=14)
LEDGER_WORDS = {fence.EXPECTED: "expected", fence.PUBLISHED: "published", fence.DEAD: "dead"}
KINDS = {"commit": fence.COMMIT, "rewind": fence.REWIND}
WRITES_OF_A_TRAINER = (
    *("rewind", "announces", "opens", "claims rollouts", "reconciles", "renews", "commits"),
    *("ends the job", "fails the job"),
)


def digest_text(digest: int) -> str:
    return weights_digest(*divmod(digest, VARIANTS))


LIKELY_IN = {
    COMMITS: ("writes reach the disk",),
    SETTLE: ("the last writes are lost", "trainer dies", "acquires from"),
    ENDS: ("acquires from", "the job is given up", "ends the job"),
}
"""What is worth trying while a trainer is in such a phase: blind draws seldom get there."""


def _weight(move: Move, phases: set[int]) -> float:
    """How often it is drawn. Faults are rare: a run that meets too many gets nowhere."""
    if any(move.name.startswith(names) for phase, names in LIKELY_IN.items() if phase in phases):
        return 2.0
    if move.name.startswith(("the job is given up", "fails the job")):
        return 0.02
    return 0.03 if move.is_fault or (move.who < 0 and move.name != "the job is resumed") else 1.0


class Walk:
    """Draws moves by a seed, and does each of them twice."""

    def __init__(self, broker: Broker, seed: int, seen: Counter[str]) -> None:
        self._broker, self._random = broker, random.Random(seed)
        self._jobs = JobStore(broker)
        self._job_id, _ = self._jobs.create(job_spec(rollout__max_attempts=30, name=uuid.uuid4().hex))
        self._jobs.move(self._job_id, JobState.RUNNING)
        self._keys = JobKeys(self._job_id)
        self._state = BOUNDS.first_state()
        self._sides: list[TrainerSide | None] = [None] * BOUNDS.trainers
        self._generators = [GeneratorSide(broker, self._job_id, f"g{i}") for i in range(BOUNDS.generators)]
        self._claims: list[Claim | None] = [None] * BOUNDS.generators
        self._epochs = {0: 0}
        self._links: dict[tuple[int, ...], str] = {(): ""}
        """The model's audit record → the digest of the real one."""
        self._disk: dict[str, bytes] = {}
        self._seen = seen

    def run(self, num_moves: int) -> None:
        for _ in range(num_moves):
            # An answer of claim_rollouts that was lost: test_fence_properties.py.
            every = moves(self._state, BOUNDS, frozenset())
            options = [one for one in every if one.name != "claims rollouts, answer lost"]
            if not options:
                return
            # What the walks before have done seldom is done sooner.
            phases = {one.phase for one in self._state.trainers if one}
            weights = [_weight(one, phases) / (5 + self._seen[one.name]) for one in options]
            move = self._random.choices(options, weights)[0]
            self._state = self._does(move, options)
            self._seen[move.name] += 1
            self._check(move.name)

    def _does(self, move: Move, options: list[Move]) -> State:
        """The state after it. Which of its batches a claim gets is the server's choice."""
        if move.who < 0:
            self._server_does(move)
        elif move.name.startswith("acquires"):
            self._broker.redis.hset(self._keys.fence, "lease_until", "1")
            side = TrainerSide(self._broker, self._job_id, owner=uuid.uuid4().hex, lease_s=LONG_S)
            self._epochs[move.state.server.epoch] = side.acquire()
            self._sides[move.who] = side
        elif move.name in ("finds its commit lost", "writes its checkpoint", "writes the last checkpoint"):
            self._trainer_confirms(move)
        elif move.name.startswith(WRITES_OF_A_TRAINER):
            if not move.name.startswith("renews its lease") or move.batch == -1:
                self._trainer_calls(move)
        elif move.name.startswith("claims"):
            batch = self._claim(move)
            same = [one for one in options if (one.name, one.who, one.batch) == (move.name, move.who, batch)]
            assert len(same) == 1, f"the model knows no {move.name} of batch {batch}"
            return same[0].state
        else:
            self._generator_does(move)
        return move.state

    def _trainer_confirms(self, move: Move) -> None:
        trainer, side = self._state.trainers[move.who], self._sides[move.who]
        assert isinstance(trainer, Trainer)
        assert side is not None
        try:
            side.confirm(trainer.iteration)
        except FenceViolation:
            assert move.name == "finds its commit lost"
        else:
            assert move.name != "finds its commit lost"

    def _trainer_calls(self, move: Move) -> None:
        trainer, side = self._state.trainers[move.who], self._sides[move.who]
        assert isinstance(trainer, Trainer)
        assert side is not None
        name, _, outcome = move.name.partition(": ")
        name = name.removesuffix(", answer lost")
        refusal = ""
        try:
            self._call(side, trainer, name)
        except FencedOff:
            refusal = "fenced"
        except Conflict:
            refusal = "refused"
        except FenceViolation as error:
            refusal = str(error)
        is_alive = bool(move.state.trainers[move.who])
        if refusal:
            assert outcome in refusal, move
            assert not is_alive, move
        else:
            # A trainer that was given what it can't use has got it from the server all the same.
            assert is_alive or name in ("claims rollouts", "fails the job") or move.state.is_done, move

    def _call(self, side: TrainerSide, trainer: Trainer, name: str) -> None:
        iteration, made = trainer.iteration, VARIANTS * (trainer.iteration + 1) + trainer.epoch
        if name == "rewind":
            side.rewind(self._record("rewind", trainer, {}))
        elif name in ("announces", "announces the next"):
            digest = trainer.digest if name == "announces" else made
            side.publish_weights(manifest(digest // VARIANTS, digest_text(digest)), oldest_kept=iteration)
        elif name == "opens":
            side.open_iteration(self._opening(iteration, trainer.digest))
        elif name == "claims rollouts":
            side.claim_rollouts(max_batches=8)
        elif name == "reconciles":
            side.reconcile(iteration, self._batches(iteration, trainer.digest))
        elif name.startswith("renews"):
            side.renew()
        elif name in ("ends the job", "fails the job"):
            end = JobState.SUCCEEDED if name == "ends the job" else JobState.FAILED
            self._jobs.move(self._job_id, end, trainer_epoch=side.trainer_epoch)
        else:
            trained = {}
            for batch, mine in enumerate(trainer.trained):
                if mine:
                    trained[f"{iteration}/train/{batch}"] = self._digest_of(iteration, batch, mine[1], trainer.digest)
            opening = self._opening(iteration + 1, made) if iteration < BOUNDS.iterations - 1 else None
            side.commit(self._record("commit", trainer, trained), trained, event=None, opening=opening)

    def _batches(self, iteration: int, digest: int) -> tuple[PromptBatch, ...]:
        return tuple(
            prompt_batch(
                [[1, 2], [3]],
                job_id=self._job_id,
                batch_id=f"{iteration}/train/{index}",
                iteration=iteration,
                policy_version=iteration,
                weights_digest=digest_text(digest),
            )
            for index in range(BOUNDS.batches)
        )

    def _opening(self, iteration: int, digest: int) -> Opening:
        return Opening(
            iteration=iteration,
            policy_version=iteration,
            weights_digest=digest_text(digest),
            batches=self._batches(iteration, digest),
        )

    def _record(self, kind: str, trainer: Trainer, trained: dict[str, str]) -> AuditRecord:
        record = AuditRecord(
            kind=kind,
            iteration=trainer.iteration,
            policy_version=trainer.iteration,
            weights_digest=digest_text(trainer.digest),
            next_weights_digest="",
            trainer_epoch=self._epochs[trainer.epoch],
            batches=trained,
            abandoned={},
            previous=self._links[trainer.link],
        )
        self._links[KINDS[kind], trainer.iteration, trainer.epoch] = record_digest(record)
        return record

    # Generators

    def _claim(self, move: Move) -> int:
        if not move.name.startswith("claims: "):
            entry = self._state.server.batches[move.batch][1]
            batch_id = f"{self._state.server.iteration}/train/{move.batch}"
            entry_id = next(one[0] for one in read(self._broker, self._keys).prompts if one[1] == batch_id)
            self._broker.redis.xclaim(
                self._keys.prompts, GENERATOR_GROUP, f"g{entry[3]}", 0, [entry_id], idle=int(2000 * LONG_S), justid=True
            )
        claim = self._generators[move.who].claim(LONG_S)
        assert claim is not None, move
        self._claims[move.who] = claim
        return int(claim.prompt_batch.batch_id.rpartition("/")[2])

    def _generator_does(self, move: Move) -> None:
        claim, mine = self._claims[move.who], self._state.generators[move.who]
        if move.name == "takes a copy":
            owner = self._state.server.batches[move.batch][1][3]
            self._claims[move.who] = self._claims[owner]
        elif move.name.startswith("publishes"):
            assert claim is not None
            content = 4 * mine[4] + move.who
            batch = self._rollouts(mine[0], mine[1], content, mine[2])
            outcome = self._generators[move.who].publish(claim, batch).value
            assert move.name in (f"publishes: {outcome}", "publishes, answer lost"), outcome
        elif move.name.startswith("fails"):
            assert claim is not None
            assert move.name == f"fails its batch: {self._generators[move.who].fail(claim, 'no reward').value}"

    def _rollouts(self, iteration: int, batch: int, content: int, digest: int) -> RolloutBatch:
        return rollout_batch(
            job_id=self._job_id,
            batch_id=f"{iteration}/train/{batch}",
            iteration=iteration,
            policy_version=iteration,
            weights_digest=digest_text(digest),
            num_groups=2,
            group_size=2,
            generator_id=f"g{content % 4}",
            attempt=content // 4,
            seed=content,
        )

    def _digest_of(self, iteration: int, batch: int, content: int, digest: int) -> str:
        return batch_digest(self._rollouts(iteration, batch, content, digest))

    # The server

    def _server_does(self, move: Move) -> None:
        redis = self._broker.redis
        if move.name == "writes reach the disk":
            rows = {key: redis.dump(key) for key in self._keys.script_keys}
            self._disk = {key: value for key, value in rows.items() if value}  # type: ignore[misc]
            return
        if move.name == "the job is given up":
            self._jobs.move(self._job_id, JobState.FAILED, reason="its trainers end")
            self._epochs[move.state.server.epoch] = read_fence(self._broker, self._keys).trainer_epoch
            return
        if move.name == "the job is resumed":
            self._jobs.resume(self._job_id)
            self._jobs.move(self._job_id, JobState.RUNNING)
            self._epochs[move.state.server.epoch] = read_fence(self._broker, self._keys).trainer_epoch
            return
        while int(self._broker.now_s() * 1000) <= max(self._epochs.values()):
            pass  # a restart takes longer than the milliseconds that epochs ran ahead
        with redis.pipeline(transaction=True) as pipe:
            for key in self._keys.script_keys:
                pipe.delete(key)
                if key in self._disk:
                    pipe.restore(key, 0, self._disk[key])
            pipe.execute()

    def _check(self, name: str) -> None:
        if self._state.is_done:
            return
        server, held = self._state.server, read(self._broker, self._keys)
        check_claims(held)
        stands = held.fence
        assert int(stands.get("epoch", 0)) == self._epochs[server.epoch], name
        assert (stands.get("state", "") == "open", int(stands.get("committed", -1))) == (
            server.is_open,
            server.committed,
        )
        announced = {digest // VARIANTS: digest_text(digest) for digest in server.weights if digest != -1}
        assert held.weights == announced, name
        if held.audit or server.last:
            last = held.audit[-1]
            assert (KINDS[last.kind], last.iteration) == server.last[:2], name
            assert last.trainer_epoch == self._epochs[server.last[2]], name
        if not server.is_open:
            assert (held.ledger, held.prompts, held.rollouts) == ({}, [], []), name
            return
        assert (int(stands["iteration"]), stands["digest"]) == (server.iteration, digest_text(server.digest)), name
        prefix = f"{server.iteration}/train/"
        words = {f"{prefix}{i}": LEDGER_WORDS[ledger[0]] for i, (ledger, _) in enumerate(server.batches)}
        assert {key: word_of(one) for key, one in held.ledger.items()} == words, name
        attempts = {f"{prefix}{i}": entry[1] for i, (_, entry) in enumerate(server.batches) if entry}
        assert {batch_id: first for _, batch_id, first in held.prompts} == attempts, name
        owners = {
            f"{prefix}{i}": (f"g{entry[3]}", entry[2])
            for i, (_, entry) in enumerate(server.batches)
            if entry and entry[3] >= 0
        }
        batch_of = {entry_id: batch_id for entry_id, batch_id, _ in held.prompts}
        assert {batch_of[entry_id]: (owner, times) for entry_id, owner, times in held.leases} == owners, name
        assert [one.batch_id for one in held.rollouts] == [f"{prefix}{one[1]}" for one in server.rollouts], name
