"""A generator of one's own: it claims prompt batches of one job, samples them, and publishes them through the fence.

    claim ─▶ load (the version that has to sample it) ─▶ sample ─▶ score (the job's own rubric) ─▶ publish

    with Producer("job-1") as producer:
        model = producer.make_model()
        for claim in producer:                                    # until the job ends
            digest = producer.load(claim, model)
            samples = [[...] for prompt in claim.prompts]           # [k][G] Sample
            producer.publish(claim, samples, producer.score(claim, samples), weights_digest=digest)

A thread renews the lease of each batch from its claim to its end. The fence refuses what another version sampled (I2),
and what comes second (I3).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.connection.roles import GENERATOR
from broker.generator_side import REFUSED_FOR_GOOD, Claim, GeneratorSide, PublishOutcome, WeightChunks
from broker.presence import RELOAD_PAUSES_S, Presence
from contracts.encoding.wire import changed
from contracts.errors import BrokerFull, ContractViolation, FenceViolation, InvalidInput, WeightsRejected, WeightsUnfit
from contracts.monitor import GeneratorSeen
from contracts.rewards import Scored
from contracts.rollouts import BatchTimings, RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.base.process.waiting import run_apart
from onbeat.client.connection import connected
from onbeat.client.joined_worker import OwnWorker
from onbeat.client.samples import PromptClaim, Sample, completions_of
from onbeat.scoring.groups import reward_items, rollout_groups
from onbeat.scoring.reward_client import RewardClient, reward_http, tries_of
from onbeat.weights.model_path import model_folder
from onbeat.work.declined_work import MAX_WHY

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from onbeat.weights.receiver import WeightReceiver

FULL_PAUSE_S = 0.5
OWN_ENGINE = "a producer of one's own"
MAX_ENGINE_CHARS = 500


class Producer(OwnWorker[Claim, PromptClaim]):
    """A generator of one job in a process of the user's own, as a context manager.

    A claim belongs to one thread at a time.
    """

    def __init__(
        self,
        job_id: str,
        *,
        reproducible: bool = False,
        engine: str = OWN_ENGINE,
        redis_url: str = "",
        run_dir: str | Path | None = None,
        settings: StackSettings | None = None,
    ) -> None:
        """reproducible: whether it gives the same completions for the same batch and weights, as a deterministic job
        asks of each of its generators (I7). engine: names what its bits depend on, as `GeneratorSeen.engine`
        does: a deterministic job is sampled by generators of one name. redis_url, run_dir, settings: as for
        `client_settings`; the role is `generator`.

        Raises NotFound for a job that isn't there, InvalidInput for one that this producer must not serve.
        """
        who = {"redis_url": redis_url, "run_dir": run_dir, "settings": settings}
        with connected(job_id, role=GENERATOR, what="producer", **who) as connection:
            spec = connection.spec
            broker = connection.broker
            _check_job(spec, reproducible=reproducible)
            if not engine or len(engine) > MAX_ENGINE_CHARS or not engine.isprintable():
                raise InvalidInput(f"must be 1 to {MAX_ENGINE_CHARS} printable characters", field="engine")
            kind = engine if spec.deterministic else None
            self._side = GeneratorSide(broker, job_id, connection.process_id, engine=kind)
            super().__init__(
                connection,
                side=self._side,
                board=Presence(broker),
                lease_s=spec.timeouts.generator_lease_s,
                wait=self._side.wait_for_prompts,
            )
        self._said = GeneratorSeen(
            worker_id=self._connection.process_id,
            model=self.spec.model.path,
            engine=kind or "",
            not_reproducible="" if reproducible else OWN_ENGINE,
        )
        self._loaded: _Loaded | None = None

    @property
    def model_folder(self) -> Path:
        """The job's model as it was before its first step: config, tokenizer, safetensors.

        Raises InvalidInput that names model.path and the file where one, weights apart, has changed since.
        """
        return model_folder(self.spec.model, self._connection.settings.spec_root)

    def claim(self, *, timeout_s: float = 60.0) -> PromptClaim | None:
        """Returns a batch under a lease, of the oldest version that has one; None where there is none in time.

        Raises JobEnded once the job needs no more, WrongEngine where it is deterministic and another kind of engine
        samples it, BrokerUnavailable where Redis stays away.
        """
        return self._take(self._claim, timeout_s)

    def _claim(self) -> PromptClaim | None:
        claim = self._side.claim(self._lease_s)
        if claim is None:
            return None
        self._hold(claim, name=f"{claim.prompt_batch.job_id} {claim.prompt_batch.batch_id}")
        return PromptClaim(claim=claim, claimed_s=time.time())

    def _claims_of(self, taken: PromptClaim) -> Sequence[Claim]:
        return (taken.claim,)

    def _seen(self) -> GeneratorSeen:
        return changed(self._said, batches=self._leases.names)

    def _says(self, **fields: Any) -> None:
        """Takes note of what its next sign of life says."""
        self._said = changed(self._said, **fields)

    def make_model(self, device: str = "cpu") -> PreTrainedModel:
        """Makes the job's transformers model without its values, which `load` brings. It imports torch."""
        import torch

        from onbeat.weights.model_folder import empty_model

        return empty_model(self.model_folder, dtype=getattr(torch, self.spec.model.dtype), device=device)

    def load(self, claim: PromptClaim, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> str:
        """Puts the claim's version into the tensors, and returns the digest of what they hold, computed over them (I2).

        model: a module of the job's architecture, or its tensors by their published names. Nothing is read where they
        hold the version already. Raises WeightsRejected for a version that stays damaged; the trainer was told.
        """
        manifest = claim.manifest
        if self._loaded is None or self._loaded.model is not model:
            self._loaded = _Loaded(self._receiver(model), model)
        if self._loaded.digest != manifest.weights_digest:
            self._says(loading_weights=tuple(step.directory for step in manifest.steps))
            self._beat()
            try:
                self._loaded.digest = ""
                self._loaded.digest = self._read(self._loaded.receiver, manifest)
            finally:
                self._says(loading_weights=())
        self._says(policy_version=manifest.policy_version, weights_digest=self._loaded.digest)
        return self._loaded.digest

    def score(self, claim: PromptClaim, samples: Sequence[Sequence[Sample]]) -> list[list[Scored]]:
        """[k][G] samples → [k][G] rewards by the job's rubric, through the reward service.

        A service that is away is waited for up to timeouts.dependency_s. Raises BatchFailed for a completion that can't
        be scored, RewardUnavailable where the service stays away: the batch is to be given back, for it is never
        published without its scores (I6).
        """
        completions = completions_of(claim.batch, samples)
        texts = [sample.text for of_prompt in samples for sample in of_prompt]
        spec = self.spec
        settings = self._connection.settings
        items = reward_items(spec.reward.components, claim.batch, completions, texts)
        tries = tries_of(spec)
        dependency_s = spec.timeouts.dependency_s
        size = claim.group_size

        async def ask() -> list[Scored]:
            async with reward_http(settings) as http:
                client = RewardClient(http, key=settings.reward_key)
                return await client.score(
                    spec.reward,
                    items,
                    job_id=claim.batch.job_id,
                    tries=tries,
                    dependency_s=dependency_s,
                    group_size=size,
                )

        scored = run_apart(ask())
        return [scored[start : start + size] for start in range(0, len(scored), size)]

    def publish(
        self,
        claim: PromptClaim,
        samples: Sequence[Sequence[Sample]],
        scores: Sequence[Sequence[Scored]],
        *,
        weights_digest: str,
    ) -> bool:
        """Publishes the batch through the fence; False where it is not needed any more: another came first, or late.

        samples, scores: [k][G]. weights_digest: of the tensors that sampled it, as `load` computed it, never copied
        from the claim. While rows wait for stages in too large a number, or Redis is full, it waits. Raises
        ContractViolation for a batch that is not whole, and FenceViolation for one that the fence refuses for good;
        that one was failed.
        """
        record = self._record(claim, samples, scores, weights_digest)
        outcome = self._connection.until_room(partial(self._publish, claim, record))
        if outcome in REFUSED_FOR_GOOD:
            self.fail(claim, f"the fence refused it as {outcome.value}")
            raise FenceViolation(f"the fence refuses it as {outcome.value}", field=f"batch {claim.batch.batch_id}")
        self._end(claim)
        return outcome is PublishOutcome.ACCEPTED

    def _publish(self, claim: PromptClaim, record: RolloutBatch) -> PublishOutcome:
        """Repeats while rows that wait for stages leave no room; the lease is renewed meanwhile. Raises BrokerFull."""
        while (outcome := self._side.publish(claim.claim, record)) is PublishOutcome.FULL:
            self._connection.check()
            time.sleep(FULL_PAUSE_S)
        if outcome is PublishOutcome.NO_ROOM:
            raise BrokerFull(
                "Redis keeps what is left below maxmemory for the oldest iteration", cure="raise maxmemory"
            )
        return outcome

    def _record(
        self,
        claim: PromptClaim,
        samples: Sequence[Sequence[Sample]],
        scores: Sequence[Sequence[Scored]],
        weights_digest: str,
    ) -> RolloutBatch:
        batch = claim.batch
        now_s = time.time()
        completions = completions_of(batch, samples)
        if [len(of_prompt) for of_prompt in scores] != [batch.group_size] * len(batch.prompts):
            raise ContractViolation(
                f"{len(batch.prompts)} prompts with {batch.group_size} scores each are needed", field="scores"
            )
        groups = rollout_groups(
            batch,
            self.spec,
            completions=completions,
            texts=[sample.text for of_prompt in samples for sample in of_prompt],
            scored=[score for of_prompt in scores for score in of_prompt],
        )
        return RolloutBatch(
            job_id=batch.job_id,
            batch_id=batch.batch_id,
            iteration=batch.iteration,
            purpose=batch.purpose,
            policy_version=batch.policy_version,
            weights_digest=weights_digest,
            group_size=batch.group_size,
            generator_id=self._connection.process_id,
            attempt=claim.claim.attempt,
            timings=BatchTimings(
                generation_started_s=claim.claimed_s,
                generation_ended_s=now_s,
                scoring_started_s=now_s,
                scoring_ended_s=now_s,
            ),
            groups=tuple(groups),
        )

    def _receiver(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> WeightReceiver:
        from onbeat.weights.model_folder import weight_tensors
        from onbeat.weights.receiver import WeightReceiver
        from onbeat.weights.transports import make_stores

        tensors = model if isinstance(model, Mapping) else dict(weight_tensors(model))
        settings = self._connection.settings
        broker = self._connection.broker
        stores = make_stores(settings.weight_root_path, partial(WeightChunks, broker), settings)
        return WeightReceiver(tensors, stores)

    def _read(self, receiver: WeightReceiver, manifest: WeightManifest) -> str:
        for pause_s in (*RELOAD_PAUSES_S, None):
            try:
                digest = receiver.load(manifest)
            except WeightsRejected as error:
                unfit = ""
                if isinstance(error, WeightsUnfit):
                    unfit = str(error)[:MAX_WHY]
                self._says(rejected_weights=manifest.directory, unfit_weights=unfit)
                self._beat()
                if pause_s is None:
                    raise
                time.sleep(pause_s)
            else:
                self._says(rejected_weights="", unfit_weights="")
                return digest
        raise AssertionError("the last load has raised")


@dataclass
class _Loaded:
    """The tensors that hold a version, and how the next one gets there."""

    receiver: WeightReceiver
    model: object
    digest: str = ""


def _check_job(spec: JobSpec, *, reproducible: bool) -> None:
    if spec.deterministic and not reproducible:
        raise InvalidInput(
            "is a deterministic job, whose generators all give the same completions for the same batch and weights",
            field="deterministic",
            cure="say reproducible=True where this producer does, or submit the job with deterministic = false",
        )
    if spec.rollout.max_resamples:
        raise InvalidInput(
            "the job resamples prompts of equal reward, which a producer of one's own doesn't",
            field="rollout.max_resamples",
            cure="set it to 0",
        )
    if spec.schedule_rule.takes_turns:
        raise InvalidInput(
            "generators of a colocated job take turns with its trainer, which a producer of one's own doesn't",
            field="schedule",
            cure='set schedule = "periodic"',
        )
