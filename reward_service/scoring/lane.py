"""One lane: a thread that scores turn by turn, in cages that it owns.

A completion may meet a hole in a scorer, and change the process that it is scored in. So no scorer process sees
completions of two jobs, and one that parses answers (math_verify, reasoning_gym) is replaced after a few hundred items:
by a fork of a process that has imported what is slow. Patterns can't be broken into, and plug-ins may load a model, or
start threads, which no fork survives: their scorer processes last for the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.rewards import RewardComponent, RewardItem, Scored, Unscorable, UnscorableReason
from onbeat.cage.caged_process import ChildDied, ChildLate
from reward_service.cages import Asked, CagedLane, Cages
from reward_service.scorers import rubric
from reward_service.scoring.scorer_cage import ScorerCage

Results = tuple[Scored | Unscorable, ...]

TURN_S = 0.5
"""How long a lane stays with one request while others wait."""
QUICK_S = 0.01
"""Items that took no longer together are sent twice as many at a time."""
MAX_ITEMS_AT_ONCE = 32
MAX_BYTES_AT_ONCE = 48 * 1024
"""Fits a socket's buffer, so that sending several items never waits for the scoring of one."""
MAX_ITEMS_OF_PROCESS = 256
"""Completions that a scorer process parses before a fresh one takes its place: a fork costs as much as some of them."""
MAX_CAGES = 4
"""A lane has one for each kind of built-in scorers, and for each job with plug-ins; the one unused longest goes."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Scorer:
    """What the scorer process of a cage has met."""

    owner: str
    num_items: int = 0


@dataclass(kw_only=True, eq=False)
class Work(Asked[RewardItem, Scored | Unscorable]):
    """One request: items to score."""

    components: tuple[RewardComponent, ...]
    item_timeout_s: float
    owner: str
    """The job, or the request, whose completions the scorer process of these may have met."""
    settles: bool
    num_begun: int = 0
    """Guarded by the pool's condition, as is the next."""
    num_at_once: int = 1
    refusal: Unscorable | None = None
    """Why the rubric cannot be warmed up: the remaining items get it too, instead of waiting for it again."""

    def __post_init__(self) -> None:
        """Built-in scorers of one kind share a cage, and each request has a scorer process of its own in it."""
        kinds = " ".join(sorted(rubric.warm_up_keys(self.components)))
        self.cage_key = f"{self.owner}: {kinds}" if rubric.imports_plugins(self.components) else kinds

    @property
    def num_waiting(self) -> int:
        return len(self.asks) - self.num_begun

    def take(self, most: int) -> Sequence[int]:
        """Takes the next items, and returns their places: few enough for what they took so far, and at least one."""
        start = self.num_begun
        num_bytes = 0
        while self.num_begun < len(self.asks) and self.num_begun - start < min(self.num_at_once, max(1, most)):
            item = self.asks[self.num_begun]
            texts = (item.prompt, item.completion, item.reference, item.task_entry, item.metadata or "")
            num_bytes += 4 * sum(map(len, texts))
            if num_bytes > MAX_BYTES_AT_ONCE and self.num_begun > start:
                break
            self.num_begun += 1
        return range(start, self.num_begun)

    def pace(self, elapsed_s: float) -> None:
        self.num_at_once = min(2 * self.num_at_once, MAX_ITEMS_AT_ONCE) if elapsed_s < QUICK_S else 1


