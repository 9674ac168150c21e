"""A trained job's health after each commit: judged by the rules, told when it changes.

metrics.jsonl, evaluations.jsonl ─▶ begin ─▶ (scored ─▶ committed ─▶ check) for each iteration
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from broker.job_store import JobStore, health_of
from contracts.encoding.json_lines import json_line, json_lines, open_plain
from contracts.errors import Unhealthy
from contracts.events import HealthChanged, IterationMetrics
from contracts.jobs import EvaluationScore, HealthProblem
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.loop.health.rules import Health

OfIteration = TypeVar("OfIteration", IterationMetrics, EvaluationScore)

log = logging.getLogger(__name__)


class HealthWatch:
    """Judges one job's health under one trainer epoch. The trained job makes it and tells it of each iteration."""

    def __init__(self, jobs: JobStore, folder: RunFolder, spec: JobSpec) -> None:
        self._jobs = jobs
        self._folder = folder
        self._stops = spec.trainer.stops_on
        self._health = Health(spec)
        self._accepted: frozenset[str] = frozenset()
        """Rules that were broken at the last resume. A trainer that was replaced breaks none anew, and accepts none."""
        self._recorded: tuple[HealthProblem, ...] = ()
        self._recorded_past: tuple[HealthProblem, ...] = ()

    def begin(self, first: int) -> None:
        """Takes the iterations before the first one: what was wrong at the last resume ends nothing any more."""
        problems: tuple[HealthProblem, ...] = ()
        scores = {score.iteration: score for score in _standing(self._folder.evaluations, first, EvaluationScore)}
        for metrics in _standing(self._folder.metrics, first, IterationMetrics):
            if metrics.iteration in scores:
                self.scored(scores[metrics.iteration])
            problems = self._health.iteration(metrics)
        fields = self._jobs.fields(self._folder.job_id)
        self._accepted = frozenset(problem.rule for problem in health_of(fields, "health_at_resume"))
        self._recorded = health_of(fields)
        self._recorded_past = health_of(fields, "health_past")
        self._tell(problems, first - 1)

    def scored(self, score: EvaluationScore) -> None:
        """Takes a held-out score, before the commit of its iteration."""
        self._health.score(score)

    def committed(self, metrics: IterationMetrics) -> None:
        """Judges a committed iteration, and tells the job's readers where its health has changed."""
        self._tell(self._health.iteration(metrics), metrics.iteration)

    def check(self) -> None:
        """Raises Unhealthy where a rule of `trainer.stop_on` was broken since the last resume."""
        for problem in self._recorded:
            if problem.rule in self._stops and problem.rule not in self._accepted:
                raise Unhealthy(problem.in_words, field="trainer.stop_on", cure=problem.cure)

    def _tell(self, problems: tuple[HealthProblem, ...], iteration: int) -> None:
        past = self._health.past
        if (problems, past) == (self._recorded, self._recorded_past):
            return
        for problem in problems:
            if problem not in self._recorded:
                log.warning("%s; %s", problem.in_words, problem.cure)
        is_news = problems != self._recorded
        self._recorded = problems
        self._recorded_past = past
        self._jobs.record_health(self._folder.job_id, problems, past)
        if not is_news:
            # A replay from an earlier checkpoint may forget what was gone.
            return
        event = HealthChanged(at_s=time.time(), iteration=iteration, problems=problems)
        self._jobs.tell(self._folder.job_id, event)


def _standing(path: Path, first: int, kind: type[OfIteration]) -> Iterator[OfIteration]:
    """Yields the last line of each iteration before the first one, by the iterations' numbers.

    Two passes, so that memory holds a line's place and not its record.
    """
    places = {record.iteration: place for place, record in json_lines(path, kind) if 0 <= record.iteration < first}
    if not places:
        return
    with open_plain(path) as file:
        for iteration in sorted(places):
            record = json_line(file, kind, places[iteration])
            if record is not None:
                yield record
