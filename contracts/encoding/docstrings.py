"""Reads the text under each field of a record in its source: docs/configuration.md and /openapi.json have it."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

import msgspec


@cache
def field_docstrings(cls: type) -> dict[str, str]:
    """Returns field → the string literal under it, of the class and those that it inherits from, on one line.

    The map is empty where the sources are not next to the code.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base in (object, msgspec.Struct) or not issubclass(base, msgspec.Struct):
            continue
        definition = _classes_of(base.__module__).get(base.__qualname__)
        if definition is None:
            continue
        for statement, below in pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        docstrings[statement.target.id] = " ".join(text.split())
    return docstrings


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Returns a module's classes; it is parsed once, because `inspect.getsource` of a class reads all of it."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, KeyError):
        return {}
    return {statement.name: statement for statement in tree.body if isinstance(statement, ast.ClassDef)}
