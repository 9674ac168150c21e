"""What the Makefile runs by pytest is there, and is collected in an environment that has other packages than ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.mutants.kept import KEPT
from tests.mutants.run import guards_of
from tests.mutants.sources import TESTS

ROOT = Path(__file__).parents[2]
RECIPES = (ROOT / "Makefile").read_text().replace("\\\n", " ")
COLLECT = """
import sys
from importlib.machinery import PathFinder

class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)

ABSENT = frozenset(sys.argv[1].split(","))
sys.meta_path[:] = [Present if finder is PathFinder else finder for finder in sys.meta_path]

import pytest

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", *sys.argv[2:]]))
"""


def pytest_lines(interpreter: str) -> list[str]:
    """What a recipe gives pytest, run by an interpreter as the Makefile writes it."""
    return re.findall(rf"{re.escape(interpreter)} -m pytest(.*)", RECIPES)


def absent_modules(constraints: Path) -> set[str]:
    """Top-level modules that are installed here, of no package that the other environment lists."""
    listed = {re.split(r"[=\s@\[]", line)[0].lower().replace("_", "-") for line in constraints.read_text().splitlines()}
    return {
        module
        for module, packages in packages_distributions().items()
        if not {package.lower().replace("_", "-") for package in packages} & (listed | {"onbeat", "torch"})
    }


def test_every_test_file_that_a_target_names_exists() -> None:
    lines = re.findall(r"-m pytest(.*)", RECIPES)
    named = [name for line in lines for name in re.findall(r"tests/[\w/.]+", line)]
    assert len(lines) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_mutants_have_their_sources_their_tests_and_the_guards_that_are_kept() -> None:
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []
    assert [name for tests in TESTS.values() for name in tests if not (ROOT / name.partition("::")[0]).is_file()] == []
    assert set(KEPT) - {guard.name for source in TESTS for guard in guards_of(source)} == set()


def test_the_tests_of_the_vllm_environment_are_collected_with_its_packages_alone() -> None:
    absent = absent_modules(ROOT / "constraints-vllm.txt")
    if sys.version_info < (3, 11, 3):
        absent -= {"async_timeout"}  # redis asks pip for it there
    assert {"hypothesis"} <= absent
    assert not {"pytest", "torch", "transformers", "msgspec"} & absent
    (line,) = pytest_lines("$(VLLM)/bin/python")
    arguments = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', line)]
    found = subprocess.run(
        [sys.executable, "-c", COLLECT, ",".join(sorted(absent)), *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
    assert "tests/rooms/engines/test_vllm_engine.py" in found.stdout


@pytest.mark.parametrize("is_withdrawn", [True, False])
def test_the_audit_finds_a_version_that_its_publisher_has_withdrawn(tmp_path: Path, is_withdrawn: bool) -> None:
    index = tmp_path / "simple" / "mine"
    index.mkdir(parents=True)
    info = "mine-1.0.dist-info"
    with ZipFile(index / "mine-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    yanked = ' data-yanked="it is broken"' if is_withdrawn else ""
    (index / "index.html").write_text(f'<a href="mine-1.0-py3-none-any.whl"{yanked}>mine-1.0-py3-none-any.whl</a>')
    place = (f"--index-url=file://{index.parent}", "--isolated", f"--target={tmp_path / 'installed'}")
    options = ("-q", "--no-deps", f"--log={tmp_path / 'pip-core.log'}", *place)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "mine==1.0"], check=True, capture_output=True)
    (recipe,) = re.findall(r"\t(! grep .*yanked.*)", RECIPES)
    audit = subprocess.run(
        ["sh", "-c", recipe.replace("$(VENV)", str(tmp_path))], capture_output=True, text=True, check=False
    )
    assert (audit.returncode != 0, "it is broken" in audit.stdout) == (is_withdrawn, is_withdrawn)
