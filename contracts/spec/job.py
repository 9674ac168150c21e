"""JobSpec: everything that defines a run, typed and closed. An unknown key fails and names itself.

docs/configuration.md is generated from the docstrings under the fields.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.digests import Digest
from contracts.encoding.wire import MAX_ITERATIONS, NO_CONTROL_CHARACTERS, FilePath, Iterations, Record
from contracts.experience.plan import StagePlan
from contracts.file_digests import FileDigests
from contracts.rewards import RewardSpec, overlong_problem
from contracts.schedule import LAGGING, MAX_POLICY_LAG, Schedule, ScheduleName
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.datasets import (
    DatasetSpec,
    SourceDataset,
    environment_field,
    environment_problem,
    environments_of,
    given_problem,
    pools_problem,
    sources_of,
    sources_problem,
)
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.limits import LimitSpec, Longest, TimeoutSpec, check_products
from contracts.spec.recording import NOTHING_RECORDED, RecordingSpec
from contracts.spec.rollout import EvaluationSpec, RolloutSpec
from contracts.spec.stages import (
    MAX_STAGES,
    REFERENCE_LOGPROBS,
    StageSpec,
    job_problems,
    reward_weights,
    stage_plan,
    stage_problems,
)
from contracts.spec.trainer import OptimizerSpec, PluginTracker, TrainerSpec, external_problem, hosts_problem
from contracts.stated_scores import all_stated_scores, names_problem
from contracts.weights import FileWeights, WeightsSpec, has_deltas

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
"""Onbeat's own trackers."""


class ModelSpec(Record, frozen=True, kw_only=True):
    """The model that is trained: any Hugging Face causal LM folder."""

    path: FilePath
    """Folder with config.json, tokenizer files and safetensors; relative paths start at the stack's model root."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters. Of bfloat16 the optimizer steps float32 masters, 4 bytes each more; on a CPU without
    bf16 units float32 is 2-4 times faster."""
    cast_lm_head_to_fp32: bool | UnsetType = UNSET
    """Computes a bfloat16 model's logits in float32, in trainer, stages and generators, whose gap falls (arXiv
    2506.13585, 2510.13786). Not by vLLM. Left out: false."""
    matmul: Literal["torch", "onednn"] | UnsetType = UNSET
    """The library that multiplies a float32 model's linear layers on a CPU, in trainer, stages and the transformers
    engine: torch's own, or oneDNN, up to 2.2 times as fast on AMD, to other bits. Left out: the faster one of the
    machine that takes the job, which stands here in the job's spec from then on."""
    file_digests: FileDigests | UnsetType = UNSET
    """Digest of each file that is read of the folder: weights, config, tokenizer, chat template, end tokens. The
    gateway reads them when the job is submitted; a process that finds other bytes refuses the folder by name."""

    def __post_init__(self) -> None:
        if self.matmul and self.dtype != "float32":
            raise ValueError('matmul has no effect with dtype = "bfloat16", whose products are by oneDNN; leave it out')
        if self.cast_lm_head_to_fp32 and self.dtype == "float32":
            raise ValueError('cast_lm_head_to_fp32 has no effect with dtype = "float32"; leave it out')

    @property
    def is_by_onednn(self) -> bool:
        """True where linear layers multiply by oneDNN on a CPU. A spec that no gateway took multiplies by torch's."""
        return self.matmul == "onednn"


class ForkSpec(Record, frozen=True, kw_only=True):
    """Begins with a version of another job of this stack, and with the optimizer state of its checkpoint."""

    job: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$(?!\n)")]
    """Its id. Its model, adapters and type of optimizer are this job's too; all else may be another."""
    version: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)]
    """The version, of which a checkpoint is there until this job has one of its own; it is this job's version 0."""
    weights_digest: Digest | UnsetType = UNSET
    """Digest of that version, by the other job's audit chain when this one is submitted; a checkpoint of another is
    refused."""


Tag = Annotated[str, Meta(min_length=1, max_length=40, pattern=NO_CONTROL_CHARACTERS)]


