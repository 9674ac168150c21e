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
    """The objective and its normaliser: response means (grpo, gspo: biased by length), a constant (dr_grpo), the
    iteration's tokens (dapo, cispo; sft, which learns the data set's completions), batches' token means (bnpo). Or a
    table: the loss of an installed package."""
    advantage: AdvantageName = "grpo"
    """What a reward is compared with (docs/losses.md): its group (grpo, dr_grpo, rloo, gdpo, lite_ppo,
    reinforce++_baseline), at each token a critic (gae, PPO's), nothing (none: a teacher or the data teach)."""
    gae_lambda: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET
    """GAE's lambda; left out: 1."""
    discount: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """GAE's gamma, a token; left out: 1."""
    value_coefficient: Annotated[float, Meta(gt=0.0, le=1e3)] | UnsetType = UNSET
    """Weight of the critic's loss; left out: 0.1. Its learning rate: optimizer.critic_learning_rate_factor."""
    whiten_advantages: bool | UnsetType = UNSET
    """Takes the mean of their rollout batch off GAE's advantages, and divides by its deviation; left out: true."""
    value_clip: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    """How far a value may move in an iteration's later steps until it has no gradient; left out: any. Refused with one
    step."""
    reward_clip: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    """The most that a reward, or with gdpo a component's score, counts, either way; left out: no bound."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """With an environment: one advantage for a trajectory, from its whole reward, or one for each turn, from its
    rewards since, against the same turn of the group's others."""
    advantage_epsilon: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1e-4
    """Added to each unbiased standard deviation that an advantage divides by."""
    updates_per_iteration: Annotated[int, Meta(ge=1, le=64)] = 1
    """Passes over the same rollouts (GRPO's μ), an optimizer step each, or one for each of its mini-batches."""
    mini_batches: Annotated[int, Meta(ge=1, le=64)] | UnsetType = UNSET
    """Equal parts of an iteration's batches, by their numbers, with an optimizer step each; left out: 1."""
    old_policy: Literal["trainer", "generator"] = "trainer"
    """Whose log-probs the policy ratio is taken against: the trainer's before the iteration's first step, where no clip
    acts, or the generator's."""
    clip_low: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Lower clip of the policy ratio: 1 - clip_low; none: 0.2, gspo 0.0003, cispo 1.0 (no bound). Refused where it
    can't act: with old_policy = "trainer" and one update an iteration the ratio is exactly 1."""
    clip_high: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    """Upper clip of the policy ratio: 1 + clip_high; none: 0.2, dapo 0.28, gspo 0.0004, cispo 4.0. Only with
    several updates an iteration, or old_policy = "generator": otherwise no clip acts."""
    clip_max: Annotated[float, Meta(gt=1.0, le=1e6)] | UnsetType = UNSET
    """Dual clip: the most that the policy ratio counts for a negative advantage, above 1 + clip_high; left out: 3.0
    under a lag with old_policy = "generator", as in verl, unless 1 + clip_high is as much, else no bound. Only with
    several updates an iteration, or old_policy = "generator"."""
    kl_coefficient: Factor = 0.0
    """Weight of the KL to the initial model; 0 keeps no reference model."""
    ref_model_sync_iterations: Iterations | UnsetType = UNSET
    """After each so many iterations the model of that KL becomes the policy; left out: it stays the initial one."""
    ref_model_mixup_alpha: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """Share of the policy in it then, next to what it was (TR-DPO, arXiv 2404.09656); left out: 1. Below 1 a bfloat16
    model's average is kept in float32, 4 bytes a parameter more."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that KL from the sampled tokens."""
    use_bias_correction_kl: bool | UnsetType = UNSET
    """Weighs the KL in the loss by policy ratio and correction, like the surrogate, which gives it the gradient of
    KL(policy || reference) under each schedule (docs/kl.md); left out: true, as in TRL."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """loss: added to each token's; reward: taken off the reward, before advantages (docs/kl.md)."""
    entropy_coefficient: Factor = 0.0
    """Weight of the entropy bonus: the entropy of the distribution at each sampled token, normalised like the loss."""
    distillation_coefficient: Factor = 0.0
    """Weight of the divergence from a teacher, whose log-probs a stage of type "teacher" makes, or another with the
    column `teacher_logprobs`."""
    distillation_beta: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET
    """Takes it of whole distributions (GKD): forward KL (0), reverse KL (1), Jensen-Shannon between. Left out: reverse
    KL, by the sampled token."""
    correction: CorrectionName | None = None
    """Weighs stale samples: truncated (tis), dropped out of range (icepop) or above a cap (decoupled_ppo, which needs a
    lag). Under a lag "none" has to be named, too."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Whether each token has its weight, or a response one, the product over its tokens. geometric weighs nothing: with
    icepop it leaves out the responses whose geometric mean is beyond the bounds, as verl's rejection does."""
    correction_low: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Lower bound of icepop's weight; none: 0.5, with geometric 1 / correction_high."""
    correction_high: Annotated[float, Meta(ge=1.0, le=1e6)] | None = None
    """Upper bound of the weight; none: tis 2.0, icepop 5.0, decoupled_ppo 5.0. With geometric it is set near 1."""
    off_policy_mask_threshold: Annotated[float, Meta(gt=0.0, le=1e3)] | UnsetType = UNSET
    """A response of negative advantage whose mean log(mu / pi) a token is above this has no surrogate: the policy has
    left it."""
    routing_replay: bool | UnsetType = UNSET
    """With a mixture of experts: each token goes through the experts, at the trainer, that it went through at the
    generator (R3, arXiv 2510.11370), with the weights that the trainer's router gives them; left out: false. Batches
    are larger by a byte for each token, layer and expert. Needs a generator with transformers."""
    on_truncated: Literal["score", "mask", "penalise"] | UnsetType = UNSET
    """What a completion teaches that was cut: what its reward says (score, also where left out), nothing (mask: it
    keeps its place in group and divisor), or what truncated_reward says (penalise)."""
    truncated_reward: Annotated[float, Meta(ge=-1e6, le=1e6)] | UnsetType = UNSET
    """With "penalise" its reward, in place of the one that it earned; left out: 0. Evaluations keep theirs."""
    shuffle_rewards: bool = False
    """Negative control: rewards are permuted inside each group, so that nothing can be learnt."""

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
