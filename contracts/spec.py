"""JobSpec: everything that defines a run, typed and closed. An unknown key fails and names itself.

docs/configuration.md is generated from the docstrings under the fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, field

from contracts.rewards import RewardComponent
from contracts.rollouts import SamplingParams
from contracts.wire import Record

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=604800.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]

CLIP_RANGES = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "bnpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""Loss → (clip_low, clip_high) where a spec leaves them out; sources in docs/algorithms.md."""
CORRECTION_RANGES = {"none": (0.0, 0.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0)}
"""Correction → (low, high) where a spec leaves them out."""


class ModelSpec(Record, frozen=True, kw_only=True):
    """The model that is trained: any Hugging Face causal LM folder."""

    path: Annotated[str, Meta(min_length=1)]
    """Folder with config.json, tokenizer files and safetensors; relative paths start at the stack's model root."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter dtype of trainer and generators; on a CPU without bf16 units float32 is 2-4 times faster."""


class ChatSpec(Record, frozen=True, kw_only=True):
    """How a question becomes a prompt through the tokenizer's own chat template."""

    system_prompt: str = ""
    """"" leaves the system turn out (the template may have a default of its own)."""


class AdditionDataset(Record, tag_field="type", tag="addition", frozen=True, kw_only=True):
    """`a+b=` for all pairs of numbers below 100, answers with the digits reversed; 512 pairs are held out."""


class ReasoningGymDataset(Record, tag_field="type", tag="reasoning_gym", frozen=True, kw_only=True):
    """Procedural tasks of reasoning-gym; evaluation items come from another seed, repeated questions are dropped."""

    task: Annotated[str, Meta(min_length=1)]
    """Name in reasoning-gym, e.g. "chain_sum"."""
    params: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Parameters of the task's generator."""
    num_train_prompts: PositiveInt = 10_000
    """Size of the training pool; iterations walk through shuffled passes of it."""
    question_suffix: str = ""
    """Text after each question, e.g. how to mark the answer."""
    chat: ChatSpec | None = None
    """Renders the question by the chat template; without it the question text is the prompt."""


class JsonlDataset(Record, tag_field="type", tag="jsonl", frozen=True, kw_only=True):
    """One JSON object a line: `{"prompt": "...", "reference": "..."}`, optionally `"task_entry"`."""

    train_path: Annotated[str, Meta(min_length=1)]
    """File of training prompts; relative paths start at the stack's model root."""
    evaluation_path: str = ""
    """File of held-out prompts; "" holds the last `evaluation.num_prompts` lines of the training file out."""
    chat: ChatSpec | None = None
    """Renders the prompt by the chat template; without it the prompt text is used as it is."""


DatasetSpec = AdditionDataset | ReasoningGymDataset | JsonlDataset


class RolloutSpec(Record, frozen=True, kw_only=True):
    """What one iteration samples."""

    batches_per_iteration: PositiveInt = 8
    """Rollout batches of an iteration: the unit of dispatch, lease, publication and micro-batch."""
    prompts_per_batch: PositiveInt = 4
    """k: prompts of a batch. 1 suits continuous batching; a small model on a CPU wants 4-16."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """G: completions per prompt."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=128))
    """How completions are drawn."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt fails the job at its start."""
    max_attempts: PositiveInt = 3
    """Times that a batch is tried before it is dead-lettered."""
    on_failed_batch: Literal["fail", "abandon"] = "fail"
    """What a dead-lettered batch does to the job: fail it, or go on without the batch, counted and audited."""
    hedge: bool = True
    """Whether an idle generator samples a copy of a batch that another is late with; the first one counts. Jobs that
    aren't deterministic never do it: of two different samples the first is the shorter one."""

    @property
    def prompts_per_iteration(self) -> int:
        return self.batches_per_iteration * self.prompts_per_batch


class RewardSpec(Record, frozen=True, kw_only=True):
    """The rubric, and how long scoring may take."""

    components: Annotated[tuple[RewardComponent, ...], Meta(min_length=1)]
    """Scorers; the reward is the weighted sum of their scores."""
    item_timeout_s: Annotated[float, Meta(gt=0.0, le=600.0)] = 10.0
    """Hard deadline of one completion; its process is killed past it."""
    request_timeout_s: PositiveSeconds = 120.0
    """Deadline of one request to the reward service."""
    max_attempts: PositiveInt = 4
    """Requests for one batch, with back-off and jitter, before the batch fails."""


