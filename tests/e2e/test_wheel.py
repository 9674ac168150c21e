"""The wheel alone: what is in it, and what a reader does first, in an empty folder, without a checkout.

`make test` builds the wheel and runs it from the folder into which it was unpacked, with the packages of this
interpreter. `make test-wheel` installs it by pip into an empty environment, and does the longer things there, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

from onbeat.base.process.own_packages import PACKAGES

ROOT = Path(__file__).parents[2]
INSTALLED = "TEST_WHEEL"
"""Environment variable: set by `make test-wheel`."""
COMMAND_DEADLINE_S = 600.0
SHIPPED = "onbeat/shipped/"
NOT_SHIPPED = ("configs/models/README.md", "configs/models/make_")
"""How the names of those files of configs/ begin that only a checkout has: programs that make models and data."""
needs_installation = pytest.mark.skipif(INSTALLED not in os.environ, reason="`make test-wheel` installs the wheel")


@dataclass(frozen=True)
class Installation:
    """An Onbeat that isn't the checkout's, and an empty folder to work in."""

    python: Path
    variables: dict[str, str]
    folder: Path

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Runs a command of the installation's Python, such as `-m onbeat …`, and returns its output.

        Args:
            command: The arguments after the interpreter.
            folder: The working folder; None takes the empty one.
        """
        done = subprocess.run(
            [self.python, *command],
            cwd=folder or self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *command: str) -> dict[str, object]:
        return json.loads(self.run("-m", "onbeat", *command, "--json"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    script = ["sh", str(ROOT / "deploy" / "build-wheel.sh"), str(folder)]
    done = subprocess.run(script, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("onbeat-*.whl")
    return path


@pytest.fixture(scope="module")
def python_of_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """(interpreter, environment variables) by which the wheel's Onbeat runs."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    variables.pop("PYTHONPATH", None)
    folder = tmp_path_factory.mktemp("installation")
    if INSTALLED not in os.environ:
        ZipFile(wheel).extractall(folder)
        return Path(sys.executable), variables | {"PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    # Wheels alone: a machine without a compiler can do this.
    install = [python, "-m", "pip", "install", "-q", "--only-binary", ":all:", wheel]
    done = subprocess.run(install, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return python, variables


@pytest.fixture
def installation(python_of_wheel: tuple[Path, dict[str, str]], tmp_path: Path) -> Installation:
    python, variables = python_of_wheel
    return Installation(python, variables, tmp_path)


def tracked(*patterns: str) -> set[str]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git clone")
    return set(filter(None, listed.stdout.split("\0")))


def names_of_packages() -> Iterator[str]:
    """Yields the files of our packages, and the shipped ones by the names that they have in a wheel."""
    for name in tracked(*PACKAGES):
        if not name.startswith(SHIPPED):
            yield name
    for name in tracked("configs", "constraints*.txt", "requirements/vllm"):
        if not name.startswith((*NOT_SHIPPED, "constraints-verifiers")):
            yield f"{SHIPPED}{name}"


def test_the_wheel_has_every_file_of_the_packages_and_of_configs_and_no_other(wheel: Path) -> None:
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == set(names_of_packages())


def test_the_wheels_specs_and_models_are_those_of_the_checkout(wheel: Path) -> None:
    archive = ZipFile(wheel)
    shipped = [name for name in archive.namelist() if name.startswith(SHIPPED)]
    assert f"{SHIPPED}configs/models/two-digit-addition/model.safetensors" in shipped
    for name in shipped:
        assert archive.read(name) == (ROOT / name.removeprefix(SHIPPED)).read_bytes(), name


def test_the_source_distribution_has_no_link_and_every_file_of_the_wheel(built: Path, wheel: Path) -> None:
    (path,) = built.glob("onbeat-*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.islnk() or member.issym()] == []
    sources = {member.name.partition("/")[2] for member in members}
    assert {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name} <= sources


def test_every_path_below_configs_that_a_shipped_spec_names_is_shipped(wheel: Path) -> None:
    """The specs of SmolLM2 name `models/…`, which configs/models/make_smollm2_135m.py writes."""
    names = set(ZipFile(wheel).namelist())
    paths = {
        (name, path)
        for name in tracked("configs/*.toml")
        for path in re.findall(r'"(configs/[^"]+)"', (ROOT / name).read_text())
    }
    assert ("configs/demo.toml", "configs/models/two-digit-addition") in paths
    for name, path in paths:
        assert {f"{SHIPPED}{path}", f"{SHIPPED}{path}/model.safetensors"} & names, f"{name} names {path}"


def test_an_empty_folder_finds_specs_models_and_pins_in_the_wheel(installation: Installation) -> None:
    program = (
        "from onbeat.base.shipped import is_checkout, own_or_shipped, shipped_root\n"
        "from onbeat.client.spec_file import load_spec\n"
        "from onbeat.commands.options import model_root_or_default\n"
        "from onbeat.doctor.versions import PINS, pins\n"
        "from pathlib import Path\n"
        "spec = load_spec(Path('configs/demo.toml'))\n"
        "folder = model_root_or_default(None) / spec.model.path\n"
        "print(is_checkout(), (folder / 'model.safetensors').stat().st_size, pins(PINS)['transformers'])\n"
        "print(shipped_root())\n"
    )
    first, root = installation.run("-c", program).splitlines()
    assert first == "False 815800 5.19.0"
    assert not Path(root).is_relative_to(ROOT)


def test_init_writes_its_project_from_the_wheel(installation: Installation) -> None:
    answer = installation.json("init", "my-project")
    files = answer["files"]
    assert isinstance(files, Sequence)
    assert {"configs/job.toml", "train.py", "configs/models/two-digit-addition/model.safetensors"} <= set(files)
    model = installation.folder / "my-project/configs/models/two-digit-addition/model.safetensors"
    assert model.read_bytes() == (ROOT / "configs/models/two-digit-addition/model.safetensors").read_bytes()


def test_the_demo_of_the_wheel_trains_and_verifies_in_an_empty_folder(installation: Installation) -> None:
    summary = installation.json("demo", "--set", "iterations=2", "--set", "evaluation.num_prompts=0")
    assert (summary["status"], summary["verified"], summary["iterations"]) == ("succeeded", True, 2)
    assert [path.name for path in installation.folder.iterdir()] == ["runs"]


@needs_installation
def test_doctor_finds_no_fault_of_the_installation(installation: Installation) -> None:
    findings = installation.json("doctor")["findings"]
    assert isinstance(findings, Sequence)
    levels = {finding["subject"]: finding["level"] for finding in findings}
    assert levels["packages"] == "ok"
    assert "bad" not in levels.values(), findings


@needs_installation
def test_the_program_of_a_new_project_trains_and_saves(installation: Installation) -> None:
    installation.json("init", "my-project")
    project = installation.folder / "my-project"
    output = installation.run("train.py", "2", folder=project)
    assert [line.split()[0] for line in output.splitlines()] == ["0", "1", "verified"]
    (trained,) = project.glob("trained-job-*")
    assert (trained / "model.safetensors").is_file()


@needs_installation
def test_a_stack_in_the_background_takes_a_shipped_spec_and_goes_down(installation: Installation) -> None:
    up = installation.json("up", "--detach")
    page = "import httpx, sys; answer = httpx.get(sys.argv[1]); print(answer.status_code, '<html' in answer.text)"
    try:
        assert installation.run("-c", page, f"{up['gateway_url']}/").split() == ["200", "True"]
        changes = ("--set", "iterations=2", "--set", "evaluation.num_prompts=0")
        installation.run("-m", "onbeat", "submit", "configs/demo.toml", *changes, "--wait")
        jobs = installation.json("jobs")["jobs"]
        assert isinstance(jobs, Sequence)
        assert [job["state"] for job in jobs] == ["succeeded"]
    finally:
        installation.run("-m", "onbeat", "down")
    assert not (installation.folder / "runs" / "stack.json").exists()
