"""AlgorithmSpec: advantage and loss, and which of their options go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import fields

from contracts.encoding.wire import Factor, Iterations, Line, Record
from contracts.spec_tables.kinds import (
    ADVANTAGE_KINDS,
    CORRECTION_RANGES,
    LOSS_KINDS,
    AdvantageKind,
    AdvantageName,
    CorrectionName,
    LossKind,
    LossName,
)


class PluginLoss(Record, tag_field="type", tag="plugin", frozen=True, kw_only=True):
    """A user's loss, found by its name among the entry points of group `onbeat.losses` where the trainer runs.

    docs/extend.md says what it is given and what it must keep.
    """

    entry_point: Line
    """Name of the `PolicyLoss` in group `onbeat.losses`."""


class AlgorithmSpec(Record, frozen=True, kw_only=True):
    """Advantage and loss; docs/job.md has the equations."""

    loss: LossName | PluginLoss = "grpo"
    """The objective and its normaliser: response means (grpo, gspo: biased by length), a constant (dr_grpo), the
    iteration's tokens (dapo, cispo; sft, which learns the data set's completions), batches' token means (bnpo). Or a
    table: the loss of an installed package."""
    advantage: AdvantageName = "grpo"
    """What a reward is compared with (docs/job.md): its group (grpo, dr_grpo, rloo, gdpo, lite_ppo,
    reinforce++_baseline), the iteration (reinforce++), at each token a critic (gae, PPO's), nothing (none: a teacher or
    the data teach)."""
    gae_lambda: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET
    """GAE's lambda; left out: 0.95."""
    discount: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """GAE's gamma, a token; left out: 1."""
    value_coefficient: Annotated[float, Meta(gt=0.0, le=1e3)] | UnsetType = UNSET
    """Weight of the critic's loss; left out: 0.1."""
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
    """Equal parts of an iteration's batches, by their numbers, with an optimizer step each; left out: 1. Advantages and
    the old policy are from before the first step. Divides rollout.batches_per_iteration."""
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
    """Dual clip: the most that the policy ratio counts for a negative advantage, above 1 + clip_high; left out: no
    bound. Refused where clip_high is."""
    kl_coefficient: Factor = 0.0
    """Weight of the KL to the initial model; 0 keeps no reference model."""
    ref_model_sync_iterations: Iterations | UnsetType = UNSET
    """After each so many iterations the model of that KL becomes the policy; left out: it stays the initial one."""
    ref_model_mixup_alpha: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """Share of the policy in it then, beside what it was (TR-DPO, arXiv 2404.09656); left out: 1."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that KL from the sampled tokens."""
    use_bias_correction_kl: bool | UnsetType = UNSET
    """Weighs the KL in the loss by the policy ratio and the correction, as the surrogate is (docs/job.md); left out:
    false."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """loss: added to each token's; reward: taken off the reward, before advantages (docs/job.md)."""
    entropy_coefficient: Factor = 0.0
    """Weight of the entropy bonus: the entropy of the distribution at each sampled token, normalised like the loss."""
    distillation_coefficient: Factor = 0.0
    """Weight of the reverse KL to a teacher, whose log-probs of the sampled tokens a stage of type "teacher" makes, or
    another with the column `teacher_logprobs`."""
    correction: CorrectionName | None = None
    """Weighs surrogate and KL to a teacher by the probability before the iteration's first step over that of sampling:
    truncated (tis), dropped out of range (icepop) or above a cap (decoupled_ppo, which needs a lag). Under a lag none
    has to be named."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Whether each token has its weight, or a response one: the product over its tokens, or their geometric mean."""
    correction_low: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Lower bound of icepop's weight; none: 0.5."""
    correction_high: Annotated[float, Meta(ge=1.0, le=1e6)] | None = None
    """Upper bound of the weight; none: tis 2.0, icepop 5.0, decoupled_ppo 5.0."""
    off_policy_mask_threshold: Annotated[float, Meta(gt=0.0, le=1e3)] | UnsetType = UNSET
    """A response of negative advantage whose mean log(mu / pi) a token is above this has no surrogate: the policy has
    left it. Left out: none is masked."""
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

    @property
    def weighs_kl(self) -> bool:
        """Whether the KL in the loss is weighed like the surrogate."""
        return self.use_bias_correction_kl is True

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
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def needs_every_row(self) -> bool:
        """Whether a completion of zero advantage has a gradient all the same, or gets its advantage after its pass."""
        terms = (self.kl_coefficient, self.entropy_coefficient, self.distillation_coefficient)
        kind = self.advantage_kind
        return max(terms) > 0.0 or kind.has_late_baseline or kind.has_critic or self.learns_given

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
        if not self.advantage_kind.uses_epsilon and self.advantage_epsilon != 1e-4:
            yield f'advantage_epsilon has no effect with advantage = "{self.advantage}"; leave it out'
        yield from self._kl_refusals()
        if self.entropy_coefficient > 0.0 and self.advantage_kind.is_scaled_late:
            yield (
                "entropy_coefficient would be divided by the deviation of the advantages under "
                f'advantage = "{self.advantage}"; set it to 0'
            )
        if self.advantage_kind.has_late_baseline and self.moves_between_steps:
            field = "updates_per_iteration" if self.updates_per_iteration > 1 else "mini_batches"
            yield (
                f"{field} above 1 makes clips act by the sign of the advantage, which under advantage = "
                '"reinforce++" is known too late; set it to 1, or advantage = "reinforce++_baseline"'
            )
        if self.advantage_kind.has_late_baseline and self.old_policy == "generator" and self._loss_kind.clips_by_sign:
            yield (
                f'old_policy = "generator" lets loss = "{self.loss_name}" clip by the sign of the advantage, which '
                'under advantage = "reinforce++" is known too late; set loss = "cispo", or old_policy = "trainer"'
            )
        if self.on_truncated == "mask" and self.kl_coefficient > 0.0 and self.kl_placement == "reward":
            yield (
                'on_truncated = "mask" leaves kl_placement = "reward" completions without a KL in their reward; '
                'set kl_placement = "loss"'
            )
        if self.truncated_reward is not UNSET and self.on_truncated != "penalise":
            yield 'truncated_reward has no effect without on_truncated = "penalise"; set that, or leave it out'
        if self.on_truncated == "penalise" and self.advantage == "none":
            yield 'on_truncated = "penalise" has no effect with advantage = "none", which learns from no reward'
        if self.on_truncated == "penalise" and self.advantage_kind.normalises_components:
            yield 'on_truncated = "penalise" gives a whole reward, advantage = "gdpo" compares components; set "mask"'
        if self.reward_clip is not UNSET and (self.credits_turns or self.advantage == "none"):
            yield 'reward_clip has no effect with advantage = "none", and none on turns; leave it out'
        if self.off_policy_mask_threshold is not UNSET and self.advantage_kind.has_late_baseline:
            yield (
                'off_policy_mask_threshold masks by the sign of the advantage, which under advantage = "reinforce++" '
                'is known too late; leave it out, or set advantage = "reinforce++_baseline"'
            )
        yield from self._clip_refusals()
        yield from self._critic_refusals()
        yield from self._teacher_refusals()
        yield from self._correction_refusals()
        if self.credits_turns:
            yield from self._turn_refusals()

    def _kl_refusals(self) -> Iterator[str]:
        kl_in_loss = self.kl_coefficient > 0.0 and self.kl_placement == "loss"
        if self.kl_coefficient == 0.0 and (self.kl_estimator, self.kl_placement) != ("k3", "loss"):
            yield (
                "kl_coefficient is 0, so kl_estimator and kl_placement have no effect; set it above 0 or leave them out"
            )
        if self.ref_model_sync_iterations is not UNSET and self.kl_coefficient == 0.0:
            yield "ref_model_sync_iterations has no effect with kl_coefficient = 0, without a reference; leave it out"
        if self.ref_model_mixup_alpha is not UNSET and self.ref_model_sync_iterations is UNSET:
            yield "ref_model_mixup_alpha has no effect without ref_model_sync_iterations; set that, or leave it out"
        if kl_in_loss and self.kl_estimator == "k1" and not self.weighs_kl:
            yield (
                'kl_estimator = "k1" in the loss has a gradient of expectation zero; '
                'use "k2" there, or kl_placement = "reward"'
            )
        if self.weighs_kl and not kl_in_loss:
            yield "use_bias_correction_kl weighs the KL in the loss, of which there is none; leave it out"
        if self.weighs_kl and self.kl_estimator == "k2":
            yield (
                'kl_estimator = "k2" is a biased estimate, which no weight makes right; '
                'with use_bias_correction_kl use "k3" or "k1"'
            )
        if kl_in_loss and self.advantage_kind.is_scaled_late:
            yield (
                'kl_placement = "loss" would be divided by the deviation of the advantages under '
                f'advantage = "{self.advantage}"; set kl_placement = "reward"'
            )

    def _given_refusals(self) -> Iterator[str]:
        """Yields what is about rewards, or about the policy that sampled: completions that are given have neither."""
        acting = ("loss", "advantage", "updates_per_iteration", "mini_batches", "entropy_coefficient")
        if self.advantage != "none":
            yield 'loss = "sft" learns what the data set gives, whatever its reward; set advantage = "none"'
        for one in fields(self):
            if one.name not in acting and getattr(self, one.name) != one.default:
                yield f'{one.name} has no effect with loss = "sft", which learns what the data set gives; leave it out'

    def _clip_refusals(self) -> Iterator[str]:
        if self.clip_max is UNSET:
            return
        if isinstance(self.loss, PluginLoss) or not self._loss_kind.is_unbounded_above:
            yield f'clip_max has no effect with loss = "{self.loss_name}", which has bounds of its own; leave it out'
        if self.clip_max <= 1.0 + self.clip_range[1]:
            yield f"clip_max = {self.clip_max:g} is not above 1 + clip_high, which is {1.0 + self.clip_range[1]:g}"

    def _critic_refusals(self) -> Iterator[str]:
        if not self.advantage_kind.has_critic:
            for name in ("gae_lambda", "discount", "value_coefficient", "value_clip"):
                if getattr(self, name) is not UNSET:
                    yield f'{name} has no effect with advantage = "{self.advantage}"; set "gae", or leave it out'
            return
        if isinstance(self.loss, PluginLoss):
            yield (
                f'advantage = "gae" gives each token an advantage, the loss `{self.loss_name}` takes one a response; '
                "choose a loss of the family"
            )
        if self.value_clip is not UNSET and not self.moves_between_steps:
            yield (
                "value_clip has no effect with one step an iteration, before which no value moves; leave it out, or "
                "set updates_per_iteration or mini_batches above 1"
            )

    def _teacher_refusals(self) -> Iterator[str]:
        if self.distillation_coefficient > 0.0 and self.advantage_kind.is_scaled_late:
            yield (
                "distillation_coefficient would be divided by the deviation of the advantages under "
                f'advantage = "{self.advantage}"; choose another advantage, or "none"'
            )
        if self.advantage != "none":
            return
        if self.distillation_coefficient == 0.0 and not self.learns_given:
            yield 'advantage = "none" leaves nothing to learn from; set distillation_coefficient above 0'
        if (self.clip_low, self.clip_high, self.clip_max, self.off_policy_mask_threshold) != (None, None, UNSET, UNSET):
            yield (
                'clip_low, clip_high, clip_max and off_policy_mask_threshold have no effect with advantage = "none": '
                "they bound what rewards do; leave them out"
            )
        if self.shuffle_rewards:
            yield 'shuffle_rewards has no effect with advantage = "none", which learns from no reward; leave it out'
        if self.kl_coefficient > 0.0 and self.kl_placement == "reward":
            yield 'kl_placement = "reward" has no effect with advantage = "none"; set kl_placement = "loss"'

    def _turn_refusals(self) -> Iterator[str]:
        if not self.advantage_kind.compares_groups or self.advantage_kind.is_scaled_late:
            yield (
                f'credit = "turn" compares the turns of a group, which advantage = "{self.advantage}" does not; '
                'choose "grpo", "dr_grpo" or "rloo", or credit = "trajectory"'
            )
        if isinstance(self.loss, PluginLoss):
            yield (
                f'credit = "turn" gives each token an advantage, the loss `{self.loss_name}` takes one a response; '
                'set credit = "trajectory", or choose a loss of the family'
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
        bounds = (self.correction_low, self.correction_high)
        low, high = self.correction_range
        if self.correction_name == "none" and (self.correction_level != "token" or bounds != (None, None)):
            yield (
                'correction is "none", so its level and bounds have no effect; choose "tis", "icepop" or '
                '"decoupled_ppo", or leave them out'
            )
        if self.correction in ("tis", "decoupled_ppo") and self.correction_low is not None:
            yield (
                f'correction_low has no effect with correction = "{self.correction}", which has no lower bound; '
                "leave it out"
            )
        if self.correction_name != "none" and self.old_policy == "generator":
            yield 'correction would count the generator twice with old_policy = "generator"; set one of the two'
        if self.correction_name != "none" and not self._loss_kind.has_token_ratios and self.correction_level == "token":
            yield (
                f'correction_level = "token" would undo the one ratio of loss = "{self.loss_name}"; '
                'set correction_level = "sequence"'
            )
        if self.correction == "icepop" and low == high:
            yield "correction_low and correction_high leave no room; lower correction_low or raise correction_high"
