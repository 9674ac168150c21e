"""AlgorithmSpec: advantage and loss, and which of their options go together."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.wire import Factor, Iterations, Line, Record
from contracts.spec.kinds import (
    ADVANTAGE_KINDS,
    CORRECTION_RANGES,
    LOSS_KINDS,
    AdvantageKind,
    AdvantageName,
    CorrectionName,
    LossKind,
    LossName,
)

LAGGING_CLIP_MAX = 3.0
"""`clip_max` where a spec leaves it out and ratios are against an older policy that sampled; verl's clip_ratio_c."""


class PluginLoss(Record, tag_field="type", tag="plugin", frozen=True, kw_only=True):
    """A user's loss, found by its name among the entry points of group `onbeat.losses` where the trainer runs.

    docs/extend.md says what it is given and what it must keep.
    """

    entry_point: Line
    """Name of the `PolicyLoss` in group `onbeat.losses`."""


class AlgorithmSpec(Record, frozen=True, kw_only=True):
    """Advantage and loss; docs/losses.md has the equations."""

    loss: LossName | PluginLoss = "dapo"
    """The loss, which also chooses by what the sum over tokens is divided: by each response's tokens (grpo, gspo;
    biased by length), by a constant (dr_grpo), by the iteration's tokens (dapo, cispo, and sft, which learns the
    completions of the data set), or by each batch's tokens (bnpo). A table names the loss of an installed package."""
    advantage: AdvantageName = "grpo"
    """The baseline that a reward is compared with (docs/losses.md): the rewards of its group (grpo, dr_grpo, rloo,
    gdpo, lite_ppo, reinforce++_baseline), a critic at each token (gae, PPO's), or nothing (none: only a teacher or the
    data set teaches)."""
    gae_lambda: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET
    """The lambda of GAE. Left out: 1."""
    discount: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """The gamma of GAE, for each token. Left out: 1."""
    value_coefficient: Annotated[float, Meta(gt=0.0, le=1e3)] | UnsetType = UNSET
    """The weight of the critic's loss. Left out: 0.1. optimizer.critic_learning_rate_factor sets the critic's learning
    rate."""
    whiten_advantages: bool | UnsetType = UNSET
    """Subtracts the mean of their rollout batch from GAE's advantages, and divides them by its deviation. Left out:
    true."""
    value_clip: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    """How far a value may move in the later steps of an iteration before it has no gradient. Left out: there is no
    bound. It is refused if an iteration has one step."""
    reward_clip: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    """The bound of each reward on both sides, or with gdpo of each component's score. Left out: there is no bound."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """For jobs with an environment. trajectory: a trajectory has one advantage, from its whole reward. turn: each turn
    has one, from the rewards since that turn, compared with the same turn of the group's other trajectories."""
    advantage_epsilon: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1e-4
    """Added to each unbiased standard deviation that an advantage divides by."""
    updates_per_iteration: Annotated[int, Meta(ge=1, le=64)] = 1
    """The number of passes over the same rollouts (GRPO's μ). Each pass makes an optimizer step, or one for each of its
    mini-batches."""
    mini_batches: Annotated[int, Meta(ge=1, le=64)] | UnsetType = UNSET
    """The number of equal parts into which the batches of an iteration are divided, by their numbers. Each part has an
    optimizer step. Left out: 1."""
    old_policy: Literal["trainer", "generator"] = "trainer"
    """Whose log-probs the policy ratio is taken against. trainer: the trainer's before the iteration's first step, in
    which no clip acts. generator: the generator's."""
    clip_low: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """The lower clip of the policy ratio is 1 - clip_low. none: 0.2, for gspo 0.0003, for cispo 1.0 (no bound). A clip
    that can't act is refused: with old_policy = "trainer" and one update an iteration the ratio is exactly 1."""
    clip_high: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    """The upper clip of the policy ratio is 1 + clip_high. none: 0.2, for dapo 0.28, for gspo 0.0004, for cispo 4.0. It
    needs several updates an iteration, or old_policy = "generator": otherwise no clip acts."""
    clip_max: Annotated[float, Meta(gt=1.0, le=1e6)] | UnsetType = UNSET
    """Dual clip: the most that the policy ratio counts if the advantage is negative, above 1 + clip_high. Left out: 3.0
    under a lag with old_policy = "generator", as in verl, unless 1 + clip_high is as much; otherwise there is no bound.
    It needs several updates an iteration, or old_policy = "generator"."""
    kl_coefficient: Factor = 0.0
    """The weight of the KL to the initial model. With 0 there is no reference model."""
    ref_model_sync_iterations: Iterations | UnsetType = UNSET
    """After each so many iterations the reference model of the KL becomes the policy. Left out: it stays the initial
    model."""
    ref_model_mixup_alpha: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """The share of the policy in the new reference model; the rest is the old one (TR-DPO, arXiv 2404.09656). Left out:
    1. Below 1 the average of a bfloat16 model is kept in float32, 4 bytes a parameter more."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The formula that estimates the KL from the sampled tokens (docs/kl.md)."""
    use_bias_correction_kl: bool | UnsetType = UNSET
    """Multiplies the KL in the loss by policy ratio and correction, as the policy's loss is. Its gradient is then that
    of KL(policy || reference) under each schedule (docs/kl.md). Left out: true, as in TRL."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the KL is used (docs/kl.md). loss: it is added to the loss of each token. reward: it is subtracted from the
    reward, before advantages are computed."""
    entropy_coefficient: Factor = 0.0
    """The weight of the entropy bonus. The entropy is that of the whole distribution at each sampled token, and is
    normalised like the loss."""
    distillation_coefficient: Factor = 0.0
    """The weight of the divergence from a teacher. A stage of type "teacher" makes the teacher's log-probs, or another
    stage with the column `teacher_logprobs`."""
    distillation_beta: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET
    """Compares whole distributions with the teacher's (GKD): 0 is the forward KL, 1 the reverse KL, and a number
    between a Jensen-Shannon divergence. Left out: the reverse KL, estimated by the sampled token."""
    correction: CorrectionName | None = None
    """How samples of an older version are weighed. tis: the weight is truncated. icepop: tokens whose weight is outside
    the bounds are dropped. decoupled_ppo: tokens whose weight is above a cap are dropped; it needs a lag. Under a lag
    "none" has to be written out."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """token: each token has a weight. sequence: a response has one weight, the product over its tokens. geometric:
    nothing is weighed; with icepop responses are left out whose geometric mean is outside the bounds, as verl's
    rejection does."""
    correction_low: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """The lower bound of icepop's weight. none: 0.5, with geometric 1 / correction_high."""
    correction_high: Annotated[float, Meta(ge=1.0, le=1e6)] | None = None
    """The upper bound of the weight. none: 2.0 for tis, 5.0 for icepop and decoupled_ppo. With geometric it has to be
    set, near 1."""
    off_policy_mask_threshold: Annotated[float, Meta(gt=0.0, le=1e3)] | UnsetType = UNSET
    """Leaves out the policy's loss of a response that the policy has left: one with a negative advantage whose mean
    log(mu / pi) a token is above this number."""
    routing_replay: bool | UnsetType = UNSET
    """For a mixture of experts: the trainer sends each token through the experts that it went through at the generator
    (R3, arXiv 2510.11370). The trainer's own router gives their weights. Batches are larger by a byte for each token,
    layer and expert. It needs a generator with the transformers engine. Left out: false."""
    on_truncated: Literal["score", "mask", "penalise"] | UnsetType = UNSET
    """Decides what a completion that was cut teaches. score: its reward counts as it is; this also holds if the key is
    left out. mask: the completion teaches nothing, but keeps its place in group and divisor. penalise: it has
    truncated_reward as its reward."""
    truncated_reward: Annotated[float, Meta(ge=-1e6, le=1e6)] | UnsetType = UNSET
    """With "penalise" the reward of a completion that was cut, in place of the reward that it earned. Left out: 0. In
    evaluations completions keep their rewards."""
    shuffle_rewards: bool = False
    """A negative control: rewards are permuted inside each group, so that nothing can be learnt."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """(clip_low, clip_high) as set, else as in the loss's paper."""
        low, high = self._loss_kind.clip_range
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    def ratio_bound(self, *, lags: bool) -> float | None:
        """Returns the most that a policy ratio counts for a negative advantage; None: any. lags: whether older policies
        may have sampled."""
        if self.clip_max is not UNSET:
            return self.clip_max
        has_far_ratios = lags and self.old_policy == "generator"
        is_above_clips = 1.0 + self.clip_range[1] < LAGGING_CLIP_MAX
        if has_far_ratios and self.takes_clip_max and is_above_clips:
            return LAGGING_CLIP_MAX
        return None

    @property
    def takes_clip_max(self) -> bool:
        """True where clip_max can bound the policy ratio: the loss is ours, and has no such bound of its own."""
        return not isinstance(self.loss, PluginLoss) and self._loss_kind.is_unbounded_above

    @property
    def kl_in_loss(self) -> bool:
        """True where the loss has a KL to the reference."""
        return self.kl_coefficient > 0.0 and self.kl_placement == "loss"

    @property
    def weighs_kl(self) -> bool:
        """True where that KL is weighed like the surrogate."""
        return self.kl_in_loss and self.use_bias_correction_kl is not False

    def syncs_reference_after(self, iteration: int) -> bool:
        """Returns True where the reference moves to the policy that the iteration's last step makes."""
        every = self.ref_model_sync_iterations
        return every is not UNSET and (iteration + 1) % every == 0

    @property
    def replays_routes(self) -> bool:
        """True where tokens go through the experts that they went through at the generator."""
        return self.routing_replay is True

    @property
    def reward_of_truncated(self) -> float | None:
        """The reward of a training completion that was cut; None where that is the one that it earned."""
        if self.on_truncated == "penalise":
            return self.truncated_reward or 0.0
        return None

    @property
    def num_mini_batches(self) -> int:
        """Parts of an iteration that are stepped on one after another."""
        return 1 if self.mini_batches is UNSET else self.mini_batches

    @property
    def whitens_advantages(self) -> bool:
        """True where a critic's advantages are normalised over the tokens of their rollout batch."""
        return self.advantage_kind.has_critic and self.whiten_advantages is not False

    @property
    def moves_between_steps(self) -> bool:
        """True where an iteration has several optimizer steps: the second meets a policy that has moved."""
        return self.updates_per_iteration * self.num_mini_batches > 1

    @property
    def correction_name(self) -> CorrectionName:
        """The correction; "none" also where the spec names none."""
        return self.correction or "none"

    @property
    def correction_range(self) -> tuple[float, float]:
        """(low, high) as set, else as in the correction's source; tis and decoupled_ppo have no lower bound."""
        low, high = CORRECTION_RANGES[self.correction_name]
        if self.correction_high is not None:
            high = self.correction_high
        if self.correction_low is not None:
            low = self.correction_low
        elif self.correction == "icepop" and self.correction_level == "geometric":
            # verl's, where its lower threshold is left out: a mean may be as far below 1 as above.
            low = 1.0 / high
        return low, high

    @property
    def learns_given(self) -> bool:
        """True where completions come from the data set, and none is sampled."""
        return self._loss_kind.learns_given

    @property
    def has_token_ratios(self) -> bool:
        """True where each token has a policy ratio of its own."""
        return self._loss_kind.has_token_ratios

    @property
    def credits_turns(self) -> bool:
        """True where each turn of a trajectory has an advantage of its own."""
        return self.credit == "turn"

    @property
    def loss_name(self) -> str:
        """The loss in a message."""
        if isinstance(self.loss, PluginLoss):
            return self.loss.entry_point
        return self.loss

    @property
    def _loss_kind(self) -> LossKind:
        if isinstance(self.loss, PluginLoss):
            return LossKind()
        return LOSS_KINDS[self.loss]

    @property
    def advantage_kind(self) -> AdvantageKind:
        return ADVANTAGE_KINDS[self.advantage]
