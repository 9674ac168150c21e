"""A package of ours that is a stranger's: nothing of it is run, and what refuses it names both sides and the cure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from onbeat.base.process import own_packages
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.ports import free_port

STRANGER = 'raise SystemExit("the stranger ran")\n'
ENTRIES = ("onbeat", "gateway", "reward_service", "producer", "consumer", "consumer.supervisor")


def stranger(folder: Path, package: str) -> Path:
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(STRANGER)
    return folder


def start(module: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-m", module]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("module", ENTRIES)
def test_each_entry_refuses_to_run_beside_a_package_of_the_same_name(module: str, tmp_path: Path) -> None:
    done = start(module, stranger(tmp_path, "contracts"))
    assert done.returncode == 2
    assert f"package `contracts` is that of {tmp_path / 'contracts'}, and not of onbeat" in done.stderr
    assert "an environment of its own" in done.stderr
    assert "the stranger ran" not in done.stderr


def test_a_folder_of_our_name_in_the_working_directory_is_not_taken_for_ours(tmp_path: Path) -> None:
    for package in own_packages.PACKAGES:
        stranger(tmp_path, package)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "ONBEAT_PORT": str(free_port())
    }
    command = (sys.executable, "-m", "gateway")
    child = ChildProcess("gateway", command=command, environment=environment, log_path=tmp_path / "log", cwd=tmp_path)
    child.start()
    assert child.wait(300.0)
    assert child.exit_code == 2
    assert "ONBEAT_API_KEY" in child.tail(), "it is our gateway, which misses its key"


def installed(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """As pip leaves a wheel: the files, and a list of them with their sizes."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{path},,{len(text.encode())}\n" for path, text in files.items()))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages with nothing but Onbeat in it."""
    files = {f"{package}/__init__.py": "" for package in own_packages.PACKAGES}
    check = Path(own_packages.__file__).read_text()
    installed(
        tmp_path / "site",
        "onbeat",
        "0.1.0",
        {**files, "onbeat/base/process/own_packages.py": check, "broker/keys.py": "A"},
    )
    return tmp_path / "site"


def check_of(*path: Path) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path[:0] = {[str(one) for one in path]}; import onbeat.base.process.own_packages"
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_an_installation_alone_passes_and_so_does_one_that_its_owner_has_patched(site: Path) -> None:
    assert check_of(site).returncode == 0
    (site / "broker" / "keys.py").write_text("A = 1  # tried out")
    shutil.rmtree(site / "producer")
    done = check_of(site)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_distribution_that_was_installed_over_our_files_is_named(site: Path) -> None:
    installed(site, "message-broker", "2.5", {"broker/__init__.py": "", "broker/keys.py": "their keys"})
    done = check_of(site)
    assert done.returncode == 2
    assert "broker/keys.py is that of message-broker 2.5" in done.stderr
    assert "onbeat's; give Onbeat an environment of its own" in done.stderr


def test_a_distribution_in_an_earlier_folder_is_named(site: Path, tmp_path: Path) -> None:
    installed(tmp_path / "user", "data-contracts", "1.0", {"contracts/__init__.py": STRANGER})
    done = check_of(tmp_path / "user", site)
    assert done.returncode == 2
    assert "package `contracts` is that of data-contracts 1.0" in done.stderr
    assert f"and not of onbeat ({site})" in done.stderr


@pytest.mark.parametrize(
    ("main", "other", "ours"),
    [
        ("onbeat.__main__", "", True),
        ("consumer.host_rank", "", True),
        ("", "onbeat.__main__", True),
        ("", "onbeat.training.run", False),
        ("onbeats.program", "", False),
        ("pytest.__main__", "", False),
    ],
)
def test_only_a_program_of_ours_ends_without_a_traceback_on_ctrl_c(main: str, other: str, ours: bool) -> None:
    program = ModuleType("__main__")
    program.__spec__ = ModuleSpec(main, None) if main else None
    assert own_packages.is_ours({"__main__": program, other: program}) is ours
