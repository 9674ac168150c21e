"""Each command that takes a spec finds its files next to it, and says in which folders it has looked for one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from contracts.events import CheckpointWritten
from contracts.settings import StackSettings
from contracts.spec.datasets import JsonlDataset
from onbeat.base.shipped import shipped_root
from onbeat.chaos import command as chaos_command
from onbeat.cli import run
from onbeat.client.spec_file import load_spec
from onbeat.stack.access import StackFile, write_roots, write_stack_file
from onbeat.stack.options import StackOptions
from tests.e2e.stand_in_gateway import JOB, KEY, FakeGateway
from tests.rooms.planning.timelines import JOB as MEASURED_JOB
from tests.rooms.planning.timelines import write_synchronous_run

pytestmark = pytest.mark.usefixtures("restored_process")
SPEC = """
name = "paths"
iterations = 10
schedule = "synchronous"
model = { path = "models/sums" }
dataset = { type = "jsonl", train_path = "data/rows.jsonl" }
reward = { components = [{ type = "exact" }] }
evaluation = { num_prompts = 2 }
"""
COMMANDS = (
    ["submit", "SPEC"],
    ["evaluate", "models/sums", "SPEC"],
    ["sweep", "SPEC", "--set", "seed=1,2"],
    ["chaos", "--spec", "SPEC"],
    ["demo", "--spec", "SPEC"],
)
TO_A_STACK = COMMANDS[:3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a spec, which is neither the current folder nor the model root, with the files that it names."""
    home = tmp_path / "home"
    for name in ("models", "data"):
        (home / name).mkdir(parents=True)
    shutil.copytree(shipped_root() / "configs" / "models" / "two-digit-addition", home / "models" / "sums")
    (home / "data" / "rows.jsonl").write_text('{"prompt": "1+1=", "reference": "2"}\n' * 4)
    (home / "job.toml").write_text(SPEC)
    for name in ("elsewhere", "root"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("ONBEAT_MODEL_ROOT", raising=False)
    return home


@pytest.fixture
def stack(gateway: FakeGateway, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    """The gateway of a stack of this user, whose model root is `root`."""
    monkeypatch.chdir(tmp_path / "elsewhere")
    run_root = tmp_path / "runs"
    run_root.mkdir()
    write_roots(run_root, StackSettings(model_root=str(tmp_path / "root")))
    write_stack_file(run_root, StackFile(gateway_url=gateway.url, api_key=KEY, pid=os.getpid()))
    return gateway


def typed(command: list[str], home: Path) -> list[str]:
    return [word.replace("SPEC", str(home / "job.toml")) for word in command]


@pytest.mark.parametrize("command", TO_A_STACK, ids=lambda command: command[0])
def test_a_command_that_submits_finds_the_files_next_to_the_spec(
    command: list[str], stack: FakeGateway, home: Path
) -> None:
    assert run([*typed(command, home), "--json"]) == 0
    for _, spec in stack.submitted:
        assert spec.model.path == str(home / "models" / "sums")
        assert isinstance(spec.dataset, JsonlDataset)
        assert spec.dataset.train_path == str(home / "data" / "rows.jsonl")


def test_a_model_that_is_typed_starts_at_the_current_folder_first(stack: FakeGateway, home: Path) -> None:
    shutil.copytree(home / "models", Path("models"))
    assert run(["evaluate", "models/sums", str(home / "job.toml"), "--json"]) == 0
    ((_, spec),) = stack.submitted
    assert spec.model.path == str(Path("models/sums").absolute())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_path_that_is_nowhere_is_refused_with_the_folders_before_anything_starts(
    command: list[str], stack: FakeGateway, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(home / "models")
    (home / "data" / "rows.jsonl").unlink()
    assert run(typed(command, home)) == 2
    said = capsys.readouterr().err
    root = tmp_path / "root" if command in TO_A_STACK else shipped_root()
    first = tmp_path / "elsewhere" if command[0] == "evaluate" else home
    second = home if command[0] == "evaluate" else tmp_path / "elsewhere"
    assert f"model.path: there is no models/sums in {first}, {second}, and the model root {root} (" in said
    rows = f"dataset.train_path: there is no data/rows.jsonl in {home}, {tmp_path / 'elsewhere'}, and the model root"
    assert f"{rows} {root} (" in said
    assert stack.submitted == []
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"roots.json", "stack.json"}, "nothing was started"


def test_a_name_of_a_hub_without_its_scheme_is_told_so(
    stack: FakeGateway, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", str(home / "job.toml"), "--set", "model.path=Qwen/Qwen3-0.6B"]) == 2
    assert 'nothing is downloaded by a path; of the hub it is written as "hub:Qwen/Qwen3-0.6B"' in (
        capsys.readouterr().err
    )
    assert run(["submit", str(home / "job.toml"), "--set", "dataset.train_path=openai/gsm8k"]) == 2
    assert 'in dataset = { type = "huggingface", path = "hub:openai/gsm8k" }' in capsys.readouterr().err


def test_another_machines_gateway_is_sent_the_paths_as_they_are_written(gateway: FakeGateway, home: Path) -> None:
    assert run(["submit", str(home / "job.toml"), "--json"]) == 0
    ((_, spec),) = gateway.submitted
    assert spec.model.path == "models/sums"


def test_resume_finds_what_is_set_in_the_current_folder_and_leaves_the_paths_of_the_job(
    stack: FakeGateway, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.spec = replace(
        stack.spec,
        dataset=JsonlDataset(train_path="data/rows.jsonl", file_digests={"data/rows.jsonl": "0" * 64}),
        model=replace(stack.spec.model, path="models/of-the-stack"),
    )
    stack.earlier = [CheckpointWritten(at_s=0.5, iteration=1, directory="c", weights_digest="0" * 64)]
    shutil.copytree(home / "data", Path("data"))
    (Path("data") / "held.jsonl").write_text('{"prompt": "1+1=", "reference": "2"}\n')
    change = ["--set", "dataset.evaluation_path=data/held.jsonl"]
    assert run(["resume", JOB, *change, "--iterations", "9"]) == 0
    ((_, spec),) = stack.submitted
    assert isinstance(spec.dataset, JsonlDataset)
    assert spec.dataset.train_path == "data/rows.jsonl"
    assert spec.dataset.evaluation_path == str(Path("data/held.jsonl").absolute())
    assert spec.model.path == "models/of-the-stack"
    assert run(["resume", JOB, "--set", "dataset.train_path=nowhere.jsonl", "--iterations", "9"]) == 2
    elsewhere = tmp_path / "elsewhere"
    places = f"there is no nowhere.jsonl in {elsewhere}, and the model root {tmp_path / 'root'} ("
    assert f"dataset.train_path: {places}" in capsys.readouterr().err


def test_a_campaigns_stack_reads_the_files_next_to_its_spec(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[StackOptions] = []

    class Stack:
        def __init__(self, options: StackOptions, **_: object) -> None:
            started.append(options)
            raise KeyboardInterrupt

    monkeypatch.setattr(chaos_command, "EmbeddedStack", Stack)
    assert run(["chaos", "--spec", str(home / "job.toml")]) == 130
    (options,) = started
    assert options.model_root == shipped_root()
    assert options.settings.extra_roots == str(home)


def test_doctor_finds_the_model_next_to_the_spec_and_says_which_files_are_nowhere(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(home / "job.toml")
    assert run(["doctor", "--spec", spec, "--no-load"]) == 0
    assert capsys.readouterr().out.startswith(f"{home / 'models' / 'sums'}, for a job")
    (home / "data" / "rows.jsonl").unlink()
    assert run(["doctor", "--spec", spec, "--no-load"]) == 1
    said = capsys.readouterr().out
    assert f"dataset.train_path: there is no data/rows.jsonl in {home}, {tmp_path / 'elsewhere'}, and the model" in said
    assert "attention" in said, "the model is looked at all the same"
    shutil.rmtree(home / "models")
    assert run(["doctor", "--spec", spec]) == 1
    assert f"model.path: there is no models/sums in {home}, {tmp_path / 'elsewhere'}, and" in capsys.readouterr().out
    assert run(["doctor", "models/sums"]) == 1
    assert f"there is no models/sums in {tmp_path / 'elsewhere'}, and the model root" in capsys.readouterr().out


def test_plan_knows_the_model_next_to_the_spec_as_that_of_the_measured_job(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = load_spec(home / "job.toml", [f"model.path={home / 'models' / 'sums'}"])
    folder = write_synchronous_run(tmp_path, measured)
    write_roots(folder.run_root, StackSettings(model_root=str(tmp_path / "root")))
    flags = ["--from", MEASURED_JOB, "--run-dir", str(folder.run_root)]
    assert run(["plan", str(home / "job.toml"), *flags]) == 0
    assert run(["plan", str(home / "job.toml"), *flags, "--set", "model.path=models/other"]) == 2
    assert "model.path: is models/other in the spec and " in capsys.readouterr().err