class Lane(CagedLane[Work, ScorerCage]):
    """It stays with one request for a while, where others wait."""

    def __init__(
        self,
        *,
        name: str,
        cages: Cages,
        new_cage: Callable[[], ScorerCage],
        next_turn: Callable[[Work | None], tuple[Work, Sequence[int]] | None],
    ) -> None:
        """next_turn: with the request to stay with, if any."""
        super().__init__(name=name, cages=cages, new_cage=new_cage)
        self._next_turn = next_turn
        self._stays_with: Work | None = None
        self._since_s = 0.0
        self._scorers: dict[str, _Scorer] = {}
        """Cage → its scorer process; none where there is none, or it was lost."""

    def _next(self) -> tuple[Work, Sequence[int]] | None:
        return self._next_turn(self._stays_with)

    def _answer(self, work: Work, places: Sequence[int]) -> None:
        started_s = time.monotonic()
        if work is not self._stays_with:
            self._stays_with, self._since_s = work, started_s
        self._score(work, list(places))
        now_s = time.monotonic()
        work.pace(now_s - started_s)
        if now_s - self._since_s > TURN_S:
            self._stays_with = None

    def _score(self, work: Work, places: list[int]) -> None:
        unsettled: list[tuple[int, Unscorable]] = []
        while places:
            if work.future.done():
                return
            refusal = work.refusal or self._prepare(work)
            if refusal is not None:
                work.refusal = refusal
                for place in places:
                    work.deliver(place, refusal)
                break
            for result in self._results(work, work.components, [work.asks[place] for place in places]):
                place = places.pop(0)
                if isinstance(result, Unscorable) and work.settles:
                    unsettled.append((place, result))
                else:
                    work.deliver(place, result)
        for place, result in unsettled:
            work.deliver(place, self._settled(work, work.asks[place], result))

    def _results(
        self, work: Work, components: tuple[RewardComponent, ...], items: Sequence[RewardItem]
    ) -> Sequence[Scored | Unscorable]:
        """Results of the first items, up to one that cost the scorer process its life; a fresh one is due after it."""
        results: list[Scored | Unscorable] = []
        cage = self._cages[work.cage_key]
        self._scorers[work.cage_key].num_items += len(items)
        try:
            for result in cage.score(components, items, item_timeout_s=work.item_timeout_s):
                results.append(result)
        except (ChildLate, ChildDied) as error:
            results.append(self._lost(work, components, error))
        return results

    def _settled(self, work: Work, item: RewardItem, result: Unscorable) -> Scored | Unscorable:
        """Scores each component under the whole deadline, so that it shows which of them can't score it."""
        if not any(rubric.score_in_place(c, result.reason, settles=True) is not None for c in work.components):
            return result
        scoring = rubric.scoring_of(work.components, item)
        outcomes: list[float | Unscorable] = []
        for name, component in scoring:
            if rubric.needs_isolation((component,)):
                outcome = self._component_outcome(work, component, item)
            else:
                outcome = rubric.score_component(name, component, item)
            outcomes.append(outcome)
        return rubric.weighted_sum(scoring, outcomes, settles=True)

    def _component_outcome(self, work: Work, component: RewardComponent, item: RewardItem) -> float | Unscorable:
        refusal = self._prepare(work)
        if refusal is not None:
            return refusal
        (result,) = self._results(work, (component,), [item])
        if isinstance(result, Unscorable):
            return result
        for reason in result.unscorable.values():
            return Unscorable(reason=reason, detail="", component=component.name)
        return next(iter(result.breakdown.values()))

    def _prepare(self, work: Work) -> Unscorable | None:
        """Has a cage and a scorer process ready for this request; why no item of it can be scored, or None."""
        key = work.cage_key
        try:
            cage = self._cage(key)
            built_in = rubric.without_plugins(work.components)
            refusal = cage.warm_up(built_in, keys=rubric.warm_up_keys(built_in))
            self._of_pool.say_what_is_missing(cage.missing or ())
            if refusal is not None or self._may_go_on(work):
                return refusal
            cage.fresh_scorer()
            refusal = cage.warm_up_scorer(work.components) if rubric.imports_plugins(work.components) else None
            if refusal is None:
                self._scorers[key] = _Scorer(owner=work.owner)
            return refusal
        except (ChildLate, ChildDied) as error:
            return self._lost(work, work.components, error)

    def _may_go_on(self, work: Work) -> bool:
        """Whether the scorer process that is there may score this request, too."""
        scorer = self._scorers.get(work.cage_key)
        if scorer is None or scorer.owner != work.owner:
            return False
        return scorer.num_items < MAX_ITEMS_OF_PROCESS or rubric.keeps_its_process(work.components)

    def _lost(self, work: Work, components: tuple[RewardComponent, ...], error: ChildLate | ChildDied) -> Unscorable:
        """The result of an item whose scorer process was lost; that process is ended, with whatever it started."""
        reason: UnscorableReason = "timeout" if isinstance(error, ChildLate) else "crashed"
        component = rubric.only_isolated_name(components)
        log.warning("%s%s; another process takes its place", f"{component}: " if component else "", error)
        key = work.cage_key
        self._scorers.pop(key, None)
        cage = self._cages.get(key)
        if cage is not None and cage.is_alive:
            cage.end_child()
        if cage is not None and not cage.is_alive:
            self._end(key)
        if not self._stopped:
            self._of_pool.on_restart()
        return Unscorable(reason=reason, detail=str(error), component=component)

    def _cage(self, key: str) -> ScorerCage:
        while len(self._cages) >= MAX_CAGES and key not in self._cages:
            self._end(next(iter(self._cages)))
        return super()._cage(key)

    def _end(self, key: str) -> None:
        self._scorers.pop(key, None)
        super()._end(key)
