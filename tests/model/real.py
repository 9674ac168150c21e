"""A job on a real server in the model's terms: the same calls, and a check that both hold the same.

The model names weights, completions, epochs and records by small numbers (`fence.py`); this knows what stands for each.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.keys import JobKeys
from broker.openings import Opening
from broker.trainer_side import TrainerSide
from contracts.errors import Conflict, FencedOff, FenceViolation, NotFound
from contracts.events import AuditRecord, record_digest
from contracts.jobs import JobState
from contracts.rollouts import PromptBatch, RolloutBatch, batch_digest
from tests.builders import job_spec, prompt_batch, rollout_batch
from tests.integration.fence_checks import Held, check_claims, read, word_of
from tests.integration.fence_parts import weights_digest
from tests.model import fence
from tests.model.fence import VARIANTS, Record, Server

LONG_S = 3600.0
"""No lease ends by itself while a test runs."""
LEDGER_WORDS = {fence.EXPECTED: "expected", fence.PUBLISHED: "published", fence.DEAD: "dead"}
KINDS = {fence.COMMIT: "commit", fence.REWIND: "rewind"}
GENERATORS = 4
"""A content is generator + 4 · attempt + 64 · variant."""
ATTEMPTS = 16


def digest_text(digest: int) -> str:
    return weights_digest(*divmod(digest, VARIANTS))


def answer_of(call: Callable[[], Any]) -> Any:
    """What the call returns, or the word of its refusal with what the server said."""
    try:
        return call()
    except FencedOff:
        return "fenced"
    except (Conflict, NotFound):
        return "refused"
    except FenceViolation as error:
        return str(error)


class RealFence:
    """One job, and what its real names are in the model."""

    def __init__(self, broker: Broker, *, num_batches: int, **spec: object) -> None:
        self.broker, self.num_batches = broker, num_batches
        self.jobs = JobStore(broker)
        self.job_id, _ = self.jobs.create(job_spec(name=uuid.uuid4().hex, **spec))
        self.jobs.move(self.job_id, JobState.RUNNING)
        self.keys = JobKeys(self.job_id)
        self.epochs = {0: 0}
        self.links: dict[Record, str] = {(): ""}
        """The model's audit record → the digest of the real one."""

    def trainer(self, owner: str) -> TrainerSide:
        return TrainerSide(self.broker, self.job_id, owner=owner, lease_s=LONG_S)

    def batches(self, iteration: int, digest: int) -> tuple[PromptBatch, ...]:
        return tuple(
            prompt_batch(
                [[1, 2], [3], [4]],
                job_id=self.job_id,
                batch_id=f"{iteration}/train/{index}",
                iteration=iteration,
                policy_version=iteration,
                weights_digest=digest_text(digest),
            )
            for index in range(self.num_batches)
        )

    def opening(self, digest: int) -> Opening:
        """Opens the iteration that samples these weights."""
        iteration = digest // VARIANTS
        return Opening(
            iteration=iteration,
            oldest_version=iteration,
            newest_version=iteration,
            batches=self.batches(iteration, digest),
        )

    def record(
        self, kind: int, iteration: int, *, digest: int, epoch: int, previous: str, trained: dict[str, str]
    ) -> AuditRecord:
        return AuditRecord(
            kind=KINDS[kind],
            iteration=iteration,
            policy_version=max(0, iteration),
            weights_digest=digest_text(digest),
            next_weights_digest="",
            trainer_epoch=self.epochs[epoch],
            batches=trained,
            abandoned={},
            previous=previous,
        )

    def note(self, model_record: Record, record: AuditRecord) -> None:
        """It stands, or may stand, in the chain."""
        self.links[model_record] = record_digest(record)

    def rollouts(self, iteration: int, batch: int, /, *, content: int, digest: int, **changes: Any) -> RolloutBatch:
        fields = {
            "job_id": self.job_id,
            "batch_id": f"{iteration}/train/{batch}",
            "iteration": iteration,
            "policy_version": iteration,
            "weights_digest": digest_text(digest),
            "num_groups": 3,
            "group_size": 2,
            "generator_id": f"g{content % GENERATORS}",
            "attempt": content // GENERATORS % ATTEMPTS,
            "seed": content,
        }
        return rollout_batch(**(fields | changes))

    def digest_of(self, iteration: int, batch: int, *, content: int, digest: int) -> str:
        return batch_digest(self.rollouts(iteration, batch, content=content, digest=digest))

    def dump(self) -> dict[str, bytes]:
        """What is on the server's disk."""
        rows = {key: self.broker.redis.dump(key) for key in self.keys.of_script()}
        return {key: value for key, value in rows.items() if value}  # type: ignore[misc]

    def restore(self, rows: dict[str, bytes]) -> None:
        """A restart takes longer than the milliseconds that epochs ran ahead."""
        while int(self.broker.now_s() * 1000) <= max(self.epochs.values()):
            pass
        with self.broker.redis.pipeline(transaction=True) as pipe:
            for key in self.keys.of_script():
                pipe.delete(key)
                if key in rows:
                    pipe.restore(key, 0, rows[key])
            pipe.execute()

    def check(self, server: Server, name: str = "") -> Held:
        """The server holds what the model says, and nothing else; `name`: of the move before. Returns what it holds."""
        held = read(self.broker, self.keys)
        check_claims(held)
        self._check_fence(server, held, name)
        if not server.is_open:
            assert (held.ledger, held.prompts, held.rollouts) == ({}, [], []), name
            return held
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
        self._check_rollouts(server, held, prefix, name)
        return held

    def _check_fence(self, server: Server, held: Held, name: str) -> None:
        stands = held.fence
        assert stands.trainer_epoch == self.epochs[server.epoch], name
        assert (bool(stands.window), stands.committed) == (server.is_open, server.committed), name
        announced = {digest // VARIANTS: digest_text(digest) for digest in server.weights if digest != -1}
        assert held.weights == announced, name
        if held.audit or server.last:
            last = held.audit[-1]
            assert (last.kind, last.iteration) == (KINDS[server.last[0]], server.last[1]), name
            assert last.trainer_epoch == self.epochs[server.last[2]], name
        following = 0
        for one in held.audit:
            assert one.iteration == following if one.kind == "commit" else one.iteration <= following, name
            following = one.iteration + (one.kind == "commit")
        if server.is_open:
            (opened,) = stands.window
            versions = {server.iteration: digest_text(server.digest)}
            assert (opened.iteration, stands.versions) == (server.iteration, versions), name
            kinds = [ledger[:1] for ledger, _ in server.batches]
            counted = (opened.published, opened.dead, opened.expected)
            assert counted == (kinds.count((fence.PUBLISHED,)), kinds.count((fence.DEAD,)), len(kinds)), name

    def _check_rollouts(self, server: Server, held: Held, prefix: str, name: str) -> None:
        """I1, I2: each accepted batch is complete and of the fence's weights. I3: it is there once."""
        assert [one.batch_id for one in held.rollouts] == [f"{prefix}{one[1]}" for one in server.rollouts], name
        for batch, (_, index, iteration, digest, content, _, _) in zip(held.rollouts, server.rollouts, strict=True):
            assert (batch.iteration, batch.weights_digest) == (iteration, digest_text(digest)), name
            assert [len(group.rollouts) for group in batch.groups] == [2] * 3, name
            ledger: Any = held.ledger[batch.batch_id]
            expected = self.digest_of(iteration, index, content=content, digest=digest)
            assert batch_digest(batch) == ledger.digest == expected, name
            assert (f"g{server.batches[index][0][2]}", server.batches[index][0][3]) == (
                ledger.generator,
                ledger.attempt,
            )
