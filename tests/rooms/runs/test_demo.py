"""The demo from submission to summary, over a real HTTP gateway with a finished job; no process is started."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from contracts.encoding.wire import encode_json
from contracts.errors import InvalidInput, Unavailable
from contracts.jobs import HealthProblem, JobState
from contracts.run_folder import RunFolder
from onbeat.commands.stacks.up import _stack_panel
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from onbeat.training import driver
from onbeat.training.command import summary_panel
from onbeat.training.demo import DemoSummary, run_demo
from tests.e2e.stand_in_gateway import JOB, FakeGateway, digest
from tests.rooms.runs.running_stack import RunningStack, running_gateway, stacks
from tests.unit.onbeat.terminal.test_output import HOSTILE, assert_is_text, terminal


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    with running_gateway(monkeypatch) as server:
        yield server


def stack_options(tmp_path: Path) -> StackOptions:
    return StackOptions(run_root=tmp_path / "runs", model_root=tmp_path, fresh=True)


def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_a_demo_sums_up_what_the_gateway_told_and_writes_it_into_the_run_folder(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    summary = run_demo(gateway.spec, stack_options(tmp_path), console())
    assert summary.succeeded
    assert (summary.iterations, summary.batches_trained, summary.batches_rejected) == (2, 2, {"stale": 1})
    assert (summary.eval_before, summary.eval_after) == (0.4, 0.7)
    assert (summary.reward_first, summary.reward_last) == (0.5, 0.75)
    assert (summary.wall_s, summary.tokens_per_s) == (4.5, 20.0)
    assert (summary.final_policy_version, summary.final_weights_digest) == (2, digest(2))
    folder = RunFolder((tmp_path / "runs").resolve(), JOB)
    assert (folder.path / "summary.json").read_bytes() == encode_json(summary) + b"\n"
    assert (folder.path / "audit.json").exists()
    assert summary.figures == (str(folder.path / "reward_curve.png"),)
    assert stacks[0].num_stops >= 1


def test_the_commands_to_try_next_name_the_folder_of_the_run(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONBEAT_RUN_ROOT", raising=False)
    summary = run_demo(gateway.spec, stack_options(tmp_path), console())
    running = SimpleNamespace(gateway_url="", options=stack_options(tmp_path), pids={}, logs=tmp_path / "logs")
    for folder, flag in ((tmp_path, ""), (tmp_path.parent, f" --run-dir {tmp_path.name}/runs")):
        monkeypatch.chdir(folder)
        shown = console()
        shown.print(summary_panel(summary))
        shown.print(_stack_panel(cast(EmbeddedStack, running)))
        assert isinstance(shown.file, io.StringIO)
        lines = [" ".join(line.strip("│ \n").split()) for line in shown.file.getvalue().splitlines()]
        assert f"try onbeat export {JOB} my-model{flag}" in lines
        assert f"try onbeat submit configs/demo.toml --wait{flag}" in lines


def test_a_demo_without_matplotlib_succeeds_and_says_in_one_line_what_draws_its_pictures(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What Python finds here it imports no more: as in an environment without the package.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    summary = run_demo(gateway.spec, stack_options(tmp_path), console())
    assert (summary.succeeded, summary.figures) == (True, ())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the reward curve and the timeline are not drawn: import of matplotlib halted; ")
    assert line.endswith("(`pip install matplotlib` draws them next time)")
    folder = RunFolder((tmp_path / "runs").resolve(), JOB)
    assert (folder.path / "summary.json").read_bytes() == encode_json(summary) + b"\n"


def test_a_failed_job_does_not_succeed_and_is_shown_with_its_reason(gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.final = JobState.FAILED
    summary = run_demo(gateway.spec, stack_options(tmp_path), console())
    assert not summary.succeeded
    assert (summary.status, summary.reason) == ("failed", "the loss is not finite")


def test_a_run_with_a_gap_does_not_succeed_and_names_it(gateway: FakeGateway, tmp_path: Path) -> None:
    weights = RunFolder(tmp_path / "runs", JOB).weights_of(1)

    class Tampered(RunningStack):
        def stop(self) -> None:
            super().stop()
            weights.mkdir(parents=True, exist_ok=True)
            (weights / "a.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "EmbeddedStack", Tampered)
        summary = run_demo(gateway.spec, stack_options(tmp_path), console())
    assert (summary.status, summary.verified) == ("succeeded", False)
    assert not summary.succeeded
    shown = console()
    shown.print(summary_panel(summary))
    assert isinstance(shown.file, io.StringIO)
    assert "not succeeded" in shown.file.getvalue()
    assert f"{JOB}/weights/v000001: the files have digest" in shown.file.getvalue()


@pytest.mark.parametrize(("problem", "kept"), [(InvalidInput("no"), False), (Unavailable("broke"), True)])
def test_bad_input_leaves_nothing_behind_but_a_broken_service_leaves_its_logs(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, kept: bool
) -> None:
    monkeypatch.setattr(RunningStack, "problem", problem)
    with pytest.raises(type(problem)):
        run_demo(gateway.spec, stack_options(tmp_path), console())
    assert stacks[0].num_stops >= 1
    assert (tmp_path / "runs").exists() is kept


def test_the_summary_has_every_key_that_scripts_read(gateway: FakeGateway, tmp_path: Path) -> None:
    keys = json.loads(encode_json(run_demo(gateway.spec, stack_options(tmp_path), console()))).keys()
    assert {
        *("job_id", "status", "schedule", "iterations", "wall_s", "eval_before", "eval_after", "reward_first"),
        *("reward_last", "final_policy_version", "final_weights_digest", "batches_trained", "batches_rejected"),
        *("verified", "run_dir", "figures"),
    } <= keys


def test_what_others_wrote_is_text_in_the_summary() -> None:
    names = DemoSummary.__struct_fields__
    known = {"reason": HOSTILE, "run_dir": HOSTILE, "gaps": (HOSTILE,), "status": "failed", "final_weights_digest": ""}
    values = dict.fromkeys(names, 0) | {
        "batches_rejected": {},
        "figures": (),
        "health": (),
        "health_past": (HealthProblem(rule="mismatch_unusual", since=0, until=2, problem=HOSTILE, cure=HOSTILE),),
        "verified": False,
        "job_id": "job-1",
    }
    screen, shown = terminal()
    screen.print(summary_panel(DemoSummary(**values | known)))  # pyright: ignore[reportArgumentType]
    assert_is_text(shown.getvalue())
