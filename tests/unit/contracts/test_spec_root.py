"""A spec's paths stay below the model root, at every door where a path in a spec becomes a file on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from consumer.model.policy import load_model, load_policy, load_whole
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from contracts.spec.datasets import JsonlDataset
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from gateway.submission import check_paths
from onbeat.data.datasets.loading import load_dataset
from onbeat.weights.model_path import model_folder
from tests.builders import job_spec, stub_model
from tests.refusals import refusal_of

LINE = '{"prompt": "1+1=", "reference": "2"}\n'


@pytest.fixture
def stack(tmp_path: Path) -> StackSettings:
    """A model root with data, a run root below it with a secret, and beside them files that no spec may name."""
    root = tmp_path / "app"
    for folder in (root / "data", root / "runs" / "redis", root / ".git", tmp_path / "home", tmp_path / "models"):
        folder.mkdir(parents=True)
    for file in ("data/train.jsonl", "runs/redis/redis.conf", ".env", ".git/config"):
        (root / file).write_text(LINE)
    for folder in ("home", "models"):
        (tmp_path / folder / "train.jsonl").write_text(LINE)
    (root / "link.jsonl").symlink_to(tmp_path / "home" / "train.jsonl")
    (root / "folder").symlink_to(tmp_path / "home")
    (root / "inside").symlink_to(root / "data")
    return StackSettings(
        model_root=str(root), run_root=str(root / "runs"), extra_roots=str(tmp_path / "models"), redis_url="redis://x"
    )


HOSTILE = [
    "/etc/passwd",
    "/proc/self/environ",
    "../home/train.jsonl",
    "data/../../home/train.jsonl",
    "link.jsonl",
    "folder/train.jsonl",
    "runs/redis/redis.conf",
    "data/../runs/redis/redis.conf",
    "runs",
    ".env",
    ".git/config",
    "data/\0",
    "../models-of-somebody-else",
    "\ud800",
    "a" * 300,
]


@pytest.mark.parametrize("path", HOSTILE)
def test_a_path_that_leads_elsewhere_is_refused_by_its_field(stack: StackSettings, path: str) -> None:
    with refusal_of("model.path"):
        stack.spec_root.find(path, field="model.path")


@pytest.mark.parametrize("path", ["data/train.jsonl", "inside/train.jsonl", "data/../data/train.jsonl", "."])
def test_a_path_that_stays_below_the_root_is_found(stack: StackSettings, path: str) -> None:
    assert stack.spec_root.find(path, field="model.path").exists()


def test_the_operator_may_add_folders(stack: StackSettings, tmp_path: Path) -> None:
    path = tmp_path / "models" / "train.jsonl"
    assert stack.spec_root.find(str(path), field="model.path") == path
    assert stack.spec_root.find("../models/train.jsonl", field="model.path") == path


def test_a_model_root_inside_the_run_root_is_the_operators_word(tmp_path: Path) -> None:
    root = SpecRoot(tmp_path / "runs" / "models", closed=[tmp_path / "runs"])
    assert root.find("any", field="model.path") == tmp_path / "runs" / "models" / "any"


def test_a_run_root_that_is_the_model_root_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="run root"):
        SpecRoot(tmp_path, closed=[tmp_path]).find("redis/redis.conf", field="dataset.train_path")


def as_model(read: Callable[[ModelSpec, SpecRoot], object]) -> Callable[[StackSettings, str], object]:
    return lambda stack, path: read(ModelSpec(path=path), stack.spec_root)


def as_data(field: str) -> Callable[[StackSettings, str], object]:
    def read(stack: StackSettings, path: str) -> object:
        paths = {"train_path": "data/train.jsonl", field: path}
        return load_dataset(JsonlDataset(**paths), num_evaluation=0, seed=0, model_root=stack.spec_root)

    return read


def submitted(field: str) -> Callable[[StackSettings, str], object]:
    def submit(stack: StackSettings, path: str) -> None:
        stub_model(Path(stack.model_root) / "model")
        data = {"type": "jsonl", "train_path": "data/train.jsonl"}
        changes = {"model__path": "model", "dataset": data, field.replace(".", "__"): path}
        spec = job_spec(**changes)
        check_paths(spec, stack)

    return submit


DOORS = {
    "the generator's model": as_model(model_folder),
    "the trainer's model": as_model(
        lambda spec, root: load_policy(spec, model_root=root, gradient_checkpointing=False)
    ),
    "the trainer's reference": as_model(
        lambda spec, root: load_model(spec, model_root=root, gradient_checkpointing=False, load=load_whole)
    ),
    "the training data": as_data("train_path"),
    "the held-out data": as_data("evaluation_path"),
    "a submitted model": submitted("model.path"),
    "submitted training data": submitted("dataset.train_path"),
    "submitted held-out data": submitted("dataset.evaluation_path"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("path", ["/etc/passwd", "link.jsonl", "runs/redis/redis.conf", "../home"])
def test_each_door_asks_the_root(stack: StackSettings, door: str, path: str) -> None:
    with pytest.raises(InvalidInput, match="leads"):
        DOORS[door](stack, path)


def test_a_refusal_names_the_folders_that_a_path_may_lead_into(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    root = SpecRoot(tmp_path / "root", extra=(tmp_path / "work", runs / "inputs"), closed=(runs,))
    with pytest.raises(InvalidInput) as caught:
        root.find(str(tmp_path / "elsewhere"), field="model.path")
    problem = f"{tmp_path}/elsewhere leads out of the model root, {tmp_path}/root, and of {tmp_path}/work"
    assert caught.value.problem == problem