class JobSpec(Record, frozen=True, kw_only=True):
    """A job."""

    name: Annotated[str, Meta(min_length=1, max_length=120, pattern=NO_CONTROL_CHARACTERS)]
    """For people."""
    tags: Annotated[tuple[Tag, ...], Meta(max_length=8)] = ()
    """For people: what groups jobs on the page, as the seeds of one setting."""
    iterations: Iterations
    """Iteration t trains version t and makes version t + 1, in algorithm.updates_per_iteration
    passes of algorithm.mini_batches optimizer steps."""
    model: ModelSpec
    """The model that is trained."""
    fork: ForkSpec | UnsetType = UNSET
    """Another job's version that the model begins with; left out: the model as it is. A KL is to the model as it is."""
    dataset: DatasetSpec
    """Where prompts come from."""
    reward: RewardSpec = field(default_factory=RewardSpec)
    """How completions are scored."""
    environment: EnvironmentSpec | None = None
    """What answers the model, turn by turn; none: a completion is one turn."""
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Seeds the prompt order and every sample."""
    schedule: ScheduleName = "periodic"
    """Which version samples iteration t, and when it is trained: a table of docs/job.md."""
    max_policy_lag: Annotated[int, Meta(ge=0, le=MAX_POLICY_LAG)] = 0
    """K: how many versions older than iteration t its sampling version may be; 1 or more for delayed and bounded, else
    0."""
    deterministic: bool = True
    """Same spec, same seed, same digest (I7); needs exact accumulation and turns on torch's deterministic kernels."""
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    """What one iteration samples."""
    algorithm: AlgorithmSpec = field(default_factory=AlgorithmSpec)
    """Advantage and loss."""
    trackers: Annotated[tuple[TrackerName | PluginTracker, ...], Meta(max_length=8)] = ()
    """Experiment trackers that get each iteration's numbers: an extra of Onbeat by its name, or a package's by a
    table."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """The optimizer."""
    trainer: TrainerSpec = field(default_factory=TrainerSpec)
    """Accumulation and checkpoints."""
    weights: WeightsSpec = field(default_factory=FileWeights)
    """How each version gets to the generators."""
    stages: Annotated[tuple[StageSpec, ...], Meta(max_length=MAX_STAGES)] = ()
    """What stage workers make of training rollouts before they are trained; evaluations pass none."""
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    """Held-out evaluation."""
    recording: RecordingSpec | UnsetType | None = UNSET
    """Which batches stay on disk to be looked at and sampled again; left out: one an iteration, without its version."""
    timeouts: TimeoutSpec = field(default_factory=TimeoutSpec)
    """Deadlines."""
    limits: LimitSpec = field(default_factory=LimitSpec)
    """Sizes."""

    def __post_init__(self) -> None:
        if self.deterministic and self.trainer.accumulation != "exact":
            raise ValueError('deterministic needs trainer.accumulation = "exact"; set it to false for float sums')
        self._check_sharding()
        self._check_packing()
        lora = self.trainer.lora
        if lora is not None and self.optimizer.type == "muon":
            raise ValueError('optimizer.type = "muon" is for whole matrices, of which trainer.lora trains none')
        if lora is not None and lora.publish == "adapter" and has_deltas(self.weights):
            raise ValueError(
                'trainer.lora.publish = "adapter" leaves deltas nothing to save, since every element of an adapter '
                'changes in a step; set weights.transport = "file" or "redis", or weights.snapshot_every_versions = 1'
            )
        if self.trainer.kl_alarm is not UNSET and self.algorithm.kl_coefficient == 0.0:
            raise ValueError("trainer.kl_alarm has no effect with algorithm.kl_coefficient = 0; leave it out")
        if self.algorithm.ref_model_sync_iterations is not UNSET and (lora is not None or not self.loads_reference):
            what = 'a stage of type "reference"' if lora is None else "trainer.lora"
            raise ValueError(f"algorithm.ref_model_sync_iterations is not possible with {what}, whose reference stays")
        if self.algorithm.advantage_kind.has_critic and lora is not None:
            raise ValueError('algorithm.advantage = "gae" trains a whole model, its critic, and trainer.lora none')
        if self.fork is not UNSET and (self.trainer.external or any(s.kind == "reference" for s in self.stages)):
            what = "trainer.external = true" if self.trainer.external else 'a stage of type "reference"'
            raise ValueError(f"fork is not possible with {what}, which begins with the model as it is; leave one out")
        if self.rollout.sampling.temperature == 0.0:
            raise ValueError("rollout.sampling.temperature must be above 0: a group of greedy samples has no advantage")
        for key in ("trackers", "tags"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ValueError(f"{key} names one twice; name each once")
        if problem := self._problem_between_tables():
            raise ValueError(problem)
        self._check_group_size()
        if self.rollout.batches_per_iteration % self.algorithm.num_mini_batches:
            raise ValueError(
                f"algorithm.mini_batches = {self.algorithm.num_mini_batches} can't cut rollout.batches_per_iteration = "
                f"{self.rollout.batches_per_iteration} into equal parts; take a divisor of it"
            )
        self._check_credit()
        self._check_resamples()
        self._check_lag()
        self._check_stages()
        check_products(
            self.rollout,
            self.evaluation,
            num_open=self.num_open,
            longest=self.longest_completion(),
            given_tokens=self.rollout.sampling.max_new_tokens if self.algorithm.learns_given else 0,
        )

    def _problem_between_tables(self) -> str:
        tables = {"trainer": self.trainer, "algorithm": self.algorithm, "optimizer": self.optimizer}
        plays, lags = bool(self.environments), self.schedule in LAGGING
        is_given = self.algorithm.learns_given
        return (
            (external_problem(tables, self.trackers, self.schedule) if self.trainer.external else "")
            or hosts_problem(self.trainer, self.weights, self.schedule)
            or environment_problem(self.environments, self.rollout, self.evaluation, self.dataset)
            or (given_problem(self.dataset, self.rollout, plays=plays, lags=lags) if is_given else "")
            or pools_problem(self.dataset, self.rollout, iterations=self.iterations, num_open=self.num_open)
            or sources_problem(
                self.dataset, self.reward.components, self.environment, self.evaluation, learns_given=is_given
            )
            or overlong_problem(self.reward.components, self.max_sampled_tokens)
        )

    def _check_group_size(self) -> None:
        if self.rollout.group_size > 1 or self.trainer.external:
            return
        if self.algorithm.advantage_kind.compares_groups:
            raise ValueError(
                f'rollout.group_size = 1 leaves algorithm.advantage = "{self.algorithm.advantage}" nothing to compare '
                'with; sample 2 or more, or set algorithm.advantage = "gae"'
            )
        if self.algorithm.shuffle_rewards:
            raise ValueError("algorithm.shuffle_rewards has no effect with rollout.group_size = 1; sample 2 or more")

    def _check_credit(self) -> None:
        if self.algorithm.credits_turns and all(one.max_turns == 1 for one in self.environments.values()):
            raise ValueError(
                'algorithm.credit = "turn" has no effect where a completion is one turn; name an environment of '
                'several turns, or set credit = "trajectory"'
            )

    def _check_resamples(self) -> None:
        """Only where a group of equal rewards teaches nothing is it worth another prompt."""
        algorithm, kind = self.algorithm, self.algorithm.advantage_kind
        reasons = {
            'with algorithm.credit = "turn" trajectories of equal rewards may have unequal turns; set it to 0, or '
            'credit = "trajectory"': algorithm.credits_turns,
            f'under algorithm.advantage = "{algorithm.advantage}" equal rewards have an advantage; set it to 0, or '
            "choose another advantage": kind.normalises_components or kind.has_critic,
            'with algorithm.kl_placement = "reward" the KL makes their rewards differ; set kl_placement = "loss", or '
            "max_resamples to 0": algorithm.kl_coefficient > 0.0 and algorithm.kl_placement == "reward",
            "with algorithm.distillation_coefficient the teacher judges every completion, whatever its reward; set one "
            "of the two to 0": algorithm.distillation_coefficient > 0.0,
        }
        reason = next((why for why, holds in reasons.items() if holds), "")
        if reason and self.rollout.max_resamples > 0:
            raise ValueError(f"rollout.max_resamples would drop groups that teach: {reason}")

    def _check_lag(self) -> None:
        """Under a lag samples are of another policy than the one that is trained: the spec says what becomes of it."""
        lag, lags, algorithm = self.max_policy_lag, self.schedule in LAGGING, self.algorithm
        is_unnamed, against_sampler = algorithm.correction is None and lag > 0, algorithm.old_policy == "generator"
        reasons = {
            f'max_policy_lag = {lag} has no effect with schedule = "{self.schedule}", under which each iteration is '
            'sampled by its own version; set it to 0, or schedule = "delayed" or "bounded"': lag > 0 and not lags,
            f'schedule = "{self.schedule}" with max_policy_lag = 0 is schedule = "periodic"; set max_policy_lag to 1 '
            "or more, or take that schedule": lag == 0 and lags,
            f"max_policy_lag = {lag} is larger than the job: the last of {self.iterations} iterations lags "
            f"{self.iterations - 1} at most; lower it, or raise iterations": lag >= self.iterations and lags,
            'deterministic is not possible with schedule = "bounded", where the version that samples a batch depends '
            'on the moment; set deterministic = false, or schedule = "delayed"': self.schedule == "bounded"
            and self.deterministic,
            'algorithm.correction = "decoupled_ppo" has no effect of its own with max_policy_lag = 0, where its '
            'proximal policy is the one that sampled; choose "tis" or "icepop" against the gap between the engines, '
            'or schedule = "delayed" or "bounded"': algorithm.correction == "decoupled_ppo" and lag == 0,
            f'algorithm.correction must be named with max_policy_lag = {lag}; set it to "none", since under old_policy '
            '= "generator" the ratio is against the policy that sampled already': is_unnamed and against_sampler,
            f"algorithm.correction must be named with max_policy_lag = {lag}: samples of an older policy make the "
            'gradient a biased one; choose "tis", "icepop" or "decoupled_ppo", or "none" to train them as they '
            "are": is_unnamed and not against_sampler,
            'algorithm.kl_estimator = "k1" in the loss, unweighed, has a gradient of expectation zero; leave '
            'use_bias_correction_kl out, or set kl_placement = "reward"': algorithm.kl_in_loss
            and algorithm.kl_estimator == "k1"
            and not algorithm.weighs_kl,
        }
        if reason := next((why for why, holds in reasons.items() if holds), ""):
            raise ValueError(reason)

    def _check_stages(self) -> None:
        """Whether the stages go together, and with what else the spec says."""
        if problem := next(stage_problems(self.stages), ""):
            raise ValueError(problem)
        problems = job_problems(
            self.stages,
            algorithm=None if self.trainer.external else self.algorithm,
            dataset=self.dataset,
            deterministic=self.deterministic,
            resamples=self.rollout.max_resamples > 0,
            batch_tokens=self.rollout.prompts_per_batch * self.rollout.group_size * self.max_sampled_tokens,
            max_bytes=self.limits.max_batch_bytes,
            dtype=self.model.dtype,
        )
        problem = next(problems, "") or names_problem(self.reward.components, self.environments, self.stages)
        if problem:
            raise ValueError(problem)

    def _check_packing(self) -> None:
        """Whether log-probs can have the generators' bits, where the trainer is to have them."""
        if self.trainer.packing != "as_sampled":
            return
        needs = {
            'model.dtype = "float32"': self.model.dtype == "float32",
            "deterministic = true": self.deterministic,
            "no trainer.lora": self.trainer.lora is None,
            'trainer.sharding = "none"': self.trainer.sharding == "none",
            "no environment": not self.environments,
            "completions that are sampled": not self.algorithm.learns_given,
        }
        if missing := " and ".join(what for what, is_so in needs.items() if not is_so):
            raise ValueError(f'trainer.packing = "as_sampled" needs {missing}; or set packing = "shared_prompt"')

    def _check_sharding(self) -> None:
        trainer, optimizer, whole = self.trainer, self.optimizer.type, 'needs trainer.sharding = "none"'
        if trainer.sharding == "none":
            return
        if trainer.world_size == 1 and trainer.over_hosts is None:
            raise ValueError('trainer.sharding = "fsdp" needs trainer.world_size above 1, or trainer.hosts')
        if trainer.accumulation != "exact":
            raise ValueError('trainer.sharding = "fsdp" needs trainer.accumulation = "exact"')
        if optimizer != "adamw" and trainer.lora is None:
            why = "its blocks would depend on the ranks" if optimizer == "adamw_8bit" else "it steps whole matrices"
            raise ValueError(f'optimizer.type = "{optimizer}" {whole}: {why}')
        if self.algorithm.advantage_kind.has_critic:
            raise ValueError(f'algorithm.advantage = "{self.algorithm.advantage}" {whole}')

    @property
    def environments(self) -> dict[str, EnvironmentSpec]:
        """Source → what answers the model at its prompts; "" → what does at all; {} where completions are one turn."""
        return environments_of(self.dataset, self.environment)

    def longest_completion(self, source: str | None = None) -> Longest:
        """Tokens of any completion, observations included; of a source's, those that are seen at a time."""
        bounds = [("rollout.sampling.max_new_tokens", self.rollout.sampling.max_new_tokens)]
        for name, environment in self.environments.items():
            if source is None or name in ("", source):
                key, most = ("max_tokens", environment.max_tokens) if source is None else environment.seen_bound
                bounds.append((f"{environment_field(self.dataset, name)}.{key}", most))
        return max(reversed(bounds), key=lambda bound: bound[1])

    @property
    def max_sampled_tokens(self) -> int:
        """Most tokens that the model samples in one completion."""
        one_turn = self.rollout.sampling.max_new_tokens
        most = (min(one.max_turns * one_turn, one.max_tokens) for one in self.environments.values())
        return max(most, default=one_turn)

    @property
    def stage_plan(self) -> StagePlan:
        """What the stages mean for a training batch."""
        return stage_plan(self.stages, self.model.dtype)

    @property
    def loads_reference(self) -> bool:
        """Whether the trainer has a reference model: it needs one, and no stage gives its log-probs."""
        made = {column.name for stage in self.stages for column in stage.outputs}
        return self.algorithm.kl_coefficient > 0.0 and REFERENCE_LOGPROBS not in made

    @property
    def stage_reward_weights(self) -> dict[str, float]:
        """Column of a stage → what 1.0 of it adds to the reward."""
        return reward_weights(self.stages)

    @property
    def stated_scores(self) -> dict[str, float]:
        """What the spec says of completions that can't be judged: name of what can't → score, where it states one."""
        return all_stated_scores(self.reward.components, self.environments, self.stages)

    @property
    def num_open(self) -> int:
        """Iterations that are open at the same time: the window."""
        return self.schedule_rule.num_open

    @property
    def schedule_rule(self) -> Schedule:
        """What the schedule decides."""
        return Schedule(self.schedule, self.max_policy_lag)

    @property
    def samples_as_trained(self) -> bool:
        """Returns True where generators and trainer compute the same log-probs but for the last bits of float32."""
        is_exact = self.deterministic and self.model.dtype == "float32"
        return is_exact and not (self.schedule_rule.lags or self.trainer.external or self.algorithm.learns_given)

    @property
    def hedges(self) -> bool:
        """Whether a batch may be sampled twice at once: two copies must be identical (I7), or the first is a bias."""
        return self.rollout.hedge and self.deterministic

    def evaluates(self, iteration: int) -> bool:
        """Whether the held-out prompts are sampled under version `iteration`: before, after, and every N iterations."""
        every, is_due = self.evaluation.every_iterations, iteration in (0, self.iterations)
        return self.evaluation.num_batches > 0 and (is_due or (every > 0 and iteration % every == 0))

    @property
    def tables(self) -> dict[str, SourceDataset]:
        """Source, or set of the evaluation → its data set; the one of "" in a job without a mixture."""
        return sources_of(self.dataset) | self.evaluation.tables

    @property
    def recording_policy(self) -> RecordingSpec:
        """The batches that are recorded. Those of a share of 0 and no evaluations are none.

        A spec without the table records about one batch of each iteration, in 64 MiB, and keeps no version for it.
        """
        if self.recording is UNSET:
            share = 1 / self.rollout.batches_per_iteration
            return RecordingSpec(share=share, max_bytes=64 * 1024**2, max_version_bytes=0)
        if self.recording is None:
            return NOTHING_RECORDED
        return self.recording

    @property
    def file_digests(self) -> dict[str, str]:
        """Path → digest of each file that the job's tables name by content; {} of a job that no gateway accepted."""
        digests = dict(self.model.file_digests or {})
        for table in (*self.tables.values(), *self.stages):
            digests |= getattr(table, "file_digests", UNSET) or {}
        return digests

    def checkpoints_after(self, iteration: int) -> bool:
        """Whether a checkpoint follows the commit of this iteration."""
        num_done = iteration + 1
        return num_done % self.trainer.checkpoint_every_iterations == 0 or num_done == self.iterations

    @property
    def last_iteration(self) -> int:
        """The last one that the fence opens: it only evaluates the last version, where there is an evaluation."""
        return self.iterations if self.evaluates(self.iterations) else self.iterations - 1
