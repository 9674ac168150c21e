"""`onbeat setup vllm`: the environment in which generators sample with vLLM, made and proved."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from contracts.engines import VARIABLE, TransformersOptions
from contracts.errors import InvalidInput
from contracts.settings import engine_from, settings_from
from onbeat.commands import options
from onbeat.doctor.cards import driver_version
from onbeat.installing.environment import Device, check_machine, is_finished, make_environment, version_of_vllm
from onbeat.installing.self_test import SelfTest, run_self_test
from onbeat.stack.vllm_python import FOLDER, has_vllm, python_of
from onbeat.terminal.output import console_for, tell
from onbeat.terminal.words import duration

VLLM = "vllm"


def setup(
    part: Annotated[str, typer.Argument(metavar="PART", help="What is set up: vllm.")],
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Folder of the environment. [.venv-vllm, where `onbeat up` looks]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda. [cuda where a GPU's driver answers]")
    ] = None,
    test: Annotated[
        bool, typer.Option("--test/--no-test", help="Train two iterations with it, about a minute, or don't.")
    ] = True,
    json_output: options.Json = False,
) -> None:
    """Make an environment in which generators sample with vLLM, and prove it by a short job."""
    if part != VLLM:
        raise InvalidInput(f"`{part}` is not known", field="PART", cure="onbeat setup vllm")
    _check_engine(test=test)
    console = console_for(json_output=json_output)
    if has_vllm():
        _refuse_without_effect(directory, device)
        python = sys.executable
        console.print("this Python has vLLM: one environment serves trainer and generators")
    else:
        check_machine()
        chosen = _device(device)
        folder = (directory or Path(FOLDER)).absolute()
        python = str(python_of(folder))
        if is_finished(folder):
            console.print(f"{folder} has all packages", soft_wrap=True)
        else:
            with console.status(f"installing vLLM for {chosen} into {folder}: some hundred megabytes, or gigabytes"):
                make_environment(folder, chosen)
    version = version_of_vllm(python)
    proof = None
    if test:
        with console.status("training two iterations that vLLM samples"):
            proof = run_self_test(python)
    tell(
        {"python": python, "vllm": version, "self_test": proof},
        Text(f"{_sentence(python, version, proof)}\n{_next_step(python, directory)}"),
        json_output=json_output,
    )


def _check_engine(*, test: bool) -> None:
    """Raises InvalidInput for a variable that would keep the self-test's stack from starting, before minutes pass."""
    if test and engine_from(os.environ) != TransformersOptions():
        raise InvalidInput(
            "has no effect here: the self-test names its engine",
            field=VARIABLE,
            cure="unset it for this command, or leave the test out by --no-test",
        )


def _refuse_without_effect(directory: Path | None, device: str | None) -> None:
    """Raises InvalidInput for a flag of an environment that isn't made."""
    for flag, value in (("--dir", directory), ("--device", device)):
        if value is not None:
            raise InvalidInput(
                "has no effect: this Python has vLLM, and generators run in it", field=flag, cure="leave it out"
            )


def _device(chosen: str | None) -> Device:
    """Returns what vLLM is to compute on.

    Args:
        chosen: What the flag says; None takes cuda where ONBEAT_DEVICE or a driver says that there is a GPU.
    """
    if chosen == "cpu":
        return "cpu"
    if chosen == "cuda":
        return "cuda"
    if chosen is not None:
        raise InvalidInput(f"`{chosen}` is neither cpu nor cuda", field="--device", cure="name one of the two")
    if settings_from(os.environ).device == "cuda" or driver_version():
        return "cuda"
    return "cpu"


def _sentence(python: str, version: str, proof: SelfTest | None) -> str:
    installed = f"vLLM {version} is at {python}"
    if proof is None:
        return f"{installed}; it was not tried"
    return (
        f"{installed}: it sampled {proof.completions} completions of {proof.iterations} iterations in "
        f"{duration(proof.wall_s)}, and their log-probs are the trainer's to {proof.largest_difference:.1g}"
    )


def _next_step(python: str, directory: Path | None) -> str:
    """Returns how a stack takes the environment: by itself, or, in a folder of the user's choice, by its path."""
    if directory is None:
        return "take it by: onbeat up --profile configs/stacks/vllm.toml"
    return f'take it by a profile whose [[generators]] have: python = "{python}"'
