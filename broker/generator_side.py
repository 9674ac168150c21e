"""The generator's side of one job: claim, renew, publish, fail. Every refusal is a typed outcome."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from broker.connection.client import Broker
from broker.keys import JobKeys, batch_shape, chunk_field
from contracts.encoding.wire import Record, decode, encode
from contracts.errors import ContractViolation
from contracts.rollouts import PromptBatch, RolloutBatch, batch_digest
from contracts.spec import JobSpec
from contracts.versions import WeightManifest
from contracts.weights import WeightShard

MAX_REASON_BYTES = 2000


class PublishOutcome(str, Enum):
    """What the fence said; all but `accepted` are counted by reason."""

    ACCEPTED = "accepted"
    ENDED = "ended"
    STALE = "stale"
    FUTURE = "future"
    WRONG_WEIGHTS = "wrong_weights"
    UNEXPECTED = "unexpected"
    DUPLICATE = "duplicate"
    INCOMPLETE = "incomplete"
    OVERSIZE = "oversize"
    CLOSED = "closed"


class FailOutcome(str, Enum):
    RETRIED = "retried"
    DEAD = "dead"
    SETTLED = "settled"
    """Another generator published it or holds its lease, or the iteration is over."""


class Claim(Record, frozen=True, kw_only=True):
    """A leased prompt batch and the weights that it must be sampled with."""

    prompt_batch: PromptBatch
    entry_id: str
    attempt: int
    manifest: WeightManifest
    hedged: bool = False
    """A copy of a batch that another generator holds and is late with: no lease, and no failure counts."""


class Renewal(Record, frozen=True, kw_only=True):
    """What a heartbeat learnt; the other claims are still held."""

    lost: tuple[Claim, ...] = ()
    """Other generators hold them now; the first publication wins (I3)."""
    settled: tuple[Claim, ...] = ()
    """They are published, given up, or of an iteration that is over: no work on them is needed."""


class GeneratorSide:
    """One generator, one job. Thread-safe."""

    def __init__(self, broker: Broker, job_id: str, generator_id: str) -> None:
        self._broker = broker
        self._keys = JobKeys(job_id)
        self._generator_id = generator_id
        self._last_entry = "0-0"
        self._last_shard = "0-0"
        self._hedge_due_s: float | None = None
        self._spec: JobSpec | None = None

    def claim(self, lease_s: float, *, hedge: bool = False) -> Claim | None:
        """The oldest batch whose lease expired, else the next new one; None when the job has nothing to claim.

        hedge: an idle generator asks for a copy of another's batch that is late, where there is nothing else.
        """
        spec = self._job_spec()
        outcome, *rest = self._run(
            "claim_prompt",
            generator=self._generator_id,
            lease_ms=int(lease_s * 1000),
            max_attempts=spec.rollout.max_attempts,
            may_hedge=hedge and spec.hedges,
            max_rounds=1 + spec.rollout.max_resamples,
        )
        if outcome == b"none":
            self._last_entry = rest[0].decode()
            self._hedge_due_s = rest[1] / 1000 if rest[1] > 0 else None
            return None
        entry_id, attempt, payload, manifest = rest
        return Claim(
            prompt_batch=decode(payload, PromptBatch),
            entry_id=entry_id.decode(),
            attempt=attempt,
            manifest=decode(manifest, WeightManifest),
            hedged=outcome == b"hedged",
        )

    def wait_for_prompts(self, timeout_s: float) -> list[WeightShard]:
        """Blocks until a prompt is added after the last empty claim, a batch is late by then, or for timeout_s.

        Ends early for shards of a version that is still being written, and answers them.
        """
        if self._hedge_due_s is not None:
            timeout_s = min(timeout_s, self._hedge_due_s)
        with self._broker.call(blocks_s=timeout_s):
            found: list = self._broker.redis.xread(  # type: ignore[assignment]
                {self._keys.prompts: self._last_entry, self._keys.shards: self._last_shard},
                count=1,
                block=max(1, int(timeout_s * 1000)),
            )
        shards = dict(found).get(self._keys.shards.encode(), [])
        if shards:
            self._last_shard = shards[-1][0].decode()
        return [decode(fields[b"shard"], WeightShard) for _, fields in shards]

    def renew(self, claims: Sequence[Claim]) -> Renewal:
        """Resets the leases; answers those that are no longer this generator's (I5)."""
        if not claims:
            return Renewal()
        held = [{"batch_id": claim.prompt_batch.batch_id, "entry": claim.entry_id} for claim in claims]
        _, *states = self._run("renew_prompts", generator=self._generator_id, claims=held)
        return Renewal(
            lost=tuple(claim for claim, state in zip(claims, states, strict=True) if state == b"lost"),
            settled=tuple(claim for claim, state in zip(claims, states, strict=True) if state == b"settled"),
        )

    def publish(self, claim: Claim, batch: RolloutBatch) -> PublishOutcome:
        """Publishes through the fence (I1, I2, I3). Raises ContractViolation for a batch that is not the claim's."""
        if batch.batch_id != claim.prompt_batch.batch_id:
            raise ContractViolation(f"claimed {claim.prompt_batch.batch_id}, got {batch.batch_id}", field="batch_id")
        answer = self._run(
            "publish_batch",
            encode(batch),
            batch_id=batch.batch_id,
            iteration=batch.iteration,
            policy_version=batch.policy_version,
            weights_digest=batch.weights_digest,
            shape=batch_shape(len(batch.groups), batch.group_size),
            digest=batch_digest(batch),
            generator=batch.generator_id,
            attempt=batch.attempt,
            max_bytes=self._job_spec().limits.max_batch_bytes,
            num_rounds=len(batch.rounds),
        )
        outcome = PublishOutcome(answer[0].decode())
        if outcome is not PublishOutcome.ACCEPTED and not answer[1]:
            self._broker.write("HINCRBY", self._keys.counters, f"rejected:{outcome.value}", 1, job=self._keys)
        return outcome

    def fail(self, claim: Claim, reason: str) -> FailOutcome:
        """Gives the batch back: tried again at once, or dead-lettered with its reason after the cap (I6)."""
        answer = self._run(
            "fail_batch",
            batch_id=claim.prompt_batch.batch_id,
            entry=claim.entry_id,
            generator=self._generator_id,
            attempt=claim.attempt,
            max_attempts=self._job_spec().rollout.max_attempts,
            # Cut between two characters: the ledger's reader wants whole ones.
            reason=reason.encode(errors="backslashreplace")[:MAX_REASON_BYTES].decode(errors="ignore"),
        )
        return FailOutcome(answer[0].decode())

    def _run(self, script: str, *payloads: bytes, **told: Any) -> list:
        return self._broker.run(script, self._keys.script_keys, *payloads, **told)

    def _job_spec(self) -> JobSpec:
        if self._spec is None:
            with self._broker.call():
                data = self._broker.redis.get(self._keys.spec)
            if data is None:
                raise ContractViolation("the job has no spec", field=self._keys.spec)
            self._spec = decode(data, JobSpec)  # type: ignore[arg-type]
        return self._spec


class WeightChunks:
    """The chunks of one job's versions, as a generator reads them; the trainer writes them (trainer_side.py)."""

    def __init__(self, broker: Broker, job_id: str) -> None:
        self._broker = broker
        self._keys = JobKeys(job_id)

    def get(self, policy_version: int, name: str, number: int) -> bytes | None:
        """None for a chunk that is gone, or never was there."""
        with self._broker.call():
            return self._broker.redis.hget(  # type: ignore[return-value]
                self._keys.chunks, chunk_field(policy_version, name, number)
            )
