"""A spec with faults of every kind is refused with all of them in one round, whichever door it comes by."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import onbeat
from broker.presence import Presence
from contracts.encoding.wire import encode_json
from contracts.errors import SpecRefused
from contracts.monitor import GeneratorSeen
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.services import Services
from onbeat.cli import run
from onbeat.stack.access import StackFile, write_roots, write_stack_file
from tests import served
from tests.builders import stub_model
from tests.served import asked, services_over

pytestmark = pytest.mark.usefixtures("restored_process")
KEY = "test-key"
JSON = {"Content-Type": "application/json"}
WRONG: dict[str, Any] = {
    "name": "wrong",
    "iterations": 4,
    "model": {"path": "models/nowhere"},
    "dataset": {"type": "addition"},
    "reward": {"components": [{"type": "exact"}]},
    "trackers": ["tensorboard", "tensorboard"],
    "max_policy_lag": 2,
    "optimizer": {"lerning_rate": 1e-3},
}
"""A misspelt key, two rules that are broken, and a folder that isn't there."""
SPEC_FILE = """
name = "wrong"
iterations = 4
model = { path = "models/nowhere" }
dataset = { type = "addition" }
reward = { components = [{ type = "exact" }] }
trackers = ["tensorboard", "tensorboard"]
max_policy_lag = 2
optimizer = { lerning_rate = 1e-3 }
"""
FIELDS = ["optimizer.lerning_rate", "trackers", "max_policy_lag", "model.path"]


@pytest.fixture
def services(settings: StackSettings, tmp_path: Path) -> Iterator[Services]:
    """A gateway's, with a model root that has a model `models/right`."""
    stub_model(tmp_path / "root" / "models" / "right")
    settings = msgspec.structs.replace(settings, model_root=str(tmp_path / "root"))
    with services_over(settings) as services:
        jobs = services.jobs.job_ids()
        yield services
        assert services.jobs.job_ids() == jobs, "what is refused makes no job"


@pytest.fixture
def ask(services: Services) -> Callable[..., httpx.Response]:
    return partial(asked, create_app(services), key=KEY)


@pytest.fixture
def url(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The gateway, served, and another folder than its model root as the current one."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "job.toml").write_text(SPEC_FILE)
    monkeypatch.chdir(home)
    monkeypatch.delenv("ONBEAT_MODEL_ROOT", raising=False)
    monkeypatch.setenv("ONBEAT_RUN_ROOT", str(tmp_path / "runs"))
    with served.serving(create_app(services)) as url:
        try:
            yield url
        finally:
            services.closing.set()


def stack_of_this_user(url: str, tmp_path: Path) -> Path:
    """Writes the files by which a client knows the gateway for one of this machine; returns their folder."""
    run_root = tmp_path / "runs"
    run_root.mkdir()
    write_roots(run_root, StackSettings(model_root=str(tmp_path / "root")))
    write_stack_file(run_root, StackFile(gateway_url=url, api_key=KEY, pid=os.getpid()))
    return run_root


def fields_in(lines: str) -> list[str]:
    """Returns the fields of the refusals that a command shows, a line each."""
    return re.findall(r"^onbeat: ([^ ]+): ", lines, re.MULTILINE)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/check"])
def test_the_gateway_answers_wrong_keys_broken_rules_and_missing_folders_at_once(
    path: str, ask: Callable[..., httpx.Response]
) -> None:
    answer = ask("POST", path, content=encode_json(WRONG), headers=JSON)
    refusals = answer.json()["refusals"]
    assert answer.status_code == 422
    assert [refusal["field"] for refusal in refusals] == FIELDS
    assert all(refusal["cure"] for refusal in refusals)


@pytest.mark.parametrize("is_here", [False, True], ids=["another machine's gateway", "a stack of this user"])
def test_submit_shows_all_at_once(is_here: bool, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if is_here:
        stack_of_this_user(url, tmp_path)
    assert run(["submit", "job.toml", "--gateway", url, "--api-key", KEY]) == 2
    assert fields_in(capsys.readouterr().err) == FIELDS


@pytest.mark.parametrize("is_here", [False, True], ids=["another machine's gateway", "a stack of this user"])
def test_train_raises_all_at_once(is_here: bool, url: str, tmp_path: Path) -> None:
    if is_here:
        stack_of_this_user(url, tmp_path)
    with pytest.raises(SpecRefused) as refused:
        onbeat.train(WRONG, url=url, key=KEY)
    assert [refusal.field for refusal in refused.value.refusals] == FIELDS


def test_train_and_demo_refuse_the_same_before_they_start_a_stack_of_their_own(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecRefused) as refused:
        onbeat.train(WRONG, run_dir=tmp_path / "own")
    assert [refusal.field for refusal in refused.value.refusals] == FIELDS
    assert not (tmp_path / "own").exists()
    assert run(["demo", "--spec", "job.toml", "--run-dir", str(tmp_path / "own")]) == 2
    assert fields_in(capsys.readouterr().err) == FIELDS


def test_a_spec_is_refused_as_well_where_no_gateway_can_be_asked(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "job.toml"]) == 2
    assert fields_in(capsys.readouterr().err) == FIELDS[:3]
    assert run(["submit", "job.toml", "--gateway", url, "--api-key", "another-key"]) == 2
    error = capsys.readouterr().err
    assert [field for field in fields_in(error) if field in FIELDS] == FIELDS[:3]
    assert "the gateway doesn't say what else it would refuse" in error


def test_a_path_next_to_the_spec_is_there_for_the_gateway_too(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gateway is asked with the paths that a submission would send, not with those that stand in the file."""
    stack_of_this_user(url, tmp_path)
    stub_model(tmp_path / "root" / "home" / "models" / "mine")
    folder = tmp_path / "root" / "home"
    (folder / "job.toml").write_text(SPEC_FILE.replace("models/nowhere", "models/mine"))
    assert run(["submit", str(folder / "job.toml")]) == 2
    assert fields_in(capsys.readouterr().err) == FIELDS[:3]


def test_what_a_reward_file_and_the_live_generators_lack_comes_along(
    url: str, services: Services, tmp_path: Path
) -> None:
    presence = Presence(services.broker)
    for generator in presence.live():
        presence.leave(generator.worker_id)  # of tests before
    presence.beat(GeneratorSeen(worker_id="g-doors", not_reproducible="vllm"))
    (tmp_path / "root" / "rewards.py").write_text("def right(completion, **_):\n    return 1.0\n")
    component = {"type": "plugin", "entry_point": "wrong", "file": "rewards.py"}
    values = WRONG | {"reward": {"components": [component]}}
    try:
        with pytest.raises(SpecRefused) as refused:
            onbeat.train(values, url=url, key=KEY)
    finally:
        presence.leave("g-doors")
    fields = {refusal.field for refusal in refused.value.refusals}
    assert fields == {*FIELDS, "reward.components[0].entry_point", "deterministic"}


def test_a_key_that_may_be_meant_is_neither_missing_nor_judged(ask: Callable[..., httpx.Response]) -> None:
    """The model's path is misspelt, so no folder is missing; the schedule is, so a lag may be right."""
    values = {key: value for key, value in WRONG.items() if key not in ("optimizer", "model")}
    values |= {"shedule": "delayed", "model": {"pth": "models/right"}}
    answer = ask("POST", "/v1/jobs/check", content=json.dumps(values).encode(), headers=JSON)
    assert [refusal["field"] for refusal in answer.json()["refusals"]] == ["shedule", "model.pth", "trackers"]
