"""A submitted job's files, by content: each that its spec names is read, and its digest becomes part of the spec.

    model.path, stages' models ─▶ the files of the folder that are read     onbeat/data/named_files.py
    rows of data sets          ─▶ the files that a path stands for
    another job's version      ─▶ its weights' digest, by that job's chain

From then on the record of the job says what its processes must find. A client that sends digests, as those of a job
that it submits again, says what the files must still be.

A large file is hashed once for as long as it stays as it is: a second job over the same model costs no second reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from msgspec import UNSET

from broker.job_store import JobStore
from contracts.encoding.wire import Record, changed
from contracts.errors import InvalidInput
from contracts.events import versions_of
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.datasets import RowsTable, SourceDataset, dataset_field, with_tables
from contracts.spec.fork import unusable_fork
from contracts.spec.job import JobSpec
from contracts.spec.stages import RewardModelStage, StageSpec, TeacherStage
from onbeat.data.named_files import check_model, check_rows, model_digests, rows_digests
from onbeat.loop.chain_file import ChainFile
from onbeat.weights.model_path import FIELD, find_model, folder_of_model

T = TypeVar("T", bound=Record)
MODEL_CURE = "put the model there"


def with_file_digests(spec: JobSpec, settings: StackSettings) -> JobSpec:
    """Returns the spec with the digest of each file that it names. Raises InvalidInput that names the field."""
    folder = find_model(spec.model, settings.spec_root)
    model = _with(spec.model, model_digests(folder, spec.model.path, field=FIELD), "model")

    def rows_of(name: str, table: SourceDataset) -> SourceDataset:
        return _with_rows(table, settings, dataset_field(spec.dataset, spec.evaluation, name))

    dataset, evaluation = with_tables(spec.dataset, spec.evaluation, rows_of)
    stages = tuple(_with_models(stage, settings) for stage in spec.stages)
    return changed(spec, model=model, dataset=dataset, evaluation=evaluation, stages=stages)


def _with_rows(table: SourceDataset, settings: StackSettings, field: str) -> SourceDataset:
    if not isinstance(table, RowsTable):
        return table
    digests: dict[str, str] = {}
    for key, path in table.files().items():
        file = settings.spec_root.find(path, field=f"{field}.{key}")
        digests |= rows_digests(file, path, field=f"{field}.{key}")
    return _with(table, digests, field)


def _with_models(stage: StageSpec, settings: StackSettings) -> StageSpec:
    if not isinstance(stage, (TeacherStage, RewardModelStage)):
        return stage
    digests: dict[str, str] = {}
    for key, path in stage.files().items():
        field = f"stages.{stage.name}.{key}"
        folder = folder_of_model(settings.spec_root, path, field=field, cure=MODEL_CURE)
        digests |= model_digests(folder, path, field=field)
    return _with(stage, digests, f"stages.{stage.name}")


def _with(table: T, digests: Mapping[str, str], field: str) -> T:
    """Returns the table with the digests of its files. Raises InvalidInput where it has others already."""
    named = getattr(table, "file_digests", UNSET)
    if named is not UNSET and named != digests:
        other = min(path for path in {*named, *digests} if named.get(path) != digests.get(path))
        raise InvalidInput(
            f"{other} is not the file that it names",
            field=f"{field}.file_digests",
            cure="put the file back, or leave file_digests out to take the files as they are",
        )
    return changed(table, file_digests=dict(digests))


def with_fork_digest(spec: JobSpec, settings: StackSettings, jobs: JobStore) -> JobSpec:
    """Returns the spec with the digest of the version that it goes on from, where this host knows the other's chain.

    Raises InvalidInput where the spec names another digest.
    """
    fork = spec.fork
    if fork is UNSET:
        return spec
    source = RunFolder(settings.run_root_path, fork.job)
    records = jobs.audit_outline(fork.job)[0] or ChainFile(source).after("")
    digest = versions_of(records).get(fork.version, UNSET)
    if UNSET in (digest, fork.weights_digest):
        digest = digest or fork.weights_digest
    elif digest != fork.weights_digest:
        raise unusable_fork(fork, source, "its weights are not those that fork.weights_digest names")
    return changed(spec, fork=changed(fork, weights_digest=digest))


def check_named_files(spec: JobSpec, settings: StackSettings) -> None:
    """Raises InvalidInput that names the first file which isn't as the job was accepted with it."""
    root = settings.spec_root
    model = spec.model
    check_model(find_model(model, root), model.path, model.file_digests, field=FIELD, weights=True)
    for name, table in spec.tables.items():
        for key, path in table.files().items() if isinstance(table, RowsTable) else ():
            field = f"{dataset_field(spec.dataset, spec.evaluation, name)}.{key}"
            check_rows(root.find(path, field=field), path, getattr(table, "file_digests", UNSET), field=field)
    for stage in spec.stages:
        for key, path in stage.files().items() if isinstance(stage, (TeacherStage, RewardModelStage)) else ():
            field = f"stages.{stage.name}.{key}"
            folder = folder_of_model(root, path, field=field, cure=MODEL_CURE)
            check_model(folder, path, getattr(stage, "file_digests", UNSET), field=field, weights=True)
