"""What the source says under each field of a record: the words of docs/configuration.md, and of /openapi.json."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache

import msgspec


@cache
def field_docstrings(cls: type) -> dict[str, str]:
    """Field → the string literal under it, of the class and those that it inherits from, on one line.

    It is empty where the sources are not beside the code.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base in (object, msgspec.Struct) or not issubclass(base, msgspec.Struct):
            continue
        body = _classes_of(base.__module__).get(base.__qualname__)
        for statement, below in zip(body.body, body.body[1:], strict=False) if body else ():
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        docstrings[statement.target.id] = " ".join(text.split())
    return docstrings


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """A module's classes; it is parsed once, because `inspect.getsource` of a class reads all of it."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, KeyError):
        return {}
    return {statement.name: statement for statement in tree.body if isinstance(statement, ast.ClassDef)}
