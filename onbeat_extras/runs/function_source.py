"""A function of a program as the text of a module of its own, with what it uses of the module that it stands in.

    import re as re
    SIGN = re.compile("-", 32)


    def signed(completion):
        return len(SIGN.findall(completion))

Modules and what they define are imported anew; numbers, texts, patterns and tables of them are written out; functions
and classes that stand beside the function come along. What else it uses is no text, and is refused by its name.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from contracts.errors import InvalidInput

HEAD = "from __future__ import annotations\n"


def source_of(function: Callable[..., Any]) -> tuple[str, str]:
    """(its name, the text). Raises InvalidInput for what has no text, or uses what has none."""
    name = getattr(function, "__name__", type(function).__name__)
    field = f"reward {name}"
    if not isinstance(function, FunctionType) or not name.isidentifier():
        raise InvalidInput("is no function with a name", field=field, cure="write it as `def my_reward(completion):`")
    if function.__closure__:
        around = ", ".join(function.__code__.co_freevars)
        raise InvalidInput(f"uses {around} of the function around it", field=field, cure="give it a module's level")
    module = _Module(function, field)
    module.define(name, function)
    return name, HEAD + "\n".join((*module.imports, *module.constants, *module.definitions))


class _Module:
    """What has been put into the text so far, each part before those that use it."""

    def __init__(self, function: FunctionType, field: str) -> None:
        self._names = function.__globals__
        self._home = function.__module__
        self._field = field
        self._done: set[str] = set()
        self.imports: list[str] = []
        self.constants: list[str] = []
        self.definitions: list[str] = []

    def define(self, name: str, value: FunctionType | type) -> None:
        """Adds a function or a class, and before it what it uses."""
        self._done.add(name)
        try:
            text = textwrap.dedent(inspect.getsource(value))
            code = compile(text, "", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
        except (OSError, TypeError, SyntaxError) as error:
            raise InvalidInput(
                f"the text of `{name}` can't be had: {error}", field=self._field, cure="write it into a file"
            ) from error
        if not any(getattr(statement, "name", "") == name for statement in ast.parse(text).body):
            raise InvalidInput(f"the text of `{name}` has no `def {name}`", field=self._field, cure="give it a `def`")
        for used in _names_of(code):
            if used not in self._done and used in self._names:
                self._add(used, self._names[used])
        self.definitions.append(f"\n\n{text.rstrip()}")

    def _add(self, name: str, value: Any) -> None:
        home, there = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if isinstance(value, FunctionType | type) and home == self._home:
            self.define(name, value)
            return
        self._done.add(name)
        if isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif there and home != "__main__" and getattr(sys.modules.get(home or ""), there, None) is value:
            self.imports.append(f"from {home} import {there} as {name}")
        elif isinstance(value, re.Pattern):
            self._done.add("re")
            self.imports.append("import re as re")
            self.constants.append(f"{name} = re.compile({value.pattern!r}, {value.flags})")
        elif _is_plain(value):
            self.constants.append(f"{name} = {value!r}")
        elif getattr(builtins, name, None) is not value:
            raise InvalidInput(
                f"uses `{name}`, a {type(value).__name__}, which can't be written down",
                field=self._field,
                cure="make it within the function, or put both into a file of their own below the model root",
            )


def _names_of(code: CodeType) -> Iterator[str]:
    """Names that the code, or a part of it, looks up in its module, in their order."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names_of(part)


def _is_plain(value: Any) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
