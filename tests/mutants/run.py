"""Runs tests with one guard left out: a fork of a process that has the large libraries in it, and nothing of ours.

No file is changed: an import hook gives the child the mutated module, or `broker.connection.script_texts` other
scripts. What a test starts as a process of its own has every guard of a module.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, NamedTuple

import pytest

from tests.mutants.guards import Guard, lua_guards, python_guards, without_line, without_python_guard

REPOSITORY = Path(__file__).parents[2]
LIBRARIES = (
    "torch",
    "numpy",
    "transformers",
    "hypothesis",
    "httpx",
    "redis",
    "msgspec",
    "safetensors.torch",
    "starlette",
)
FAILED = (int(pytest.ExitCode.TESTS_FAILED), int(pytest.ExitCode.INTERRUPTED))
"""Exit codes of a test that notices the missing guard, or can't import the module without it."""
TEST_DEADLINE_S = 120.0
"""Longest time of one test, with its fixtures: without a guard that ends a loop it hangs."""
LOOK_AGAIN_S = 0.05


class Verdict(NamedTuple):
    """How tests end."""

    test: str
    """The one that fails or hangs, or the file that can't be imported; "" where none does."""
    hangs: bool
    seconds: float


def guards_of(source: str) -> list[Guard]:
    text = (REPOSITORY / source).read_text()
    return lua_guards(source, text) if source.endswith(".lua") else python_guards(source, text)


def load_libraries() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)


def without_any_left_out(tests: Sequence[str]) -> Verdict:
    """With every guard in place."""
    return _verdict(lambda folder: None, tests)


def without(guard: Guard, tests: Sequence[str]) -> Verdict:
    """With the guard left out. Raises RuntimeError where there are no such tests."""
    number = guards_of(guard.source).index(guard)
    return _verdict(
        _without_lua(guard) if guard.source.endswith(".lua") else _without_python(guard.source, number), tests
    )


def _verdict(prepare: Callable[[Path], None], tests: Sequence[str]) -> Verdict:
    """A test that fails has to do so alone as well: else it failed by chance, and the others are asked without it."""
    by_chance: list[str] = []
    while True:
        verdict = _in_a_child(prepare, [*tests, *by_chance])
        if verdict.hangs or not verdict.test or _in_a_child(prepare, [verdict.test]).test:
            return verdict
        by_chance.append(f"--deselect={verdict.test}")


def _in_a_child(prepare: Callable[[Path], None], tests: Sequence[str]) -> Verdict:
    """prepare: is told a folder that goes with the child."""
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as names,
    ):
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(REPOSITORY)
            prepare(Path(folder))
            arguments = ["-x", "-q", "-p", "no:cacheprovider", "--tb=native", f"--basetemp={folder}/tests", *tests]
            code = pytest.main(arguments, plugins=[_Names(names, tests)])
            sys.stdout.flush()
            # What the tests left running belongs to the child alone.
            os._exit(int(code))
        code = _wait(child, names)
        output.seek(0)
        names.seek(0)
        name = names.read().splitlines()[-1:]
        if code == 0:
            name = [""]
        elif code not in (None, *FAILED) or not name:
            raise RuntimeError(f"{' '.join(tests)}: pytest ended with {code}:\n{output.read()[-3000:]}")
        return Verdict(name[0], hangs=code is None, seconds=time.monotonic() - began_s)


class _Names:
    """A plugin of pytest that writes each test's name as it begins, and last the name of what failed."""

    def __init__(self, file: IO[str], tests: Sequence[str]) -> None:
        self._file = file
        self._files = [test.partition("::")[0] for test in tests]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """In the order that was asked for: tests/conftest.py mixes files."""
        items.sort(key=lambda item: self._files.index(item.nodeid.partition("::")[0]))

    def _write(self, name: str) -> None:
        self._file.write(f"{name}\n")
        self._file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid)


def _wait(child: int, names: IO[str]) -> int | None:
    """The exit code; None of one that hangs: no other test has begun for too long."""
    try:
        while time.time() - os.fstat(names.fileno()).st_mtime < TEST_DEADLINE_S:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(LOOK_AGAIN_S)
        return None
    finally:
        _kill_group(child)


def _kill_group(child: int) -> None:
    """Kills the child and what a killed test left behind."""
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _without_python(source: str, number: int) -> Callable[[Path], None]:
    name = source.removesuffix(".py").replace("/", ".")

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> CodeType:
            text = (REPOSITORY / source).read_text()
            return compile(without_python_guard(text, number), self.path, "exec", dont_inherit=True)

    class Finder:
        @staticmethod
        def find_spec(fullname: str, path: Any, target: ModuleType | None = None) -> Any:
            if fullname != name:
                return None
            return importlib.util.spec_from_file_location(
                fullname, REPOSITORY / source, loader=Loader(fullname, str(REPOSITORY / source))
            )

    def prepare(folder: Path) -> None:
        assert name not in sys.modules, f"{name} is imported already"
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]

    return prepare


def _without_lua(guard: Guard) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        scripts = REPOSITORY / "broker" / "scripts"
        shutil.copytree(scripts, folder / "scripts")
        mutated = folder / "scripts" / Path(guard.source).name
        mutated.write_text(without_line(mutated.read_text(), guard.line))
        texts: Any = importlib.import_module("broker.connection.script_texts")
        # Named as the unharmed one: processes that a test starts call it too, and don't fail for want of their own.
        name = texts.library_name()
        for kept in (texts.library_text, texts.scripts, texts.argument_names):
            kept.cache_clear()
        texts.library_name = lambda: name
        texts.SCRIPTS = folder / "scripts"
        texts.PRELUDE = (folder / "scripts" / "prelude.lua").read_text()

    return prepare
