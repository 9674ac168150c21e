"""Modules that lie next to a file of a user's own: its text takes them along to where the file isn't.

a file and its helpers ─▶ one text ─▶ the cage: `import helpers` finds it there, tracebacks have the lines of both files

The text is Python that anyone can read: it makes each module, then runs the file's own text under its own name.

Rewards of one job run in one process, and the helpers of two files in different folders may have one name. So a text
imports its own helpers by its own `__import__`, also when a function comes to the import only later.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import packages_distributions
from importlib.util import find_spec

HELPER_CURE = "put the helper into the same file, or install it where the reward service runs"
TAKE_ALONG = """
import builtins as _builtins
import linecache as _linecache
import os as _os
import sys as _sys
import types as _types


def _own_imports():
    helpers = {}
    usual_import = _builtins.__import__

    def own_import(name, globals=None, locals=None, fromlist=(), level=0):
        if level == 0 and name in helpers:
            return helpers[name]
        return usual_import(name, globals, locals, fromlist, level)

    return helpers, {**vars(_builtins), "__import__": own_import}


# Import statements of code with these builtins, here and in the helpers, find the helpers of this text first.
_own_helpers, __builtins__ = _own_imports()


def _take_along(name, text):
    file = _os.path.join(_os.path.dirname(globals().get("__file__", "")), name + ".py")
    module = _types.ModuleType(name)
    module.__file__ = file
    module.__builtins__ = __builtins__
    _own_helpers[name] = module
    _sys.modules[name] = module
    _linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec", dont_inherit=True), vars(module))
"""
"""Makes a module of a text, where the program that had it as a file isn't."""
RUN_FILE = """
def _run_file(text):
    file = globals()["__file__"]
    _linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec", dont_inherit=True), globals())
"""
"""Runs the file's own text in the place of the text that has brought it."""
TAKES, RUNS = "_take_along", "_run_file"
ABSENT = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
"""Exceptions whose handler is for a module that isn't there."""


class PackageNextToFile(Exception):
    """Says that a file imports a package, not a single module, that lies next to it. name: as it is imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def with_helpers(text: str, helpers: Mapping[str, str]) -> str:
    """Returns the text of a file that takes its helpers along; without any it stays as it is.

    Args:
        text: The file's own.
        helpers: Module → its text, each before those that import it.
    """
    if not helpers:
        return text
    modules = "".join(f"\n{TAKES}({name!r}, {helper!r})" for name, helper in helpers.items())
    return f"{TAKE_ALONG}\n{RUN_FILE}\n{modules}\n{RUNS}({text!r})\n"


def helpers_of(text: str, read: Callable[[str], str | None]) -> dict[str, str]:
    """Finds the modules that a text imports, and those that these import, next to its file.

    Args:
        text: Valid Python.
        read: Takes the name of a module, and returns its text; None where none lies next to the file. It raises
            PackageNextToFile for a package.

    Returns:
        Module → its text, each before those that import it.

    Raises:
        SyntaxError, ValueError: A helper is no valid Python.
    """
    helpers: dict[str, str] = {}
    for name, _ in imports_of(text):
        _add(name.partition(".")[0], helpers, read)
    return helpers


def _add(name: str, helpers: dict[str, str], read: Callable[[str], str | None]) -> None:
    if name in helpers or name in sys.stdlib_module_names:
        return
    text = read(name)
    if text is None or is_installed(name):
        return
    # A module that imports this one in turn meets it as half done, as next to the file.
    helpers[name] = text
    for other, _ in imports_of(text):
        _add(other.partition(".")[0], helpers, read)
    helpers[name] = helpers.pop(name)


def is_installed(module: str) -> bool:
    """Returns True for a module of an installed package, by the first part of its name."""
    return module in _installed()


@functools.cache
def _installed() -> frozenset[str]:
    # It reads the lists of all installed packages.
    return frozenset(packages_distributions())


def absent_import(source: str, file: str) -> str:
    """Says which module a text needs that this interpreter doesn't have; nothing is imported for it.

    Imports within functions count, too: a function may come to them only at its thousandth call. Those with a handler
    for a module that isn't there do not count.

    Args:
        source: Valid Python, with helpers or without.
        file: The file that it is of.

    Returns:
        The file, the line and the name, as an import of it would say it; "" where all are there.
    """
    texts = _texts_in(source)
    for taken, text in texts.items():
        for name, line in imports_of(text, skips_optional=True):
            top = name.partition(".")[0]
            if top not in texts and not _is_there(top):
                place = f"{taken}.py" if taken else file
                return f"{place}, line {line}: ModuleNotFoundError: No module named '{name}'"
    return ""


def _texts_in(source: str) -> dict[str, str]:
    """Returns module → text for what a text takes along; its own has the name ""."""
    if TAKE_ALONG not in source:
        return {"": source}
    texts: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        arguments = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        if node.func.id == TAKES:
            name, text = arguments
            texts[name] = text
        elif node.func.id == RUNS:
            (texts[""],) = arguments
    # The own text of a function of a program follows its helpers.
    return {"": source, **texts}


def _is_there(module: str) -> bool:
    if module in sys.modules:
        return True
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def imports_of(text: str, *, skips_optional: bool = False) -> list[tuple[str, int]]:
    """Returns the modules that a text imports by name, in its functions as well, each with its line.

    Args:
        text: Valid Python.
        skips_optional: True leaves out those that the text goes on without.
    """
    imports: list[tuple[str, int]] = []
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Import):
            imports += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            imports.append((node.module, node.lineno))
        parts = list(ast.iter_child_nodes(node))
        if skips_optional and isinstance(node, ast.Try) and _handles_absence(node):
            parts = [part for part in parts if part not in node.body]
        if skips_optional and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            parts = list(node.orelse)
        pending += parts
    return imports


def _handles_absence(node: ast.Try) -> bool:
    """Returns True where a handler is for a module that isn't there."""
    for handler in node.handlers:
        if handler.type is None:
            return True
        if any(isinstance(part, ast.Name) and part.id in ABSENT for part in ast.walk(handler.type)):
            return True
    return False
