"""A new project is whole: its test passes, and its job is one that a stack takes, with data, reward and model."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from contracts.rewards import PluginReward, RewardItem
from contracts.settings import StackSettings
from gateway.submission import check_paths, with_sources
from onbeat.cli import run
from onbeat.client.spec_file import load_spec
from onbeat.data.datasets.loading import load_dataset
from onbeat.projects.template import FILES
from reward_service.scorers import plugin

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "my project"
    assert run(["init", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"data/sums.jsonl", "configs/models/two-digit-addition/config.json", *FILES} <= set(told["files"])
    return folder


def test_its_job_is_one_that_a_stack_takes(project: Path) -> None:
    settings = StackSettings(model_root=str(project), run_root=str(project / "runs"))
    spec = with_sources(load_spec(project / "configs" / "job.toml"), settings)
    check_paths(spec, settings)
    data = load_dataset(spec.dataset, num_evaluation=2, seed=0, model_root=settings.spec_root)
    assert (len(data.train), len(data.evaluation)) == (8, 2)
    (component,) = spec.reward.components
    assert isinstance(component, PluginReward)
    item = RewardItem(prompt="12+34=", completion="6", reference="64")
    assert plugin.score(component, item) == 0.5


def test_its_own_test_passes(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_its_program_names_what_is_there(project: Path) -> None:
    for name in FILES:
        if name.endswith(".py"):
            compile((project / name).read_text(), name, "exec")
    spec = tomllib.loads((project / "configs" / "job.toml").read_text())
    assert all((project / path).exists() for path in (spec["model"]["path"], spec["dataset"]["train_path"]))
    assert (project / spec["reward"]["components"][0]["file"]).exists()


def test_the_template_that_the_page_begins_with_is_a_job_of_its_stack(project: Path) -> None:
    """The first of page/src/submit/templates.ts, which spec_text.test.ts says is the demo."""
    demo = tomllib.loads((ROOT / "configs" / "demo.toml").read_text())
    assert (project / demo["model"]["path"] / "config.json").is_file()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert run(["init", str(tmp_path)]) == 2
    assert "is not empty (give a new folder, or empty this one)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
