"""The generator's side of one job: claim, renew, publish, fail. Every refusal is a typed outcome."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from broker.connection.bounds import BATCH_BYTES
from broker.connection.client import Broker
from broker.keys import OpenKeys, batch_shape, chunk_field
from broker.leases import Lease, LeasedSide
from broker.proofs import verdict as verdict_of
from broker.spans import report_spans
from contracts.encoding.wire import Record, decode
from contracts.errors import ContractViolation, WrongEngine
from contracts.events import TimelineSpan
from contracts.probes import LogProbs, ProofVerdict
from contracts.rollouts import PromptBatch, RolloutBatch, encoded_batch
from contracts.versions import WeightManifest, WeightShard

MAX_PROOFS = 64
"""Proofs that a generator keeps of a job, to repeat them to a server that has forgotten them."""


class PublishOutcome(str, Enum):
    """The answer of the fence to a publication; all but `accepted`, `full` and `no_room` are counted by reason."""

    ACCEPTED = "accepted"
    FULL = "full"
    """As many rows as may wait for columns of the job's stages: the same batch goes once stages have caught up."""
    NO_ROOM = "no_room"
    """Redis' memory is kept for what the oldest iteration lacks: the same batch goes once that is committed."""
    ENDED = "ended"
    STALE = "stale"
    FUTURE = "future"
    WRONG_WEIGHTS = "wrong_weights"
    UNPROVED = "unproved"
    """The generator's engine has not shown what it computes with the version (I11)."""
    WRONG_ENGINE = "wrong_engine"
    UNEXPECTED = "unexpected"
    DUPLICATE = "duplicate"
    INCOMPLETE = "incomplete"
    OVERSIZE = "oversize"
    CLOSED = "closed"


WAITS = frozenset({PublishOutcome.FULL, PublishOutcome.NO_ROOM})
"""The generator holds the batch, and asks again."""
REFUSED_FOR_GOOD = frozenset(
    {
        PublishOutcome.INCOMPLETE,
        PublishOutcome.OVERSIZE,
        PublishOutcome.WRONG_WEIGHTS,
        PublishOutcome.UNPROVED,
        PublishOutcome.WRONG_ENGINE,
    }
)
"""The same batch would meet it again: it fails with that reason. After any other refusal it is not needed."""


class Claim(Record, frozen=True, kw_only=True):
    """A leased prompt batch and the weights that it must be sampled with."""

    prompt_batch: PromptBatch
    number: int
    """The number of the claim: no other one of the job ever has it, whatever a rewind or a restart has ended."""
    attempt: int
    manifest: WeightManifest
    hedged: bool = False
    """True for a copy of a batch that another generator holds and is late with: no lease, and no failure counts."""


class ProofDue(Record, frozen=True, kw_only=True):
    """An answer in the place of a claim: a batch is there, and the generator's engine has yet to show its version."""

    manifest: WeightManifest


class WeightNews(Record, frozen=True, kw_only=True):
    """The versions, and files of them, that a job's batches may be sampled with soon."""

    versions: tuple[WeightManifest, ...]
    """Each version that is announced, oldest first."""
    shards: tuple[WeightShard, ...]
    """Files of the versions after them that were announced since the last call."""


