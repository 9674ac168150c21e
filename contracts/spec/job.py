"""JobSpec: everything that defines a run, typed and closed. An unknown key fails and names itself.

docs/configuration.md is generated from the docstrings under the fields.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from contracts.encoding.digests import Digest
from contracts.encoding.wire import MAX_ITERATIONS, NO_CONTROL_CHARACTERS, FilePath, IterationsOrNone, Record
from contracts.experience.graph import StageGraph
from contracts.file_digests import FileDigests
from contracts.rewards import RewardSpec
from contracts.schedule import MAX_POLICY_LAG, Schedule, ScheduleName
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.datasets import (
    DatasetSpec,
    SourceDataset,
    environment_field,
    environments_of,
    sources_of,
)
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.limits import LimitSpec, Longest, TimeoutSpec
from contracts.spec.recording import NOTHING_RECORDED, RecordingSpec
from contracts.spec.rollout import EvaluationSpec, RolloutSpec
from contracts.spec.stages import (
    MAX_STAGES,
    REFERENCE_LOGPROBS,
    StageSpec,
    reward_weights,
    stage_graph,
)
from contracts.spec.trainer import OptimizerSpec, PluginTracker, TrainerSpec
from contracts.stated_scores import all_stated_scores
from contracts.weights import FileWeights, WeightsSpec

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
"""Onbeat's own trackers."""


class ModelSpec(Record, frozen=True, kw_only=True):
    """The model that is trained: any Hugging Face causal LM folder. A multi-modal one is trained by its text."""

    path: FilePath
    """Folder with config.json, tokenizer files and safetensors. A relative path starts at the folder of the spec's file
    or of the program, else at the stack's model root; at a gateway of another machine always at its model root."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters. With bfloat16 the optimizer keeps float32 copies of them, 4 bytes a parameter more.
    On a CPU without units for bfloat16, float32 is 2-4 times faster."""
    cast_lm_head_to_fp32: bool | UnsetType = UNSET
    """Computes a bfloat16 model's logits in float32, in trainer, stages and generators, so that their log-probs are
    nearer to each other (arXiv 2506.13585, 2510.13786). vLLM doesn't do this. Left out: false."""
    matmul: Literal["torch", "onednn"] | UnsetType = UNSET
    """The library that multiplies a float32 model's linear layers on a CPU, in trainer, stages and the transformers
    engine: torch's own, or oneDNN, which is up to 2.2 times as fast on AMD and gives other bits. If the key is left
    out, the gateway writes here which of them is faster on the machine that takes the job."""
    file_digests: FileDigests | UnsetType = UNSET
    """Digest of each file that is read of the folder: weights, config, tokenizer, chat template, end tokens. The
    gateway reads them when the job is submitted; a process that finds other bytes refuses the folder by name."""

    @property
    def is_by_onednn(self) -> bool:
        """True where linear layers multiply by oneDNN on a CPU. A spec that no gateway took multiplies by torch's."""
        return self.matmul == "onednn"


class ForkSpec(Record, frozen=True, kw_only=True):
    """Begins with a version of another job of this stack, and with the optimizer state of its checkpoint."""

    job: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$(?!\n)")]
    """The id of the other job. Its model, adapters and type of optimizer are this job's, too; all other keys may
    differ."""
    version: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)]
    """The version of the other job that this job begins with, as its own version 0. The other job keeps the checkpoint
    of it until this job has a checkpoint of its own."""
    weights_digest: Digest | UnsetType = UNSET
    """The digest of that version by the other job's audit chain, when this job is submitted. A checkpoint with other
    weights is refused."""


Tag = Annotated[str, Meta(min_length=1, max_length=40, pattern=NO_CONTROL_CHARACTERS)]


