"""What the source says under each field of a record: the words of docs/configuration.md, and of /openapi.json."""

from __future__ import annotations

import ast
import inspect
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
        try:
            body = ast.parse(inspect.getsource(base)).body[0]
        except OSError:
            continue
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        docstrings[statement.target.id] = " ".join(text.split())
    return docstrings
