"""The weighted sum of a rubric's scorers over one item, and which of them need a process of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from contracts import rewards
from contracts.rewards import Outcome, PluginReward, Result, RewardComponent, RewardItem, Scored, Unscorable
from onbeat.base.cage.fault_text import MAX_CHARS, fault_text
from onbeat.base.process.entry_points import UnknownEntryPoint, find_entry_point
from onbeat.scoring.patterns import BadPattern
from reward_service.scorers import plugin, texts
from reward_service.scorers.texts import BadReference, TooComplex


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """One kind of reward component."""

    score: Callable[[Any, RewardItem], float]
    warm_up: Callable[[Any], object] | None = None
    """Does the slow imports of `score`."""
    rehearsals: tuple[RewardItem, ...] = ()
    """Items of our own, scored once after `warm_up`: what is loaded at the first use is loaded by then."""
    is_linear: bool = False
    """Linear in the completion's length and free of foreign code: safe without a deadline, in the service's process."""


SCORERS: dict[type[rewards.Component], Scorer] = {
    rewards.ExactReward: Scorer(score=texts.exact, is_linear=True),
    rewards.NumericReward: Scorer(score=texts.numeric, is_linear=True),
    rewards.RegexReward: Scorer(score=texts.regex),
    rewards.FormatReward: Scorer(score=texts.whole_format),
    rewards.LengthReward: Scorer(score=texts.length, is_linear=True),
    rewards.OverlongReward: Scorer(score=texts.overlong, is_linear=True),
    PluginReward: Scorer(score=plugin.score, warm_up=plugin.load),
}
"""A new kind of component is its function beside this file, its record in contracts/rewards.py, and a line here."""

GROUP = "onbeat.scorers"
"""Entry points of the kinds that aren't in SCORERS, by their names in specs: modules with `score` and `warm_up`, and
REHEARSALS where there are any."""

MAX_DETAIL_CHARS = MAX_CHARS
MAX_SCORE = 1e12
"""The most that a score or a reward may be, on either side of 0: sums and squares of a batch of them are finite."""

MAX_PATTERNS_S = 10.0
"""The most that the patterns of a rubric may take for one completion, whatever `item_timeout_s` says."""

NOTHING: Mapping[str, Outcome] = {}
NEVER_SCORED = frozenset({"bad_reference", "unknown_entry_point", "bad_pattern"})
"""Not the completion's fault: no score may hide it."""


def score_in_place(component: RewardComponent, reason: rewards.UnscorableReason, *, settles: bool) -> float | None:
    """The `on_unscorable` score, where it may stand for that reason now."""
    # Whether the same completion meets it each time: a plug-in may have asked the network, or the clock.
    is_lasting = reason not in rewards.UP_TO_LUCK and not isinstance(component, PluginReward)
    if reason in NEVER_SCORED or not (settles or is_lasting):
        return None
    return component.stated_score


def scorer_of(component: RewardComponent) -> Scorer:
    """Finds what scores the component. Raises UnknownEntryPoint where it is an extra that isn't installed."""
    return SCORERS.get(type(component)) or _offered(component.name)


@functools.cache
def _offered(name: str) -> Scorer:
    module = find_entry_point(GROUP, name, field="type", where="reward service").load()
    return Scorer(score=module.score, warm_up=module.warm_up, rehearsals=getattr(module, "REHEARSALS", ()))


def is_linear(component: RewardComponent) -> bool:
    scorer = SCORERS.get(type(component))
    return scorer is not None and scorer.is_linear


def needs_isolation(components: tuple[RewardComponent, ...]) -> bool:
    """True if any component may run away, crash, or run foreign code."""
    return not all(map(is_linear, components))


def deadline_s(components: tuple[RewardComponent, ...], item_timeout_s: float) -> float:
    """The deadline of one item: that of the request, but where nothing but patterns can take long."""
    isolated = [component for component in components if not is_linear(component)]
    has_patterns_alone = all(isinstance(one, rewards.RegexReward | rewards.FormatReward) for one in isolated)
    return min(item_timeout_s, MAX_PATTERNS_S) if has_patterns_alone else item_timeout_s


def only_isolated_name(components: tuple[RewardComponent, ...]) -> str:
    """Breakdown name of the component that a lost process was busy with; "" where it may have been one of several."""
    names = [name for name, component in rewards.named(components) if not is_linear(component)]
    return names[0] if len(names) == 1 else ""


def warm_up_keys(components: tuple[RewardComponent, ...]) -> frozenset[str]:
    """What a process must have imported for a rubric, plug-ins apart: few values, so that they can be remembered."""
    known = [(component, SCORERS.get(type(component))) for component in without_plugins(components)]
    return frozenset(component.name for component, scorer in known if scorer is None or scorer.warm_up)


