"""How many generators a stack for one job has where nothing says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.hub_names import HubName
from onbeat.client.spec_file import load_spec
from onbeat.hub.store import HubStore
from onbeat.training import private_stack
from onbeat.training.private_stack import MODEL_PART, WORTH_A_SECOND, options_of_job
from tests.pipeline import REPOSITORY

ENOUGH = int(WORTH_A_SECOND / (8 * 16 * 8 * 5)) + 1
"""Bytes of a model that make a second generator worth its start, with the demo's tokens an iteration."""


ONE_BATCH = ["rollout.batches_per_iteration=1", "rollout.prompts_per_batch=128"]


@pytest.mark.parametrize(
    "case",
    [
        (2, ENOUGH, [], None, 2),
        (3, ENOUGH, [], 1, 2),
        (2, ENOUGH // 2, [], None, 1),
        (1, ENOUGH, [], None, 1),
        (4, ENOUGH, [], None, 1),
        (2, ENOUGH, [], 2, 1),
        (2, ENOUGH, ["schedule=colocated"], None, 1),
        (2, ENOUGH, ONE_BATCH, None, 1),
    ],
)
def test_two_generators_suit_where_each_has_a_core_and_work(case: Any, tmp_path: Path, monkeypatch: Any) -> None:
    cores, num_bytes, settings, threads, planned = case
    (tmp_path / "model.safetensors").write_bytes(bytes(num_bytes))
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(private_stack, "usable_cores", lambda: cores)
    spec = load_spec(REPOSITORY / "configs" / "demo.toml", [f"model.path={tmp_path}", *settings])

    def generators(**given: int) -> int:
        return options_of_job(spec, run_root=tmp_path, model_root=tmp_path, threads=threads, **given).generators

    assert (generators(), generators(generators=3)) == (planned, 3)
    monkeypatch.setattr(private_stack, "memory_bytes", lambda: MODEL_PART * num_bytes - 1)
    assert generators() == 1, "a second copy of the model has no room"


def test_the_weights_of_a_model_of_the_hub_count_once_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_stack, "usable_cores", lambda: 2)
    monkeypatch.setenv("ONBEAT_HUB_ROOT", str(tmp_path / "hub"))
    spec = load_spec(REPOSITORY / "configs" / "demo.toml", ["model.path=hub:onbeat/small"])

    def generators() -> int:
        return options_of_job(spec, run_root=tmp_path, model_root=tmp_path).generators

    assert generators() == 1, "of what isn't here yet no size is known"
    store = HubStore(tmp_path / "hub")
    name = HubName(kind="model", repository="onbeat/small")
    folder = store.folder(name) / ("1" * 40)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(ENOUGH))
    store.remember(name, folder.name)
    assert generators() == 2


def test_of_a_trajectory_the_tokens_of_all_turns_count() -> None:
    def tokens(*settings: str) -> int:
        return load_spec(REPOSITORY / "configs" / "tool-demo.toml", settings).max_sampled_tokens

    assert tokens("environment.max_turns=3", "rollout.sampling.max_new_tokens=5") == 15
    assert tokens("environment.max_turns=3", "rollout.sampling.max_new_tokens=5", "environment.max_tokens=12") == 12
    assert load_spec(REPOSITORY / "configs" / "demo.toml", []).max_sampled_tokens == 5
