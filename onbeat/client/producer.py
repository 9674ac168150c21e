"""A generator of one's own: it claims prompt batches of one job, samples them, and publishes them through the fence.

    show (a new version's probe) ─▶ claim ─▶ load (the version that has to sample it) ─▶ sample ─▶ score ─▶ publish

    with Producer("job-1") as producer:
        model = producer.make_model()
        producer.proves(model)                                    # shows the model's log-probs of each version's probe
        for claim in producer:                                    # until the job ends
            digest = producer.load(claim, model)
            samples = [[...] for prompt in claim.prompts]           # [k][G] Sample
            producer.publish(claim, samples, producer.score(claim, samples), weights_digest=digest)

A thread renews the lease of each batch from its claim to its end. The fence refuses what another version sampled (I2),
and what comes second (I3); it hands out no batch of a version before the producer has shown that it computes with that
version as the trainer does (I11).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from broker.connection.roles import GENERATOR
from broker.generator_side import REFUSED_FOR_GOOD, Claim, GeneratorSide, ProofDue, PublishOutcome, WeightChunks
from broker.presence import RELOAD_PAUSES_S, Presence
from contracts.encoding.wire import changed
from contracts.errors import (
    BrokerFull,
    ContractViolation,
    FenceViolation,
    InvalidInput,
    ProofFailed,
    WeightsRejected,
    WeightsUnfit,
)
from contracts.monitor import GeneratorSeen
from contracts.rewards import Scored
from contracts.rollouts import BatchTimings, RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.base.process.waiting import run_apart
from onbeat.client.connection import connected
from onbeat.client.joined_worker import OwnWorker
from onbeat.client.probed_tokens import LogProbsOf, logprobs_by_forward, packed_logprobs
from onbeat.client.samples import PromptClaim, Sample, completions_of
from onbeat.scoring.groups import reward_items, rollout_groups
from onbeat.scoring.reward_client import RewardClient, reward_http, tries_of
from onbeat.weights.model_path import model_folder
from onbeat.work.declined_work import MAX_WHY, in_one_line
from onbeat.work.proof_failure import proof_failure

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from onbeat.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

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
        self._sign_of_life = GeneratorSeen(
            worker_id=self._connection.process_id,
            model=self.spec.model.path,
            engine=kind or "",
            not_reproducible="" if reproducible else OWN_ENGINE,
        )
        self._loaded: _Loaded | None = None
        self._prover: _Prover | None = None

    @property
    def model_folder(self) -> Path:
        """The job's model as it was before its first step: config, tokenizer, safetensors.

        Raises InvalidInput that names model.path and the file where one, weights apart, has changed since.
        """
        return model_folder(self.spec.model, self._connection.settings.spec_root)

    def claim(self, *, timeout_s: float = 60.0) -> PromptClaim | None:
        """Returns a batch under a lease, of the oldest version that has one; None where there is none in time.

        Before the first batch of a version it loads the version and shows it, as `proves` has it.

        Raises JobEnded once the job needs no more, WrongEngine where it is deterministic and another kind of engine
        samples it, BrokerUnavailable where Redis stays away, InvalidInput where a version is to be shown and `proves`
        was not called, ProofFailed where what it shows is not what the trainer has.
        """
        return self._take(self._claim, timeout_s)

    def _claim(self) -> PromptClaim | None:
        claim = self._side.claim(self._lease_s)
        if isinstance(claim, ProofDue):
            self._show_due(claim.manifest)
            claim = self._side.claim(self._lease_s)
        if claim is None or isinstance(claim, ProofDue):
            # Of another version, which is shown at the next try.
            return None
        self._hold(claim, name=f"{claim.prompt_batch.job_id} {claim.prompt_batch.batch_id}")
        return PromptClaim(claim=claim, claimed_s=time.time())

    def _claims_of(self, taken: PromptClaim) -> Sequence[Claim]:
        return (taken.claim,)

    def _seen(self) -> GeneratorSeen:
        return changed(self._sign_of_life, batches=self._leases.names)

    def _says(self, **fields: Any) -> None:
        """Takes note of what its next sign of life says."""
        self._sign_of_life = changed(self._sign_of_life, **fields)

    def make_model(self, device: str = "cpu") -> PreTrainedModel:
        """Makes the job's transformers model without its values, which `load` brings. It imports torch."""
        import torch

        from onbeat.weights.model_folder import empty_model

        return empty_model(self.model_folder, dtype=getattr(torch, self.spec.model.dtype), device=device)

    def proves(self, model: torch.nn.Module | Mapping[str, torch.Tensor], logprobs: LogProbsOf | None = None) -> None:
        """Says how this producer shows what it computes with a version, before its first batch of that version (I11).

        Args:
            model: What `load` fills: a module of the job's architecture, or its tensors by their published names.
            logprobs: Computes, by the forward that samples, the log-probs of given tokens: `logprobs(token_ids,
                num_scored)` takes int64 [R, T], and returns [R, num_scored]: natural logarithms of the last
                `num_scored` tokens of each row, at temperature 1 over the whole vocabulary. Left out: a forward of the
                module, called as transformers' causal models are.

        Raises:
            InvalidInput: Tensors alone come without `logprobs`.
        """
        if logprobs is None:
            if isinstance(model, Mapping):
                raise InvalidInput(
                    "tensors alone compute nothing", field="logprobs", cure="give the function that computes with them"
                )
            logprobs = logprobs_by_forward(model)
        self._prover = _Prover(model, logprobs)

    def load(self, claim: PromptClaim, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> str:
        """Puts the claim's version into the tensors, and returns the digest of what they hold, computed over them (I2).

        Nothing is read where they hold the version already. What is read is shown again, as `proves` has it.

        Args:
            claim: The claim.
            model: A module of the job's architecture, or its tensors by their published names.

        Raises:
            WeightsRejected: The version stays damaged; the trainer was told.
            ProofFailed: It is not what the trainer computes with it.
            InvalidInput: It isn't the model that `proves` was given.
        """
        if self._prover is not None and self._prover.model is not model:
            raise InvalidInput(
                "is another one than `proves` was given", field="model", cure="give both of them the same"
            )
        return self._load(claim.manifest, model)

    def _load(self, manifest: WeightManifest, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> str:
        if self._loaded is None or self._loaded.model is not model:
            self._loaded = _Loaded(self._receiver(model), model)
        if self._loaded.digest != manifest.weights_digest:
            self._read_and_show(self._loaded, manifest)
        self._says(policy_version=manifest.policy_version, weights_digest=self._loaded.digest)
        return self._loaded.digest

    def _read_and_show(self, loaded: _Loaded, manifest: WeightManifest) -> None:
        """Reads a version into the tensors. What isn't proved is read once more, whole.

        Raises WeightsRejected and ProofFailed; the tensors count as holding nothing then.
        """
        loaded.digest = ""
        self._says(loading_weights=tuple(step.directory for step in manifest.steps))
        self._beat()
        try:
            digest = self._read(loaded.receiver, manifest)
            try:
                self._show(manifest)
            except ProofFailed as error:
                log.warning("%s; the version is read again", error)
                loaded.receiver = self._receiver(loaded.model)
                digest = self._read(loaded.receiver, manifest)
                self._show(manifest)
        except ProofFailed as error:
            self._says(leaves_alone={manifest.job_id: in_one_line(error)})
            self._beat()
            raise
        finally:
            self._says(loading_weights=())
        loaded.digest = digest

    def _show_due(self, manifest: WeightManifest) -> None:
        """Shows a version that the fence asks for: it loads it, where the tensors hold another one."""
        if self._prover is None:
            raise InvalidInput(
                f"version {manifest.policy_version} has a probe, which a producer shows before its first batch",
                field="proves",
                cure="call producer.proves(model) before the loop, or submit the job with rollout.probe.rows = 0",
            )
        was_loaded = self._loaded is not None and self._loaded.digest == manifest.weights_digest
        self._load(manifest, self._prover.model)
        if was_loaded:
            self._show(manifest)

    def _show(self, manifest: WeightManifest) -> None:
        """Has the fence judge what the model computes with a version that it holds. Raises ProofFailed."""
        probe = manifest.probe
        if self._prover is None or probe is UNSET:
            return
        numbers = packed_logprobs(self._prover.logprobs, probe.rows)
        engine = self._sign_of_life.engine or OWN_ENGINE
        verdict = self._side.prove(manifest, numbers, kind=f"{engine} {self.spec.model.dtype}")
        # Of a version that is announced no more nothing can be claimed.
        if not verdict.is_proved and verdict.outcome != "unknown":
            raise proof_failure(verdict, manifest)

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
    model: torch.nn.Module | Mapping[str, torch.Tensor]
    digest: str = ""


@dataclass(frozen=True)
class _Prover:
    """How a version is shown."""

    model: torch.nn.Module | Mapping[str, torch.Tensor]
    logprobs: LogProbsOf


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