def without_plugins(components: tuple[RewardComponent, ...]) -> tuple[RewardComponent, ...]:
    return tuple(component for component in components if not isinstance(component, PluginReward))


def warm_up(components: tuple[RewardComponent, ...]) -> Unscorable | None:
    """Does the slow imports of a rubric once; the reason why no item can be scored, or None."""
    for name, component in rewards.named(components):
        try:
            scorer = scorer_of(component)
            if scorer.warm_up is not None:
                scorer.warm_up(component)
            for item in scorer.rehearsals:
                scorer.score(component, item)
        except Exception as error:
            return _unscorable(name, error)
    return None


def score_item(
    components: tuple[RewardComponent, ...], item: RewardItem, given: Mapping[str, Outcome] = NOTHING
) -> Result:
    """Adds up weight x score, with the unweighted scores beside it; the first component that fails decides (I6).

    given: the outcomes of those that see whole groups, by breakdown name.
    """
    scoring = scoring_of(components, item)
    outcomes: list[Outcome] = []
    for name, component in scoring:
        outcome = given[name] if name in given else score_component(name, component, item)
        outcomes.append(outcome)
        if isinstance(outcome, Unscorable) and score_in_place(component, outcome.reason, settles=False) is None:
            return outcome
    return weighted_sum(scoring, outcomes, settles=False)


def scoring_of(components: tuple[RewardComponent, ...], item: RewardItem) -> list[tuple[str, RewardComponent]]:
    """The components that score an item, with their names in the breakdown."""
    return [(name, component) for name, component in rewards.named(components) if component.scores(item.source)]


def weighted_sum(
    scoring: Sequence[tuple[str, RewardComponent]], outcomes: Sequence[Outcome], *, settles: bool
) -> Result:
    """Sums each component's score, or what stands in its place; the first that nothing may stand for decides."""
    breakdown: dict[str, float] = {}
    replaced: dict[str, rewards.UnscorableReason] = {}
    reward = 0.0
    for (name, component), outcome in zip(scoring, outcomes, strict=True):
        value = outcome
        if isinstance(outcome, Unscorable):
            value = score_in_place(component, outcome.reason, settles=settles)
            if value is None:
                return outcome
            replaced[name] = outcome.reason
        assert isinstance(value, float)
        breakdown[name] = value
        reward += component.weight * value
    if not is_score(reward):
        return Unscorable(reason="not_finite", detail=f"the weighted sum is {reward}")
    return Scored(reward=reward, breakdown=breakdown, unscorable=replaced)


def score_component(name: str, component: RewardComponent, item: RewardItem) -> Outcome:
    """The unweighted score."""
    try:
        value = float(scorer_of(component).score(component, item))
    except Exception as error:
        return _unscorable(name, error)
    return outcome_of(name, value)


def names_that_see_groups(components: tuple[RewardComponent, ...]) -> tuple[str, ...]:
    """Breakdown names of the plug-ins that are called for whole groups; they are imported already."""
    plugins = [(name, one) for name, one in rewards.named(components) if isinstance(one, PluginReward)]
    return tuple(name for name, one in plugins if plugin.load(one).sees_groups)


def score_groups(component: Any, items: Sequence[RewardItem], group_size: int) -> list[float] | Unscorable:
    """The unweighted scores of the items of whole groups, or why there are none; `outcome_of` judges each."""
    try:
        return plugin.score_groups(component, items, group_size)
    except Exception as error:
        return _unscorable(component.name, error)


def outcome_of(name: str, said: Outcome) -> Outcome:
    """A score unless it is none, or why there is none, under the component's name in the breakdown."""
    if isinstance(said, Unscorable):
        return replace(said, component=name)
    if is_score(said):
        return said
    return Unscorable(reason="not_finite", detail=f"the score is {said}", component=name)


def is_score(value: float) -> bool:
    """Whether it is neither NaN nor so large that a trainer's sums overflow."""
    return abs(value) <= MAX_SCORE


def _unscorable(component: str, error: Exception) -> Unscorable:
    """Answers any exception of foreign code: the item is an error with a reason, never a number."""
    reason: rewards.UnscorableReason = "raised"
    detail = fault_text(error)
    if isinstance(error, BadReference):
        reason, detail = "bad_reference", str(error)
    elif isinstance(error, TooComplex):
        reason, detail = "too_complex", str(error)
    elif isinstance(error, BadPattern):
        reason, detail = "bad_pattern", str(error)
    elif isinstance(error, UnknownEntryPoint):
        reason, detail = "unknown_entry_point", str(error)
    elif isinstance(error, MemoryError):
        reason, detail = "crashed", "out of memory; the reward service's ONBEAT_SCORER_MEMORY_MB bounds it"
    encodable = detail.encode("utf-8", "backslashreplace").decode("utf-8")
    return Unscorable(reason=reason, detail=encodable[:MAX_DETAIL_CHARS], component=component)
