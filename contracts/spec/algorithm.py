"""AlgorithmSpec: advantage and loss, and which of their options go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import fields

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
    """Advantage and loss; docs/job.md has the equations."""

    loss: LossName | PluginLoss = "dapo"
    """The objective and its normaliser: response means (grpo, gspo: biased by length), a constant (dr_grpo), the
    iteration's tokens (dapo, cispo; sft, which learns the data set's completions), batches' token means (bnpo). Or a
    table: the loss of an installed package."""
    advantage: AdvantageName = "grpo"
    """What a reward is compared with (docs/job.md): its group (grpo, dr_grpo, rloo, gdpo, lite_ppo,
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
    """Upper clip of the policy ratio: 1 + clip_high; none: 0.2, dapo 0.28, gspo 0.0004, cispo 4.0. Refused where
    clip_low is."""
    clip_max: Annotated[float, Meta(gt=1.0, le=1e6)] | UnsetType = UNSET
    """Dual clip: the most that the policy ratio counts for a negative advantage, above 1 + clip_high; left out: 3.0
    under a lag with old_policy = "generator", as in verl, unless 1 + clip_high is as much, else no bound. Refused where
    clip_high is."""
    kl_coefficient: Factor = 0.0
    """Weight of the KL to the initial model; 0 keeps no reference model."""
    ref_model_sync_iterations: Iterations | UnsetType = UNSET
    """After each so many iterations the model of that KL becomes the policy; left out: it stays the initial one."""
    ref_model_mixup_alpha: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """Share of the policy in it then, beside what it was (TR-DPO, arXiv 2404.09656); left out: 1. Below 1 a bfloat16
    model's average is kept in float32, 4 bytes a parameter more."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that KL from the sampled tokens."""
    use_bias_correction_kl: bool | UnsetType = UNSET
    """Weighs the KL in the loss by policy ratio and correction, like the surrogate, which gives it the gradient of
    KL(policy || reference) under each schedule (docs/job.md); left out: true, as in TRL."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """loss: added to each token's; reward: taken off the reward, before advantages (docs/job.md)."""
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
    on_truncated: Literal["score", "mask", "penalise"] | UnsetType = UNSET
    """What a completion teaches that was cut: what its reward says (score, also where left out), nothing (mask: it
    keeps its place in group and divisor), or what truncated_reward says (penalise)."""
    truncated_reward: Annotated[float, Meta(ge=-1e6, le=1e6)] | UnsetType = UNSET
    """With "penalise" its reward, in place of the one that it earned; left out: 0. Evaluations keep theirs."""
    shuffle_rewards: bool = False
    """Negative control: rewards are permuted inside each group, so that nothing can be learnt."""

    def __post_init__(self) -> None:
        if problem := next(self._refusals(), ""):
            raise ValueError(problem)

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
        return LAGGING_CLIP_MAX if has_far_ratios and self._takes_clip_max and is_above_clips else None

    @property
    def _takes_clip_max(self) -> bool:
        return not isinstance(self.loss, PluginLoss) and self._loss_kind.is_unbounded_above

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL to the reference."""
        return self.kl_coefficient > 0.0 and self.kl_placement == "loss"

    @property
    def weighs_kl(self) -> bool:
        """True where that KL is weighed like the surrogate."""
        return self.kl_in_loss and self.use_bias_correction_kl is not False

    def syncs_reference_after(self, iteration: int) -> bool:
        """Whether the reference moves to the policy that the iteration's last step makes."""
        every = self.ref_model_sync_iterations
        return every is not UNSET and (iteration + 1) % every == 0

    @property
    def reward_of_truncated(self) -> float | None:
        """The reward of a training completion that was cut; None where that is the one that it earned."""
        return (self.truncated_reward or 0.0) if self.on_truncated == "penalise" else None

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
        """Whether an iteration has several optimizer steps, so that the policy leaves the one that its batches met."""
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
        """Whether completions are given by the data set, and not sampled."""
        return self._loss_kind.learns_given

    @property
    def credits_turns(self) -> bool:
        """Whether each turn of a trajectory has an advantage of its own."""
        return self.credit == "turn"

    @property
    def loss_name(self) -> str:
        """The loss in a message."""
        return self.loss.entry_point if isinstance(self.loss, PluginLoss) else self.loss

    @property
    def _loss_kind(self) -> LossKind:
        return LossKind() if isinstance(self.loss, PluginLoss) else LOSS_KINDS[self.loss]

    @property
    def advantage_kind(self) -> AdvantageKind:
        return ADVANTAGE_KINDS[self.advantage]

    def _refusals(self) -> Iterator[str]:
        """Yields field, reason and cure of each combination without a meaning or an effect."""
        if self.learns_given:
            yield from self._given_refusals()
        yield from self._idle_keys()
        yield from self._kl_refusals()
        if self.advantage_kind.is_scaled_late:
            yield from self._scaled_terms()
        if self.on_truncated == "mask" and self.kl_coefficient > 0.0 and self.kl_placement == "reward":
            yield (
                'on_truncated = "mask" leaves kl_placement = "reward" completions without a KL in their reward; '
                'set kl_placement = "loss"'
            )
        if self.on_truncated == "penalise" and self.advantage_kind.normalises_components:
            yield 'on_truncated = "penalise" gives a whole reward, advantage = "gdpo" compares components; set "mask"'
        if self.off_policy_mask_threshold and self.advantage_kind.has_critic:
            yield (
                "off_policy_mask_threshold masks a response by the sign of its advantage, which is each token's own "
                f'with advantage = "{self.advantage}"; leave it out'
            )
        if self.clip_max is not UNSET and self.clip_max <= 1.0 + self.clip_range[1]:
            yield f"clip_max = {self.clip_max:g} is not above 1 + clip_high, which is {1.0 + self.clip_range[1]:g}"
        if isinstance(self.loss, PluginLoss) and (self.advantage_kind.has_critic or self.credits_turns):
            yield (
                f"{'credit' if self.credits_turns else 'advantage'} gives each token an advantage, the loss "
                f"`{self.loss_name}` takes one a response; choose a loss of the family, or leave it out"
            )
        if self.advantage == "none" and self.distillation_coefficient == 0.0 and not self.learns_given:
            yield 'advantage = "none" leaves nothing to learn from; set distillation_coefficient above 0'
        yield from self._correction_refusals()
        if self.credits_turns:
            yield from self._turn_refusals()

    def _idle_keys(self) -> Iterator[str]:
        """Yields each key that is set though what it acts on isn't there."""
        kind, named = self.advantage_kind, f'with advantage = "{self.advantage}"'
        has_kl, learns_rewards = self.kl_coefficient > 0.0, self.advantage != "none"
        several = "set updates_per_iteration or mini_batches above 1"
        of_none, corrects = f"{named}, which learns from no reward", self.correction_name != "none"
        has_low = not corrects or self.correction == "icepop"
        # Keys, whether they act, and why not, with a cure behind a semicolon.
        rows = (
            ("advantage_epsilon", kind.uses_epsilon or self.whitens_advantages, named),
            (
                "gae_lambda discount value_coefficient value_clip whiten_advantages",
                kind.has_critic,
                f'{named}; set "gae"',
            ),
            ("value_clip", self.moves_between_steps, f"with one step, which moves no value before; {several}"),
            ("reward_clip", learns_rewards and not self.credits_turns, 'with advantage = "none", and none on turns'),
            ("on_truncated", learns_rewards or self.on_truncated != "penalise", of_none),
            ("clip_low clip_high clip_max off_policy_mask_threshold", learns_rewards, of_none),
            ("shuffle_rewards kl_placement", learns_rewards, of_none),
            ("clip_max", self._takes_clip_max, f'with loss = "{self.loss_name}", which has bounds of its own'),
            ("kl_estimator kl_placement", has_kl, "with kl_coefficient = 0; set it above 0"),
            ("ref_model_sync_iterations", has_kl, "with kl_coefficient = 0, without a reference"),
            ("ref_model_mixup_alpha", self.ref_model_sync_iterations, "without ref_model_sync_iterations; set that"),
            ("truncated_reward", self.on_truncated == "penalise", 'without on_truncated = "penalise"; set that'),
            ("correction_level correction_low correction_high", corrects, "without a correction; choose one"),
            ("correction_low", has_low, f'with correction = "{self.correction}", which has no lower bound'),
            ("distillation_beta", self.distillation_coefficient, "with distillation_coefficient = 0; set that"),
        )
        defaults = {one.name: one.default for one in fields(self)}
        for keys, acts, why in rows:
            for key in keys.split() if not acts else ():
                if getattr(self, key) not in (defaults[key], "none"):
                    yield f"{key} has no effect {why}{', or' if ';' in why else ';'} leave it out"

    def _scaled_terms(self) -> Iterator[str]:
        """Yields what is added to a surrogate that the deviation of the iteration's advantages divides in the end."""
        by = f'would be divided by the deviation of the advantages under advantage = "{self.advantage}"'
        if self.entropy_coefficient > 0.0:
            yield f"entropy_coefficient {by}; set it to 0"
        if self.kl_in_loss:
            yield f'kl_placement = "loss" {by}; set kl_placement = "reward"'
        if self.distillation_coefficient > 0.0:
            yield f'distillation_coefficient {by}; choose another advantage, or "none"'

    def _kl_refusals(self) -> Iterator[str]:
        if self.use_bias_correction_kl and not self.kl_in_loss:
            yield "use_bias_correction_kl weighs the KL in the loss, of which there is none; leave it out"

    def _given_refusals(self) -> Iterator[str]:
        """Yields what is about rewards, or about the policy that sampled: completions that are given have neither."""
        acting = ("loss", "advantage", "updates_per_iteration", "mini_batches", "entropy_coefficient")
        if self.advantage != "none":
            yield 'loss = "sft" learns what the data set gives, whatever its reward; set advantage = "none"'
        for one in fields(self):
            if one.name not in acting and getattr(self, one.name) != one.default:
                yield f'{one.name} has no effect with loss = "sft", which learns what the data set gives; leave it out'

    def _turn_refusals(self) -> Iterator[str]:
        if not self.advantage_kind.compares_groups or self.advantage_kind.is_scaled_late:
            yield (
                f'credit = "turn" compares the turns of a group, which advantage = "{self.advantage}" does not; '
                'choose "grpo", "dr_grpo" or "rloo", or credit = "trajectory"'
            )
        if self.kl_coefficient > 0.0 and self.kl_placement == "reward":
            yield (
                'kl_placement = "reward" takes the KL of a whole response off its reward, which is no turn\'s with '
                'credit = "turn"; set kl_placement = "loss"'
            )
        if self.shuffle_rewards:
            yield (
                'shuffle_rewards permutes the rewards of whole completions, with credit = "turn" those of turns would '
                'still teach; set credit = "trajectory"'
            )

    def _correction_refusals(self) -> Iterator[str]:
        low, high = self.correction_range
        if self.correction_name != "none" and self.old_policy == "generator":
            yield 'correction would count the generator twice with old_policy = "generator"; set one of the two'
        if self.correction_name != "none" and not self._loss_kind.has_token_ratios and self.correction_level == "token":
            yield (
                f'correction_level = "token" would undo the one ratio of loss = "{self.loss_name}"; '
                'set correction_level = "sequence"'
            )
        if self.correction == "icepop" and low == high and self.correction_low is not None:
            yield "correction_low and correction_high leave no room; lower correction_low or raise correction_high"
