"""Scores that a spec states for completions that can't be judged, whatever judges them.

    reward.components   on_unscorable   by the component's name in the breakdown
    environment         on_failure      by "environment", of a mixture's source by "environment/SOURCE"
    stages              on_failure      by the stage's name

A completion that has one is marked with that name and a reason (`Rollout.unscorable`), counted in the metrics, and
counted by name and reason in the audit record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from contracts.errors import InvalidInput
from contracts.rewards import OnUnscorable, RewardComponent, stated_scores
from contracts.spec.datasets import DatasetSpec, environments_of, with_environments
from contracts.spec.environment import EnvironmentSpec, environment_name
from contracts.spec.stages import JudgingStage, StageSpec


def all_stated_scores(
    components: tuple[RewardComponent, ...], environments: Mapping[str, EnvironmentSpec], stages: Sequence[StageSpec]
) -> dict[str, float]:
    """Returns name → score, of whatever states one."""
    of_others = {name: judge.stated_score for name, judge in _judges(environments, stages).items()}
    return stated_scores(components) | {name: score for name, score in of_others.items() if score is not None}


def with_on_failure(
    dataset: DatasetSpec,
    environment: EnvironmentSpec | None,
    stages: tuple[StageSpec, ...],
    changes: Mapping[str, OnUnscorable],
) -> dict[str, Any]:
    """Returns the fields with `on_failure` replaced, by name. Raises InvalidInput for a name that nothing has."""
    names = _judges(environments_of(dataset, environment), stages)
    unknown = sorted(changes.keys() - names.keys())
    if unknown:
        cure = "it has neither an environment nor a stage that judges"
        if names:
            cure = f"it has {', '.join(names)}"
        raise InvalidInput(f"the job has no `{unknown[0]}` that judges completions", field="on_failure", cure=cure)

    def judged(source: str, environment: EnvironmentSpec) -> EnvironmentSpec:
        return replace(environment, on_failure=changes.get(environment_name(source), environment.on_failure))

    def judging(stage: StageSpec) -> StageSpec:
        if not isinstance(stage, JudgingStage):
            return stage
        return replace(stage, on_failure=changes.get(stage.name, stage.on_failure))

    return with_environments(dataset, environment, judged) | {"stages": tuple(map(judging, stages))}


def _judges(
    environments: Mapping[str, EnvironmentSpec], stages: Sequence[StageSpec]
) -> dict[str, EnvironmentSpec | JudgingStage]:
    judging = {stage.name: stage for stage in stages if isinstance(stage, JudgingStage)}
    playing = {environment_name(source): environment for source, environment in environments.items()}
    return {**playing, **judging}
