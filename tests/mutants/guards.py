"""What can be left out of a source: conditions of a raise or an early return, refusals of a spec, Lua's guards."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

LUA_GUARD = re.compile(r"\s*if .+ then return\b.* end")
WORDS_OF_A_NAME = 140


@dataclass(frozen=True, kw_only=True)
class Guard:
    """One condition; a mutant is the source without it."""

    source: str
    """Path below the repository, e.g. "consumer/trainer/start.py"."""
    place: str
    """The function that it stands in; "" in a script."""
    text: str
    """The condition; of a script the line."""
    copy: int = 0
    """The number among guards of the same text in the same place, in order."""
    line: int
    """Where a reader finds it; not in its name, so that the name stays when lines before it come or go."""

    @property
    def name(self) -> str:
        """`consumer/trainer/start.py restart: at is None`"""
        again = f" #{self.copy + 1}" if self.copy else ""
        return f"{self.source} {self.place}: {self.text}{again}" if self.place else f"{self.source} {self.text}{again}"


def python_guards(source: str, text: str) -> list[Guard]:
    """The guards of a module, in the order of the source."""
    found: list[Guard] = []
    for place, condition in _conditions(ast.parse(text), ""):
        words = ast.unparse(condition)[:WORDS_OF_A_NAME]
        copy = sum((guard.place, guard.text) == (place, words) for guard in found)
        found.append(Guard(source=source, place=place, text=words, copy=copy, line=condition.lineno))
    return found


def without_python_guard(text: str, number: int) -> ast.Module:
    """The module with that condition of `python_guards` replaced by False."""
    tree = ast.parse(text)
    _Replaced([condition for _, condition in _conditions(tree, "")][number]).visit(tree)
    return tree


def lua_guards(source: str, text: str) -> list[Guard]:
    """Lines that return early: `if … then return … end`."""
    found: list[Guard] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if LUA_GUARD.fullmatch(line):
            words = line.strip()
            copy = sum(guard.text == words for guard in found)
            found.append(Guard(source=source, place="", text=words, copy=copy, line=number))
    return found


def without_line(text: str, line: int) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: line - 1], "\n", *lines[line:]])


class _Replaced(ast.NodeTransformer):
    def __init__(self, target: ast.expr) -> None:
        self._target = target

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._target:
            return ast.copy_location(ast.Constant(value=False), node)
        return super().visit(node)


def _conditions(node: ast.AST, place: str) -> Iterator[tuple[str, ast.expr]]:
    """(function, condition) of what guards a raise or a return, and the first of a refusal's (broken, problem)."""
    for child in ast.iter_child_nodes(node):
        inside = place
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{place}.{child.name}" if place else child.name
        if isinstance(child, ast.If) and any(isinstance(one, ast.Raise | ast.Return) for one in child.body):
            yield place, child.test
        if isinstance(child, ast.Yield) and isinstance(child.value, ast.Tuple) and "refusals" in place:
            yield place, child.value.elts[0]
        yield from _conditions(child, inside)
