"""A job on a real server in the model's terms: the same calls, and a check that both hold the same.

The model names weights, completions, epochs and records by small numbers (`fence.py`); this knows what stands for each.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.openings import IterationOpening
from broker.trainer_side import TrainerSide
from contracts.encoding.arrays import pack_int32
from contracts.errors import Conflict, FencedOff, FenceViolation, NotFound
from contracts.events import AuditRecord, record_digest
from contracts.jobs import JobState
from contracts.probes import Probe, ProbeBounds, ProbeRow
from contracts.rollouts import PromptBatch, RolloutBatch, batch_digest
from contracts.versions import WeightManifest
from tests.builders import commit_record, job_spec, manifest, prompt_batch, rollout_batch
from tests.every_key import fence_keys
from tests.integration.fence_checks import Held, HeldSlot, check_claims, read, word_of
from tests.integration.fence_parts import weights_digest
from tests.model import server as model
from tests.model.server import ANY, COMMIT, DEAD, DONE, FREE, LEASED, NONE, REWIND, VARIANTS, Open, Record, Server
from tests.model.state import Bounds

Sent = tuple[tuple[int, int], ...]
"""Batches, each with the version that it is pinned to or NONE."""
LONG_S = 3600.0
"""No lease ends by itself while a test runs."""
LEDGER_WORDS = {(DONE,): "published", (DEAD,): "dead"}
"""How the item of stage 0 begins → the ledger's word; of others it is `expected`."""
KINDS = {COMMIT: "commit", REWIND: "rewind"}
GENERATORS = 4
"""A content is generator + 4 · attempt + 64 · variant."""
ATTEMPTS = 16
MAX_BATCH_BYTES = 4096


def digest_text(digest: int) -> str:
    return weights_digest(*divmod(digest, VARIANTS))


def numbers_of(digest: int) -> np.ndarray:
    """float32 [2 rows · 2 scored tokens] The trainer's log-probs of the probe under these weights."""
    return np.float32(-1.5) - np.arange(4, dtype=np.float32) / 8 - np.float32(digest % 64) / 64


STEP = 0.4
"""How far the log-probs under the version before are from those under a version: no gap is so large, and more than an
engine's noise."""
BOUNDS_OF_PROBES = ProbeBounds(limit=0.5, floor=0.5)


