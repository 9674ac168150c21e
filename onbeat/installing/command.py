"""`onbeat setup vllm`: the environment in which generators sample with vLLM, made and proved."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from contracts.errors import InvalidInput
from contracts.settings import settings_from
from onbeat.commands import options
from onbeat.doctor.versions import driver_version
from onbeat.installing.environment import Device, check_machine, is_finished, make_environment, version_of_vllm
from onbeat.installing.self_test import SelfTest, run_self_test
from onbeat.stack.vllm_python import FOLDER, has_vllm, python_of
from onbeat.terminal.output import console_for, tell
from onbeat.terminal.words import duration

VLLM = "vllm"


def setup(
    part: Annotated[str, typer.Argument(metavar="PART", help="What is set up: vllm.")],
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder of the environment, where `onbeat up` looks for it.")
    ] = Path(FOLDER),
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
    console = console_for(json_output=json_output)
    if has_vllm():
        python = sys.executable
        console.print("this Python has vLLM: one environment serves trainer and generators")
    else:
        check_machine()
        chosen = _device(device)
        python = str(python_of(directory.absolute()))
        if is_finished(directory):
            console.print(f"{directory} has all packages")
        else:
            with console.status(f"installing vLLM for {chosen} into {directory}: some hundred megabytes or gigabytes"):
                make_environment(directory, chosen)
    version = version_of_vllm(python)
    proof = None
    if test:
        with console.status("training two iterations that vLLM samples"):
            proof = run_self_test(python)
    tell(
        {"python": python, "vllm": version, "self_test": proof},
        Text(_sentence(python, version, proof)),
        json_output=json_output,
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
        raise InvalidInput(f"`{chosen}` is neither cpu nor cuda", field="--device")
    if settings_from(os.environ).device == "cuda" or driver_version():
        return "cuda"
    return "cpu"


def _sentence(python: str, version: str, proof: SelfTest | None) -> str:
    installed = f"vLLM {version} is at {python}"
    if proof is None:
        return f"{installed}; it was not tried"
    return (
        f"{installed}: it sampled {proof.completions} completions of {proof.iterations} iterations in "
        f"{duration(proof.wall_s)}, and their log-probs are the trainer's to {proof.largest_difference:.1g}. "
        "Take it by: onbeat up --profile configs/stacks/vllm.toml"
    )
