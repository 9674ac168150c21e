"""The weighted sum of a rubric's scorers over one item, and which of them need a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from msgspec.structs import replace

from contracts import rewards
from contracts.errors import InvalidInput
from contracts.rewards import Outcome, PluginReward, Result, RewardComponent, RewardItem, Scored, Unscorable
from onbeat.base.cage.fault_text import MAX_CHARS, fault_text
from onbeat.base.process.entry_points import UnknownEntryPoint
from onbeat.scoring.patterns import BadPattern
from reward_service.scorers import math_verify, plugin, texts
from reward_service.scorers.reasoning_gym import scorer as reasoning_gym
from reward_service.scorers.texts import BadReference, TooComplex


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A kind of reward component."""

    score: Callable[[Any, RewardItem], float]
    warm_up: Callable[[Any], object] | None = None
    """Does the slow imports of `score`."""
    rehearsals: tuple[RewardItem, ...] = ()
    """Items of our own, scored once after `warm_up`: what is loaded at the first use is loaded by then."""
    is_linear: bool = False
    """Linear in the completion's length and free of foreign code: safe without a deadline, in the service's process."""
    package: str = ""
    """The package that `score` and `warm_up` import when they are first called; "" where they need none."""


class MissingPackage(InvalidInput):
    """The package of a scorer isn't installed where the reward service runs."""


SCORERS: dict[type[rewards.Component], Scorer] = {
    rewards.ExactReward: Scorer(score=texts.exact, is_linear=True),
    rewards.NumericReward: Scorer(score=texts.numeric, is_linear=True),
    rewards.RegexReward: Scorer(score=texts.regex),
    rewards.FormatReward: Scorer(score=texts.whole_format),
    rewards.LengthReward: Scorer(score=texts.length, is_linear=True),
    rewards.OverlongReward: Scorer(score=texts.overlong, is_linear=True),
    rewards.MathVerifyReward: Scorer(
        score=math_verify.score,
        warm_up=math_verify.warm_up,
        rehearsals=math_verify.REHEARSALS,
        package="math_verify",
    ),
    rewards.ReasoningGymReward: Scorer(
        score=reasoning_gym.score, warm_up=reasoning_gym.warm_up, package="reasoning_gym"
    ),
    PluginReward: Scorer(score=plugin.score, warm_up=plugin.load),
}
"""A new kind of component is a function in a file of this room, a record in contracts/rewards.py, and a row here."""

MAX_DETAIL_CHARS = MAX_CHARS
MAX_SCORE = 1e12
"""The most that a score or a reward may be, on either side of 0: sums and squares of a batch of them are finite."""

MAX_PATTERNS_S = 10.0
"""The most that the patterns of a rubric may take for one completion, whatever `item_timeout_s` says."""

NOTHING: Mapping[str, Outcome] = {}
NEVER_SCORED = frozenset({"bad_reference", "unknown_entry_point", "bad_pattern"})
"""Not the completion's fault: no score may hide it."""


def score_in_place(component: RewardComponent, reason: rewards.UnscorableReason, *, settles: bool) -> float | None:
    """Returns the `on_unscorable` score, where it may stand for that reason now."""
    # Whether the same completion meets it each time: a plug-in may have asked the network, or the clock.
    is_lasting = reason not in rewards.UP_TO_LUCK and not isinstance(component, PluginReward)
    if reason in NEVER_SCORED or not (settles or is_lasting):
        return None
    return component.stated_score


def types_without_package() -> tuple[str, ...]:
    """Returns the types of rewards whose package isn't installed here; it imports none of them."""
    return tuple(
        str(kind.__struct_config__.tag)
        for kind, scorer in SCORERS.items()
        if scorer.package and find_spec(scorer.package) is None
    )


def scorer_of(component: RewardComponent) -> Scorer:
    """Returns the scorer of the component. Raises MissingPackage where its package isn't installed."""
    scorer = SCORERS[type(component)]
    if scorer.package and find_spec(scorer.package) is None:
        raise MissingPackage(
            f"`{component.name}` needs the package {scorer.package}, which the reward service's host doesn't have",
            field="type",
            cure=f"pip install {scorer.package.replace('_', '-')} there",
        )
    return scorer


def is_linear(component: RewardComponent) -> bool:
    return SCORERS[type(component)].is_linear


def needs_isolation(components: tuple[RewardComponent, ...]) -> bool:
    """Returns True if any component may run away, crash, or run foreign code."""
    return not all(map(is_linear, components))


