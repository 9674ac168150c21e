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
from typing import Any

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
LOOK_AGAIN_S = 0.05


def guards_of(source: str) -> list[Guard]:
    text = (REPOSITORY / source).read_text()
    return lua_guards(source, text) if source.endswith(".lua") else python_guards(source, text)


def load_libraries() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)


def seconds_of(tests: Sequence[str]) -> float:
    """How long they take with every guard in place. Raises RuntimeError where they fail."""
    began_s = time.monotonic()
    code, said = _in_a_child(lambda: None, tests, deadline_s=3600.0)
    if code != 0:
        raise RuntimeError(f"{' '.join(tests)} fail by themselves ({code}):\n{said}")
    return time.monotonic() - began_s


def is_noticed(guard: Guard, tests: Sequence[str], *, deadline_s: float) -> bool:
    """Whether the tests notice that it was left out; one that hangs does.

    Raises RuntimeError where there are no such tests.
    """
    number = guards_of(guard.source).index(guard)
    leave_out = _without_lua(guard) if guard.source.endswith(".lua") else _without_python(guard.source, number)
    code, said = _in_a_child(leave_out, tests, deadline_s=deadline_s)
    if code not in (0, None, *FAILED):
        raise RuntimeError(f"{guard.name}: pytest ended with {code}:\n{said}")
    return code != 0


def _in_a_child(prepare: Callable[[], None], tests: Sequence[str], *, deadline_s: float) -> tuple[int | None, str]:
    """(pytest's exit code, or None past the deadline; the end of what it said)."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(REPOSITORY)
            prepare()
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=native", *tests])
            sys.stdout.flush()
            # What the tests left running belongs to the child alone.
            os._exit(int(code))
        code = _wait(child, deadline_s)
        output.seek(0)
        return code, output.read()[-3000:]


def _wait(child: int, deadline_s: float) -> int | None:
    ends_s = time.monotonic() + deadline_s
    while time.monotonic() < ends_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _kill_group(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(LOOK_AGAIN_S)
    _kill_group(child)
    os.waitpid(child, 0)
    return None


def _kill_group(child: int) -> None:
    """Kills the child and what a killed test left behind."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def _without_python(source: str, number: int) -> Callable[[], None]:
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

    def prepare() -> None:
        assert name not in sys.modules, f"{name} is imported already"
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]

    return prepare


def _without_lua(guard: Guard) -> Callable[[], None]:
    def prepare() -> None:
        folder = Path(tempfile.mkdtemp(prefix="mutant-"))
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