def engine_text(kind: int) -> str:
    """The fingerprint of a kind of engine; "" of none."""
    return "" if kind == ANY else f"kind {kind}"


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

    def __init__(self, broker: Broker, bounds: Bounds, **spec: object) -> None:
        if bounds.lag:
            schedule = "bounded" if bounds.is_bounded else "delayed"
            spec |= {"schedule": schedule, "max_policy_lag": bounds.lag, "algorithm__correction": "none"}
            spec |= {"iterations": bounds.iterations, "deterministic": not bounds.is_bounded}
        self.broker, self.bounds = broker, bounds
        self.jobs = JobStore(broker)
        made = job_spec(name=uuid.uuid4().hex, limits__max_batch_bytes=MAX_BATCH_BYTES, **spec)
        self.graph = made.stage_graph
        self.job_id, _ = self.jobs.create(made)
        self.jobs.move(self.job_id, JobState.RUNNING)
        self.keys = self.broker.job_keys(self.job_id, bounds.lag + 1)
        self.epochs = {0: 0}
        self.links: dict[Record, str] = {(): ""}
        """The model's audit record → the digest of the real one."""

    def trainer(self, owner: str) -> TrainerSide:
        return TrainerSide(
            self.broker, self.job_id, owner=owner, lease_s=LONG_S, num_open=self.bounds.lag + 1, graph=self.graph
        )

    def manifest(self, digest: int) -> WeightManifest:
        """The version that the model names so, with the probe that the job asks for."""
        version = digest // VARIANTS
        probe: Probe | UnsetType = UNSET
        if self.bounds.proves:
            logprobs = numbers_of(digest)
            row = ProbeRow(prompt=pack_int32([1, 2]), scored=pack_int32([3, 4]))
            before = (logprobs - np.float32(STEP)).tobytes() if version else UNSET
            probe = Probe(rows=(row, row), logprobs=logprobs.tobytes(), before=before, bounds=BOUNDS_OF_PROBES)
        return manifest(version, digest_text(digest), probe=probe)

    def batch_id(self, iteration: int, batch: int) -> str:
        return f"{iteration}/{self._purpose(batch)}/{batch}"

    def _purpose(self, batch: int) -> str:
        return "evaluation" if self.bounds.evaluates(batch) else "train"

    def batches(self, iteration: int, sent: Sent) -> tuple[PromptBatch, ...]:
        """A batch names the version that it is pinned to; of the others no script reads it."""
        return tuple(
            prompt_batch(
                [[1, 2], [3], [4]],
                job_id=self.job_id,
                batch_id=self.batch_id(iteration, batch),
                iteration=iteration,
                purpose=self._purpose(batch),
                policy_version=iteration if pin == NONE else pin,
            )
            for batch, pin in sent
        )

    def opening(self, opening: model.Opening) -> IterationOpening:
        return IterationOpening(
            iteration=opening.iteration,
            oldest_version=opening.oldest,
            newest_version=opening.newest,
            batches=self.batches(opening.iteration, opening.sent),
            num_later=self.bounds.batches - len(opening.sent),
        )

    def record(
        self, kind: int, iteration: int, *, digest: int, epoch: int, previous: str, trained: dict[str, str]
    ) -> AuditRecord:
        return commit_record(
            iteration,
            trained,
            kind=KINDS[kind],
            policy_version=max(0, iteration),
            weights_digest=digest_text(digest),
            next_weights_digest="",
            trainer_epoch=self.epochs[epoch],
            previous=previous,
        )

    def note(self, model_record: Record, record: AuditRecord) -> None:
        """It stands, or may stand, in the chain."""
        self.links[model_record] = record_digest(record)

    def rollouts(self, iteration: int, batch: int, /, *, content: int, digest: int, **changes: Any) -> RolloutBatch:
        fields = {
            "job_id": self.job_id,
            "batch_id": self.batch_id(iteration, batch),
            "iteration": iteration,
            "purpose": self._purpose(batch),
            "policy_version": digest // VARIANTS,
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
        rows = {key: self.broker.redis.dump(key) for key in fence_keys(self.keys)}
        return {key: value for key, value in rows.items() if value}  # type: ignore[misc]

    def restore(self, rows: dict[str, bytes]) -> None:
        """A restart takes longer than the milliseconds that epochs ran ahead."""
        while int(self.broker.now_s() * 1000) <= max(self.epochs.values()):
            pass
        with self.broker.redis.pipeline(transaction=True) as pipe:
            for key in fence_keys(self.keys):
                pipe.delete(key)
                if key in rows:
                    pipe.restore(key, 0, rows[key])
            pipe.execute()

    def check(self, server: Server, name: str = "") -> Held:
        """The server holds what the model says, and nothing else; `name`: of the move before. Returns what it holds."""
        held = read(self.broker, self.keys)
        self._check_fence(server, held, name)
        for index, slot in enumerate(held.slots):
            check_claims(slot)
            opened = server.in_slot_of(index)
            if opened:
                self._check_iteration(server, opened, held, name)
            else:
                assert slot.is_empty, name
        return held

    def _check_fence(self, server: Server, held: Held, name: str) -> None:
        stands = held.fence
        assert (stands.trainer_epoch, stands.committed) == (self.epochs[server.epoch], server.committed), name
        window = [(one.iteration, one.oldest_version, one.newest_version) for one in stands.window]
        assert window == [one[:3] for one in server.window], name
        assert (stands.versions, held.weights) == (_named(server.versions), _named(server.weights)), name
        assert stands.engine == engine_text(server.engine), name
        proofs = {
            (version, f"g{who}"): digest
            for who, shown in enumerate(server.proofs)
            for version, digest in _named(shown).items()
        }
        assert held.proofs == proofs, name
        if held.audit or server.last:
            last = held.audit[-1]
            assert (last.kind, last.iteration) == (KINDS[server.last[0]], server.last[1]), name
            assert last.trainer_epoch == self.epochs[server.last[2]], name
        following = 0
        for one in held.audit:
            assert one.iteration == following if one.kind == "commit" else one.iteration <= following, name
            following = one.iteration + (one.kind == "commit")

    def _check_iteration(self, server: Server, opened: Open, held: Held, name: str) -> None:
        slot, batches = held.slot_of(opened.iteration), server.slot_of(opened.iteration).batches
        ids = [self.batch_id(opened.iteration, batch) for batch in range(len(batches))]
        kinds = [batch.prompts[:1] if batch else (NONE,) for batch in batches]
        words = {
            ids[i]: (LEDGER_WORDS.get(kinds[i], "expected"), batch.pin) for i, batch in enumerate(batches) if batch
        }
        found = {key: (word_of(one), NONE if one.version is None else one.version) for key, one in slot.ledger.items()}
        assert found == words, name
        items = {ids[i]: batch.prompts for i, batch in enumerate(batches) if batch}
        assert slot.attempts == {key: one[1] for key, one in items.items() if one[:1] == (FREE,)}, name
        owners = {key: (f"g{one[2]}", one[1]) for key, one in items.items() if one[:1] == (LEASED,)}
        assert {key: (claim.worker, claim.attempt) for key, claim in slot.leases.items()} == owners, name
        counts = held.fence.window[opened.iteration - server.committed - 1]
        counted = (counts.batches_published, counts.batches_dead, counts.batches_expected)
        assert counted == (kinds.count((DONE,)), kinds.count((DEAD,)), len(kinds)), name
        self._check_rollouts(server, opened.iteration, slot, name)

    def _check_rollouts(self, server: Server, number: int, slot: HeldSlot, name: str) -> None:
        """I1, I2: each accepted batch is complete and of a version that may sample it. I3: it is there once."""
        batches, rollouts = server.slot_of(number)
        assert [one.batch_id for one in slot.rollouts] == [self.batch_id(number, one[1]) for one in rollouts], name
        for batch, (_, index, iteration, digest, content, _, _) in zip(slot.rollouts, rollouts, strict=True):
            sampled_by = (batch.iteration, batch.policy_version, batch.weights_digest)
            assert sampled_by == (iteration, digest // VARIANTS, digest_text(digest)), name
            assert [len(group.rollouts) for group in batch.groups] == [2] * 3, name
            ledger: Any = slot.ledger[batch.batch_id]
            expected = self.digest_of(iteration, index, content=content, digest=digest)
            assert batch_digest(batch) == ledger.digest == expected, name
            one: Any = batches[index]
            assert (ledger.generator, ledger.attempt) == (f"g{one.made[1]}", one.made[2])


def _named(digests: tuple[int, ...]) -> dict[int, str]:
    return {digest // VARIANTS: digest_text(digest) for digest in digests if digest != NONE}