def deadline_s(components: tuple[RewardComponent, ...], item_timeout_s: float) -> float:
    """Returns the deadline of one item: that of the request, but where nothing but patterns can take long."""
    isolated = [component for component in components if not is_linear(component)]
    has_patterns_alone = all(
        isinstance(component, rewards.RegexReward | rewards.FormatReward) for component in isolated
    )
    if has_patterns_alone:
        return min(item_timeout_s, MAX_PATTERNS_S)
    return item_timeout_s


def only_isolated_name(components: tuple[RewardComponent, ...]) -> str:
    """Breakdown name of the component that a lost process was busy with; "" where it may have been one of several."""
    names = [name for name, component in rewards.named(components) if not is_linear(component)]
    return names[0] if len(names) == 1 else ""


def warm_up_keys(components: tuple[RewardComponent, ...]) -> frozenset[str]:
    """Names the components whose imports a process must have done for a rubric, without the plug-ins.

    There are few such sets, so a process can remember those that it has warmed up for.
    """
    return frozenset(
        component.name for component in without_plugins(components) if SCORERS[type(component)].warm_up is not None
    )


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
            # A scorer that can't warm up gives no score: the reason goes with each item (I6).
            return _unscorable(name, error)
    return None


def score_item(
    components: tuple[RewardComponent, ...], item: RewardItem, group_outcomes: Mapping[str, Outcome] = NOTHING
) -> Result:
    """Adds up weight x score, with the unweighted scores next to it; the first component that fails decides (I6).

    Args:
        components: the rubric.
        item: the completion to score.
        group_outcomes: breakdown name → outcome, of the components that have seen the item's whole group already.
    """
    scoring = scoring_of(components, item)
    outcomes: list[Outcome] = []
    for name, component in scoring:
        outcome = group_outcomes.get(name)
        if outcome is None:
            outcome = score_component(name, component, item)
        outcomes.append(outcome)
        if isinstance(outcome, Unscorable) and score_in_place(component, outcome.reason, settles=False) is None:
            return outcome
    return weighted_sum(scoring, outcomes, settles=False)


def scoring_of(components: tuple[RewardComponent, ...], item: RewardItem) -> list[tuple[str, RewardComponent]]:
    """Returns the components that score an item, with their names in the breakdown."""
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
        # In the order of the spec: a float sum in another order has other last bits. The breakdown is unweighted.
        reward += component.weight * value
    if not is_score(reward):
        return Unscorable(reason="not_finite", detail=f"the weighted sum is {reward}")
    return Scored(reward=reward, breakdown=breakdown, unscorable=replaced)


def score_component(name: str, component: RewardComponent, item: RewardItem) -> Outcome:
    """Returns the unweighted score."""
    try:
        value = float(scorer_of(component).score(component, item))
    except Exception as error:
        # A scorer is foreign code: what it raises is an answer of its own, and never a score of 0 (I6).
        if isinstance(component, PluginReward):
            plugin.print_failure(component, error, item)
        return _unscorable(name, error)
    return outcome_of(name, value)


def names_that_see_groups(components: tuple[RewardComponent, ...]) -> tuple[str, ...]:
    """Breakdown names of the plug-ins that are called for whole groups; they are imported already."""
    return tuple(
        name
        for name, component in rewards.named(components)
        if isinstance(component, PluginReward) and plugin.load(component).sees_groups
    )


def score_groups(component: Any, items: Sequence[RewardItem], group_size: int) -> list[float] | Unscorable:
    """Returns the unweighted scores of the items of whole groups, or why there are none; `outcome_of` judges each."""
    try:
        return plugin.score_groups(component, items, group_size)
    except Exception as error:
        # As in `score_component`: foreign code, and never a score of 0 (I6).
        plugin.print_failure(component, error, items[0])
        return _unscorable(component.name, error)


def outcome_of(name: str, outcome: Outcome) -> Outcome:
    """Returns a component's outcome under its name in the breakdown; a score that is none becomes Unscorable."""
    if isinstance(outcome, Unscorable):
        return replace(outcome, component=name)
    if is_score(outcome):
        return outcome
    return Unscorable(reason="not_finite", detail=f"the score is {outcome}", component=name)


def is_score(value: float) -> bool:
    """Returns True unless the value is NaN, or so large that a trainer's sums overflow."""
    # False of NaN as well: no comparison with it is true.
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
    elif isinstance(error, UnknownEntryPoint | MissingPackage):
        reason, detail = "unknown_entry_point", str(error)
    elif isinstance(error, MemoryError):
        reason, detail = "crashed", "out of memory; the reward service's ONBEAT_SCORER_MEMORY_MB bounds it"
    # A lone surrogate of foreign code would fail where the answer is encoded, and all other items with it.
    encodable = detail.encode("utf-8", "backslashreplace").decode("utf-8")
    return Unscorable(reason=reason, detail=encodable[:MAX_DETAIL_CHARS], component=component)