class JobSpec(Record, frozen=True, kw_only=True):
    """A job."""

    name: Annotated[str, Meta(min_length=1, max_length=120, pattern=NO_CONTROL_CHARACTERS)]
    """A name for people to read. Two jobs may have the same one."""
    tags: Annotated[tuple[Tag, ...], Meta(max_length=8)] = ()
    """Words for people. The page groups jobs by them, for example the seeds of one setting."""
    iterations: IterationsOrNone
    """The number of iterations. Iteration t trains version t and makes version t + 1, in
    algorithm.updates_per_iteration passes of algorithm.mini_batches optimizer steps. With 0 the job evaluates the model
    and trains nothing."""
    model: ModelSpec
    """The model that is trained."""
    fork: ForkSpec | UnsetType = UNSET
    """A version of another job that this job begins with. Left out: the job begins with the model as it is. A KL is to
    the model as it is in both cases."""
    dataset: DatasetSpec
    """Where prompts come from."""
    reward: RewardSpec = field(default_factory=RewardSpec)
    """How completions are scored."""
    environment: EnvironmentSpec | None = None
    """The environment that answers the model, turn by turn. none: a completion is one turn."""
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Seeds the prompt order and every sample."""
    schedule: ScheduleName = "periodic"
    """Decides which version samples iteration t, and when iteration t is trained: see the table of
    docs/schedules.md."""
    max_policy_lag: Annotated[int, Meta(ge=0, le=MAX_POLICY_LAG)] = 0
    """K, the number of versions by which the version that samples iteration t may be older than version t. It is 1 or
    more for delayed and bounded, and 0 for the other schedules."""
    deterministic: bool = True
    """Makes the run repeatable: the same spec with the same seed ends with the same digest (I7). This needs exact
    accumulation, and turns on torch's deterministic kernels."""
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    """The prompts and completions that one iteration samples."""
    algorithm: AlgorithmSpec = field(default_factory=AlgorithmSpec)
    """The advantage and the loss."""
    trackers: Annotated[tuple[TrackerName | PluginTracker, ...], Meta(max_length=8)] = ()
    """Experiment trackers that get the numbers of each iteration. A name is one of Onbeat's, which needs the extra of
    that name; a table is a tracker of a package."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """The optimizer."""
    trainer: TrainerSpec = field(default_factory=TrainerSpec)
    """How gradients are accumulated, how checkpoints are written, and how much memory a trainer takes."""
    weights: WeightsSpec = field(default_factory=FileWeights)
    """How each version gets to the generators."""
    stages: Annotated[tuple[StageSpec, ...], Meta(max_length=MAX_STAGES)] = ()
    """Models and programs that work on training rollouts before they are trained. Evaluations skip them."""
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    """Held-out evaluation."""
    recording: RecordingSpec | UnsetType | None = UNSET
    """Decides which batches stay on disk, so that they can be looked at and sampled again. Left out: one training batch
    of each iteration and the batches of evaluations stay, without their versions. null: no batch stays."""
    timeouts: TimeoutSpec = field(default_factory=TimeoutSpec)
    """Deadlines."""
    limits: LimitSpec = field(default_factory=LimitSpec)
    """Sizes."""

    @property
    def environments(self) -> dict[str, EnvironmentSpec]:
        """Source → the environment of its prompts; "" → that of all prompts; {} where completions are one turn."""
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
    def longest_row(self) -> int:
        """Tokens of the longest prompt with its completion, in training and in any evaluation."""
        evaluated = [held_out.sampled_as(self.rollout).max_new_tokens for held_out in self.evaluation.each.values()]
        return self.rollout.max_prompt_tokens + max(self.longest_completion()[1], *evaluated)

    @property
    def max_sampled_tokens(self) -> int:
        """Most tokens that the model samples in one completion."""
        one_turn = self.rollout.sampling.max_new_tokens
        bounds = [
            min(environment.max_turns * one_turn, environment.max_tokens) for environment in self.environments.values()
        ]
        return max(bounds, default=one_turn)

    @property
    def stage_graph(self) -> StageGraph:
        """The stages that a training batch passes, with their order and their columns."""
        return stage_graph(self.stages, self.model.dtype)

    @property
    def loads_reference(self) -> bool:
        """True where the trainer has a reference model: it needs one, and no stage gives its log-probs."""
        columns = {column.name for stage in self.stages for column in stage.outputs}
        return self.algorithm.kl_coefficient > 0.0 and REFERENCE_LOGPROBS not in columns

    @property
    def stage_reward_weights(self) -> dict[str, float]:
        """Column of a stage → what 1.0 of it adds to the reward."""
        return reward_weights(self.stages)

    @property
    def stated_scores(self) -> dict[str, float]:
        """Name of a judge (reward component, environment or stage) → the score of a completion that it can't judge.

        Judges for which the spec states no such score are left out.
        """
        return all_stated_scores(self.reward.components, self.environments, self.stages)

    @property
    def num_open(self) -> int:
        """Iterations that are open at the same time: the window."""
        return self.schedule_rule.num_open

    @property
    def schedule_rule(self) -> Schedule:
        """The rule by which versions sample iterations."""
        return Schedule(self.schedule, self.max_policy_lag)

    @property
    def samples_as_trained(self) -> bool:
        """Returns True where generators and trainer compute the same log-probs but for the last bits of float32."""
        is_exact = self.deterministic and self.model.dtype == "float32"
        return is_exact and self.samples_what_it_trains

    @property
    def samples_what_it_trains(self) -> bool:
        """Returns True where the version that is trained has sampled: log-probs differ by rounding alone then."""
        return not (self.schedule_rule.lags or self.trainer.external or self.algorithm.learns_given)

    @property
    def hedges(self) -> bool:
        """True where a batch may be sampled twice at once.

        The two copies must be identical (I7): otherwise the faster, shorter one would be preferred, which is a bias.
        """
        return self.rollout.hedge and self.deterministic

    def evaluates(self, iteration: int) -> bool:
        """Returns True where version `iteration` samples held-out prompts: before, after, and every N iterations."""
        if self.evaluation.num_batches == 0:
            return False
        if iteration in (0, self.iterations):
            return True
        every = self.evaluation.every_iterations
        return every > 0 and iteration % every == 0

    @property
    def tables(self) -> dict[str, SourceDataset]:
        """Source, or set of the evaluation → its data set; the one of "" in a job without a mixture."""
        return sources_of(self.dataset) | self.evaluation.tables

    @property
    def recording_policy(self) -> RecordingSpec:
        """The batches that are recorded. Those of a share of 0 and no evaluations are none.

        A spec without the table records one batch of each iteration and its evaluations, in 64 MiB, and keeps no
        version for them.
        """
        if self.recording is UNSET:
            share = 1 / self.rollout.batches_per_iteration
            return RecordingSpec(share=share, max_bytes=64 * 1024**2, max_version_bytes=0)
        if self.recording is None:
            return NOTHING_RECORDED
        return self.recording

    def records(self, batch_id: str, purpose: str) -> bool:
        """Returns True where the recording policy chooses a batch."""
        return self.recording_policy.takes(
            batch_id, purpose=purpose, seed=self.seed, num_batches=self.rollout.batches_per_iteration
        )

    @property
    def file_digests(self) -> dict[str, str]:
        """Path → digest of each file that the job's tables name by content; {} of a job that no gateway accepted."""
        digests = dict(self.model.file_digests or {})
        for table in (*self.tables.values(), *self.stages):
            digests |= getattr(table, "file_digests", UNSET) or {}
        return digests

    def checkpoints_after(self, iteration: int) -> bool:
        """Returns True where a checkpoint follows the commit of this iteration."""
        num_done = iteration + 1
        return num_done % self.trainer.checkpoint_every_iterations == 0 or num_done == self.iterations

    @property
    def last_iteration(self) -> int:
        """The last one that the fence opens: it only evaluates the last version, where there is an evaluation."""
        if self.evaluates(self.iterations):
            return self.iterations
        return self.iterations - 1