class GeneratorSide(LeasedSide[Claim]):
    """The side of one generator at one job. Thread-safe.

    A generator creates one for each job that it serves, claims batches of it, renews their leases and publishes them.
    """

    def __init__(self, broker: Broker, job_id: str, generator_id: str, *, engine: str | None = None) -> None:
        """Names the generator to the job; nothing is read yet.

        Args:
            broker: The broker.
            job_id: The job.
            generator_id: The id of this life of the generator.
            engine: The fingerprint of the engine that samples the job (contracts/engines.py), where the job is
                deterministic: the first that a job is claimed with stays its only one (I7). None promises nothing.
        """
        super().__init__(broker, job_id, generator_id)
        self._engine = engine
        self._last_shard = "0-0"
        self._has_news = False
        self._proofs: dict[tuple[int, str], tuple[LogProbs, str]] = {}
        """(version, digest) → log-probs and kind, of what this generator's engine has shown."""
        self._hedge_due_s: float | None = None
        """Seconds from the last claim until a batch is late enough for a copy; None where none will be."""

    def claim(
        self,
        lease_s: float,
        *,
        hedge: bool = False,
        loaded: tuple[int, str] | None = None,
        oldest_only: bool = False,
        is_idle: bool = True,
    ) -> Claim | ProofDue | None:
        """Claims the next batch of the oldest open iteration that has one.

        A claim whose answer was lost comes first, under the same number and attempt. In an iteration the oldest batch
        whose lease expired is next, then a new one.

        Args:
            lease_s: Seconds for which the lease is taken.
            hedge: An idle generator asks for a copy of another's batch that is late, where there is nothing else.
            loaded: The (version, digest) that this generator has loaded; the claim names it where it may sample the
                batch, and else the newest version that may.
            oldest_only: Of no younger iteration; a generator asks so while it holds batches that find no room.
            is_idle: It samples no batch: where there is nothing, it is woken before those that do.

        Returns:
            The claim; ProofDue where `prove` has to come before it; None where the job has nothing to claim.

        Raises:
            WrongEngine: The job is deterministic, and sampled with another kind of engine than this generator's.
        """
        with self._claiming:
            ask = partial(
                self._ask,
                lease_s,
                hedge=hedge and is_idle,
                loaded=loaded,
                oldest_only=oldest_only,
                is_idle=is_idle and not oldest_only,
            )
            outcome, *rest = ask()
            if outcome == b"unproved" and self._proves_again(decode(rest[0], WeightManifest)):
                outcome, *rest = ask()
        if outcome == b"wrong_engine":
            raise WrongEngine.between(job_engine=rest[0].decode(), own=self._engine or "", job_id=self._job_id)
        if outcome == b"unproved":
            return ProofDue(manifest=decode(rest[0], WeightManifest))
        if outcome == b"none":
            due_ms = rest[0]  # -1 where no batch will be late
            self._hedge_due_s = due_ms / 1000 if due_ms > 0 else None
            return None
        attempt, number, payload, packed = rest
        manifest = decode(packed, WeightManifest)
        return Claim(
            prompt_batch=_sampled_by(manifest, decode(payload, PromptBatch)),
            number=number,
            attempt=attempt,
            manifest=manifest,
            hedged=outcome == b"hedged",
        )

    def _ask(
        self, lease_s: float, *, hedge: bool, loaded: tuple[int, str] | None, oldest_only: bool, is_idle: bool
    ) -> list[Any]:
        """Calls `claim_prompt`, and notes the number of its claim as heard of. The arguments are those of `claim`."""
        spec = self._job.spec
        # -1 is no version, so nothing that is loaded is preferred.
        version, digest = loaded or (-1, "")
        answer = self._run(
            "claim_prompt",
            generator=self._worker_id,
            # Stage 0 are prompt batches; claims are numbered from 1.
            heard=self._heard.get(0, 0),
            lease_ms=int(lease_s * 1000),
            max_attempts=spec.rollout.max_attempts,
            may_hedge=hedge and spec.hedges,
            max_rounds=1 + spec.rollout.max_resamples,
            held_version=version,
            held_digest=digest,
            engine=self._engine,
            oldest_only=oldest_only,
            is_idle=is_idle,
        )
        if answer[0] in (b"claimed", b"hedged"):
            # Only once the answer is here: a claim that was lost on the way is answered again.
            self._heard[0] = answer[2]
        return answer

    def wait_for_prompts(self, timeout_s: float) -> list[WeightShard]:
        """Blocks until there is work for this generator, a batch is late, or for timeout_s seconds.

        Returns:
            The shards of a version that is still being written, for which the wait ends early; [] for a job with a
            lag, whose shards are `wait_for_weights`'s.
        """
        if self._hedge_due_s is not None:
            # The last claim said it: without another claim it ends one wait only.
            timeout_s = min(timeout_s, self._hedge_due_s)
            self._hedge_due_s = None
        if self._job.spec.schedule_rule.lags:
            self.wait_for_wake(timeout_s)
            return []
        shards = self._job.keys.shards
        if shards not in self.wait_for_wake(timeout_s, shards):
            return []
        return self._read_shards()

    def _read_shards(self, blocks_s: float | None = None) -> list[WeightShard]:
        """Returns the shards that were announced since the last call. blocks_s: seconds to wait for one."""
        block_ms = None  # doesn't wait; 0 would wait without end
        if blocks_s:
            block_ms = max(1, int(blocks_s * 1000))
        with self.broker.call(blocks_s=blocks_s or 0.0):
            answer: Any = self.broker.redis.xread({self._job.keys.shards: self._last_shard}, block=block_ms)
        entries = answer[0][1] if answer else []
        if entries:
            self._last_shard = entries[-1][0].decode()
        return [decode(fields[b"shard"], WeightShard) for _, fields in entries]

    def wait_for_weights(self, timeout_s: float) -> WeightNews:
        """Blocks until a file or a version of a job with a lag is announced, or for timeout_s seconds.

        The first call doesn't block.
        """
        shards = self._read_shards(timeout_s if self._has_news else None)
        versions = tuple(self.announced_weights())
        self._has_news = True
        newest = versions[-1].policy_version if versions else -1
        return WeightNews(versions=versions, shards=tuple(shard for shard in shards if shard.policy_version > newest))

    def announced_weights(self) -> list[WeightManifest]:
        """Returns the versions that are announced, oldest first."""
        with self.broker.call():
            packed: Any = self.broker.redis.hvals(self._job.keys.weights)
        return sorted((decode(value, WeightManifest) for value in packed), key=lambda version: version.policy_version)

    def prove(self, manifest: WeightManifest, logprobs: LogProbs, *, kind: str) -> ProofVerdict:
        """Shows what this generator's engine computes with a version, so that batches of it may be claimed (I11).

        It is to be called after each load, and each time that the engine may compute otherwise than before.

        Args:
            manifest: The version, with a probe.
            logprobs: The engine's log-probs of the probe's rows: float32 [rows · scored tokens].
            kind: Names engine and dtype; gaps of later versions are compared with the first of the kind.
        """
        verdict = self._prove(manifest.policy_version, manifest.weights_digest, logprobs, kind)
        version = (manifest.policy_version, manifest.weights_digest)
        self._proofs.pop(version, None)
        if verdict.is_proved:
            self._proofs[version] = (logprobs, kind)
            # Those of a window, and of what was loaded meanwhile.
            while len(self._proofs) > MAX_PROOFS:
                del self._proofs[next(iter(self._proofs))]
        return verdict

    def _prove(self, version: int, digest: str, logprobs: LogProbs, kind: str) -> ProofVerdict:
        return verdict_of(
            self._run(
                "prove_version",
                logprobs,
                generator=self._worker_id,
                policy_version=version,
                weights_digest=digest,
                kind=kind,
            )
        )

    def _proves_again(self, manifest: WeightManifest) -> bool:
        """Repeats a proof that a restart of the server has forgotten; returns True where it stands again."""
        proof = self._proofs.get((manifest.policy_version, manifest.weights_digest))
        if proof is None:
            return False
        return self._prove(manifest.policy_version, manifest.weights_digest, *proof).is_proved

    def _lease_of(self, claim: Claim) -> Lease:
        batch = claim.prompt_batch
        return Lease(stage=0, iteration=batch.iteration, batch_id=batch.batch_id, item=0, claim=claim.number)

    def publish(self, claim: Claim, batch: RolloutBatch) -> PublishOutcome:
        """Publishes a batch through the fence (I1, I2, I3).

        A training batch of a job with stages is the stages' next (stage_side.py), and then the trainer's.

        Raises:
            ContractViolation: The batch is not the claim's, or lacks texts that stages of the job read.
        """
        if batch.batch_id != claim.prompt_batch.batch_id:
            raise ContractViolation(f"claimed {claim.prompt_batch.batch_id}, got {batch.batch_id}", field="batch_id")
        # The job's reward alone scores an evaluation.
        stages = (batch.purpose == "train" and self._job.stages) or None
        if stages:
            self._check_carried(batch)
        # The digest is of the batch without what moves from try to try (`batch_digest`), and decides whether a repeat
        # is one.
        payload, digest = encoded_batch(batch)
        if len(payload) > BATCH_BYTES:
            return PublishOutcome.OVERSIZE  # no spec allows it, and the server would cut the connection
        publish = partial(
            self._run,
            "publish_batch",
            payload,
            batch_id=batch.batch_id,
            iteration=batch.iteration,
            policy_version=batch.policy_version,
            weights_digest=batch.weights_digest,
            shape=batch_shape(len(batch.groups), batch.group_size),
            digest=digest,
            generator=batch.generator_id,
            attempt=batch.attempt,
            claim=claim.number,
            max_bytes=self._job.spec.limits.max_batch_bytes,
            num_rounds=len(batch.rounds),
            stages=stages,
            max_waiting=self._job.spec.limits.max_waiting_rows,
            engine=self._engine,
        )
        answer = publish()
        if answer[0] == b"unproved" and self._proves_again(claim.manifest):
            answer = publish()
        return PublishOutcome(answer[0].decode())

    def report_spans(self, spans: Sequence[TimelineSpan]) -> None:
        """Reports what this generator did between the batches that it publishes, for the job's timeline."""
        report_spans(self.broker, self._job_id, spans)

    def _check_carried(self, batch: RolloutBatch) -> None:
        """Raises ContractViolation for a batch that lacks the texts that stages of the job read."""
        lacks = any(UNSET in (group.prompt_text, group.reference) for group in batch.groups)
        if self._job.spec.stage_graph.carries_texts and lacks:
            raise ContractViolation(
                "a group lacks prompt_text or reference, and a stage of the job reads them",
                field=f"batch {batch.batch_id}",
                cure="publish both with each group",
            )


def _sampled_by(manifest: WeightManifest, batch: PromptBatch) -> PromptBatch:
    """Returns the batch under the version that the fence chose at the claim; without a lag that is the one it was made
    for."""
    version = manifest.policy_version
    digest = manifest.weights_digest
    # Under a lag the fence names the version; the batch was made for the newest that it may have.
    if (batch.policy_version, batch.weights_digest) == (version, digest):
        return batch
    return msgspec.structs.replace(batch, policy_version=version, weights_digest=digest)


class WeightChunks:
    """The chunks of one job's versions, as a generator reads them; the trainer writes them (trainer_side.py)."""

    def __init__(self, broker: Broker, job_id: str) -> None:
        self._broker = broker
        self._keys = OpenKeys(job_id)

    def get(self, policy_version: int, name: str, number: int) -> bytes | None:
        """Returns the bytes of a chunk; None for one that is gone, or never was there."""
        with self._broker.call():
            return self._broker.redis.hget(  # type: ignore[return-value]
                self._keys.chunks, chunk_field(policy_version, name, number)
            )
