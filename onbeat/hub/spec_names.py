"""The names of the hub in a spec, and the spec with a commit in place of each revision.

JobSpec ─ hub_requests ─▶ field → HubRequest ─ fetched? ─▶ field → commit ─ with_commits ─▶ the spec of the job's record
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contracts.encoding.wire import changed
from contracts.hub_names import SCHEME, HubName, is_hub_name, read_hub_name
from contracts.spec.datasets import HuggingFaceDataset, MixtureDataset, SourceDataset, dataset_field
from contracts.spec.job import JobSpec
from contracts.spec.stages import RewardModelStage, StageSpec, TeacherStage
from onbeat.hub.store import HubRequest

MODEL_FIELD = "model.path"
HUGGINGFACE = HuggingFaceDataset.__struct_config__.tag
Change = Callable[[str, HubRequest], HubName]
"""(field, the request that it stands for) → the name that is written there."""


def hub_requests(spec: JobSpec) -> dict[str, HubRequest]:
    """Returns field → what it asks of the hub. Raises InvalidInput for a name that can't be read."""
    requests: dict[str, HubRequest] = {}

    def note(field: str, request: HubRequest) -> HubName:
        requests[field] = request
        return request.name

    _with_names(spec, note)
    return requests


def may_name_hub(values: Any) -> bool:
    """Returns True where the plain values of a spec have what may be a name of the hub, wherever it stands."""
    if isinstance(values, str):
        return is_hub_name(values)
    if isinstance(values, Mapping):
        # There it is a name of the hub also without its scheme, which the judge refuses.
        names_rows = values.get("type") == HUGGINGFACE and "path" in values
        return names_rows or any(may_name_hub(value) for value in values.values())
    return isinstance(values, Sequence) and any(may_name_hub(value) for value in values)


def with_commits(spec: JobSpec, commits: Mapping[str, str]) -> JobSpec:
    """Returns the spec with the commit of each name. commits: of every field that has one."""
    return _with_names(spec, lambda field, request: request.name.at_commit(commits[field]))


def _with_names(spec: JobSpec, change: Change) -> JobSpec:
    def of_model(field: str, path: str) -> str:
        if not is_hub_name(path):
            return path
        return str(change(field, HubRequest(name=read_hub_name(path, kind="model", field=field))))

    def of_rows(name: str, table: SourceDataset) -> SourceDataset:
        field = f"{dataset_field(spec.dataset, spec.evaluation, name)}.path"
        if not isinstance(table, HuggingFaceDataset) or not table.path:
            return table
        name_of_set = read_hub_name(table.path, kind="dataset", field=field)
        splits = tuple(dict.fromkeys(table.hub_splits))
        written = change(field, HubRequest(name=name_of_set, config=table.config, splits=splits))
        # The key says that it is a data set, so its path needn't.
        return changed(table, path=f"{SCHEME}{written.repository}@{written.revision}")

    model = changed(spec.model, path=of_model(MODEL_FIELD, spec.model.path))
    if isinstance(spec.dataset, MixtureDataset):
        sources = [changed(source, dataset=of_rows(source.name, source.dataset)) for source in spec.dataset.sources]
        dataset = changed(spec.dataset, sources=tuple(sources))
    else:
        dataset = of_rows("", spec.dataset)
    evaluation = spec.evaluation
    if evaluation.sets:
        sets = [changed(held_out, dataset=of_rows(held_out.name, held_out.dataset)) for held_out in evaluation.sets]
        evaluation = changed(evaluation, sets=tuple(sets))
    stages = tuple(_with_models(stage, of_model) for stage in spec.stages)
    return changed(spec, model=model, dataset=dataset, evaluation=evaluation, stages=stages)


def _with_models(stage: StageSpec, of_model: Callable[[str, str], str]) -> StageSpec:
    if isinstance(stage, RewardModelStage):
        return changed(stage, model=of_model(f"stages.{stage.name}.model", stage.model))
    if not isinstance(stage, TeacherStage):
        return stage
    if stage.models:
        models = {
            source: of_model(f"stages.{stage.name}.models.{source}", path) for source, path in stage.models.items()
        }
        return changed(stage, models=models)
    return changed(stage, model=of_model(f"stages.{stage.name}.model", stage.model)) if stage.model else stage