class AlgorithmSpec(Record, frozen=True, kw_only=True):
    """Advantage and loss; docs/algorithms.md has the equations."""

    loss: Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"] = "grpo"
    """The objective and how it is normalised: the mean of response means (grpo, gspo), a constant budget (dr_grpo), the
    mean over the iteration's tokens (dapo, cispo), the mean of the batches' token means (bnpo)."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce++_baseline"] = "grpo"
    """From the rewards of a group: over mean and deviation (grpo), over the mean (dr_grpo), over the mean of the other
    samples (rloo), over the mean and then the deviation of the whole iteration (reinforce++_baseline)."""
    advantage_epsilon: Annotated[float, Meta(gt=0.0)] = 1e-4
    """Added to the unbiased standard deviation of grpo and reinforce++_baseline."""
    old_policy: Literal["trainer", "generator"] = "trainer"
    """Whose log-probs the policy ratio is taken against. trainer: its own before the step, so the ratio is exactly 1
    and no clip acts; generator: those of sampling, so the clips act on the gap between the two engines."""
    clip_low: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Lower clip of the policy ratio: 1 - clip_low; none: 0.2, gspo 0.0003, cispo 1.0 (no bound)."""
    clip_high: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    """Upper clip of the policy ratio: 1 + clip_high; none: 0.2, dapo 0.28, gspo 0.0004, cispo 4.0."""
    kl_coefficient: Annotated[float, Meta(ge=0.0)] = 0.0
    """Weight of the KL to the frozen initial model; 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that KL from the sampled tokens."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss; reward: its sum over a response is taken off the reward before advantages."""
    entropy_coefficient: Annotated[float, Meta(ge=0.0)] = 0.0
    """Weight of the entropy bonus: the entropy of the distribution at each sampled token, normalised like the loss."""
    correction: Literal["none", "tis", "icepop"] = "none"
    """Weighs the surrogate by trainer over generator probability: truncated (tis) or dropped out of range (icepop)."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether each token has its weight, or a response one: the product over its tokens."""
    correction_low: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Lower bound of icepop's weight; none: 0.5."""
    correction_high: Annotated[float, Meta(ge=1.0)] | None = None
    """Upper bound of the weight; none: tis 2.0, icepop 5.0."""
    shuffle_rewards: bool = False
    """Negative control: rewards are permuted inside each group, so that nothing can be learnt."""

    def __post_init__(self) -> None:
        problem = next((problem for broken, problem in self._refusals() if broken), None)
        if problem is not None:
            raise ValueError(problem)

    @property
    def clip_range(self) -> tuple[float, float]:
        """(clip_low, clip_high) as set, else as in the loss's paper."""
        low, high = CLIP_RANGES[self.loss]
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def correction_range(self) -> tuple[float, float]:
        """(low, high) as set, else as in the correction's paper; tis has no lower bound."""
        low, high = CORRECTION_RANGES[self.correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def needs_every_row(self) -> bool:
        """Whether a completion of zero advantage has a gradient all the same, or gets its advantage from the model."""
        return self.kl_coefficient > 0.0 or self.entropy_coefficient > 0.0

    def _refusals(self) -> Iterator[tuple[bool, str]]:
        """(whether it holds, field, reason and cure), of each combination that has no meaning or no effect."""
        scaled = self.advantage == "reinforce++_baseline"
        kl_in_loss = self.kl_coefficient > 0.0 and self.kl_placement == "loss"
        yield (
            self.advantage in ("dr_grpo", "rloo") and self.advantage_epsilon != 1e-4,
            f'advantage_epsilon has no effect with advantage = "{self.advantage}"; leave it out',
        )
        yield (
            self.kl_coefficient == 0.0 and (self.kl_estimator, self.kl_placement) != ("k3", "loss"),
            "kl_coefficient is 0, so kl_estimator and kl_placement have no effect; set it above 0 or leave them out",
        )
        yield (
            kl_in_loss and self.kl_estimator == "k1",
            'kl_estimator = "k1" in the loss has a gradient of expectation zero; '
            'use "k2" there, or kl_placement = "reward"',
        )
        yield (
            kl_in_loss and scaled,
            'kl_placement = "loss" would be divided by the deviation of the advantages under '
            'advantage = "reinforce++_baseline"; set kl_placement = "reward"',
        )
        yield (
            self.entropy_coefficient > 0.0 and scaled,
            "entropy_coefficient would be divided by the deviation of the advantages under "
            'advantage = "reinforce++_baseline"; set it to 0',
        )
        yield from self._correction_refusals()

    def _correction_refusals(self) -> Iterator[tuple[bool, str]]:
        bounds = (self.correction_low, self.correction_high)
        low, high = self.correction_range
        yield (
            self.correction == "none" and (self.correction_level != "token" or bounds != (None, None)),
            'correction is "none", so its level and bounds have no effect; choose "tis" or "icepop", or leave them out',
        )
        yield (
            self.correction == "tis" and self.correction_low is not None,
            'correction_low has no effect with correction = "tis", which has no lower bound; leave it out',
        )
        yield (
            self.correction != "none" and self.old_policy == "generator",
            'correction would count the generator twice with old_policy = "generator"; set one of the two',
        )
        yield (
            self.correction != "none" and self.loss == "gspo" and self.correction_level == "token",
            'correction_level = "token" would undo the one ratio of loss = "gspo"; set correction_level = "sequence"',
        )
        yield (
            self.correction == "icepop" and low == high,
            "correction_low and correction_high leave no room; lower correction_low or raise correction_high",
        )


class OptimizerSpec(Record, frozen=True, kw_only=True):
    """AdamW, one step per iteration."""

    learning_rate: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-6
    """Peak learning rate."""
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    """Decay of the second moment."""
    epsilon: Annotated[float, Meta(gt=0.0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Meta(ge=0.0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Meta(gt=0.0)] = 1.0
    """Global gradient norm is clipped to this."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate over the job's iterations, to 0."""
    warmup_iterations: NonNegativeInt = 0
    """Linear warm-up."""


class TrainerSpec(Record, frozen=True, kw_only=True):
    """How gradients are accumulated and saved."""

    accumulation: Literal["exact", "float"] = "exact"
    """exact: 64-bit fixed point, independent of arrival order (I7), 8 bytes a parameter; float: float32 sums."""
    checkpoint_every_iterations: PositiveInt = 10
    """A checkpoint is also written after the last iteration and on cancel."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that are kept, and beside them the best of those whose version was evaluated."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, about a third more time."""


class EvaluationSpec(Record, frozen=True, kw_only=True):
    """Held-out prompts, generated by the same generators under the same version; always before and after training."""

    every_iterations: NonNegativeInt = 0
    """Also every N iterations; 0: only before and after."""
    num_prompts: NonNegativeInt = 64
    """Held-out prompts of an evaluation; 0 turns evaluation off."""
    prompts_per_batch: PositiveInt = 32
    """Prompts of one evaluation batch."""
    greedy: bool = True
    """Also evaluates greedy decoding, beside the job's own sampling with one sample a prompt."""

    @property
    def num_batches(self) -> int:
        """Batches of one evaluation: the held-out prompts under the job's sampling, then again greedily."""
        passes = 2 if self.greedy else 1
        return passes * math.ceil(self.num_prompts / self.prompts_per_batch)


class TimeoutSpec(Record, frozen=True, kw_only=True):
    """Deadlines: nothing waits without one (I8)."""

    generator_lease_s: PositiveSeconds = 10.0
    """A claimed batch without a heartbeat for this long goes to another generator."""
    trainer_lease_s: PositiveSeconds = 10.0
    """A trainer without a heartbeat for this long may be replaced."""
    iteration_s: PositiveSeconds = 3600.0
    """An iteration that takes longer fails the job and names the missing batches."""
    no_generator_s: PositiveSeconds = 120.0
    """The job fails after this long without any live generator."""
    max_trainer_starts: PositiveInt = 5
    """Trainer processes that may start for this job without committing an iteration in between."""


class LimitSpec(Record, frozen=True, kw_only=True):
    """Sizes that bound the memory of a job in Redis."""

    max_batch_bytes: Annotated[int, Meta(ge=1024, le=536870912)] = 16 * 1024 * 1024
    """Encoded rollout batch; a larger one is refused as oversize. Redis holds at most an iteration's batches."""


class JobSpec(Record, frozen=True, kw_only=True):
    """A job, as TOML in a file and as JSON over HTTP."""

    name: Annotated[str, Meta(min_length=1, max_length=120)]
    """For people."""
    iterations: PositiveInt
    """Optimizer steps; iteration t samples version t and makes version t + 1."""
    model: ModelSpec
    """The model that is trained."""
    dataset: DatasetSpec
    """Where prompts come from."""
    reward: RewardSpec
    """How completions are scored."""
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Seeds the prompt order and every sample."""
    schedule: Literal["periodic", "synchronous"] = "periodic"
    """periodic trains while the iteration is still being generated; synchronous starts after its last batch."""
    deterministic: bool = True
    """Same spec, same seed, same digest (I7); needs exact accumulation and turns on torch's deterministic kernels."""
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    """What one iteration samples."""
    algorithm: AlgorithmSpec = field(default_factory=AlgorithmSpec)
    """Advantage and loss."""
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    """AdamW."""
    trainer: TrainerSpec = field(default_factory=TrainerSpec)
    """Accumulation and checkpoints."""
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    """Held-out evaluation."""
    timeouts: TimeoutSpec = field(default_factory=TimeoutSpec)
    """Deadlines."""
    limits: LimitSpec = field(default_factory=LimitSpec)
    """Sizes."""

    def __post_init__(self) -> None:
        if self.deterministic and self.trainer.accumulation != "exact":
            raise ValueError(
                'deterministic needs trainer.accumulation = "exact"; set deterministic = false for float sums'
            )
        if self.rollout.sampling.temperature == 0.0:
            raise ValueError("rollout.sampling.temperature must be above 0: a group of greedy samples has no advantage")

    @property
    def hedges(self) -> bool:
        """Whether a batch may be sampled twice at once: two copies must be identical (I7), or the first is a bias."""
        return self.rollout.hedge and self.deterministic

    def evaluates(self, iteration: int) -> bool:
        """Whether the held-out prompts are sampled under version `iteration`: before, after, and every N iterations."""
        every = self.evaluation.every_iterations
        if self.evaluation.num_prompts == 0:
            return False
        return iteration in (0, self.iterations) or (every > 0 and iteration % every == 0)

    @property
    def last_iteration(self) -> int:
        """The last one that the fence opens: it only evaluates the last version, where there is an evaluation."""
        return self.iterations if self.evaluates(self.iterations) else self.iterations - 1
