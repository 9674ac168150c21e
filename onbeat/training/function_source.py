"""A function or class of a program as the text of a module of its own, with what it uses of the module around it.

    import re as re
    SIGN = re.compile("-", 32)


    def signed(completion):
        return len(SIGN.findall(completion))

Installed modules and what they define are imported anew; numbers, texts, patterns and tables of them are written out;
functions and classes that stand next to the function come along, and so does the whole text of a module that lies next
to the program. What else it uses is no text, and is refused by its name.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from contracts.errors import InvalidInput
from onbeat.base.cage.helper_modules import HELPER_CURE, TAKE_ALONG, TAKES, imports_of, is_installed

HEAD = "from __future__ import annotations\n"


def source_of(*values: Callable[..., Any], field: str = "reward") -> str:
    """The text that defines functions and classes of one module, by their names.

    Raises InvalidInput for one that has no text, or uses what has none.
    """
    module: _Module | None = None
    for value in values:
        name = name_of(value, field)
        if module is None:
            module = _Module(value, f"{field} {name}")
        module.add(name, value)
    assert module is not None
    return module.text()


def name_of(value: Callable[..., Any], field: str) -> str:
    """Raises InvalidInput for what has none."""
    name = getattr(value, "__name__", type(value).__name__)
    if not isinstance(value, FunctionType | type) or not name.isidentifier():
        raise InvalidInput(
            "is no function with a name", field=f"{field} {name}", cure="write it as `def my_reward(completion):`"
        )
    return name


class _Module:
    """The text of a module so far, each part before those that use it."""

    def __init__(self, first: Callable[..., Any], field: str) -> None:
        self._home = first.__module__
        method = _method_of(first) if isinstance(first, type) else first
        self._names = method.__globals__ if isinstance(method, FunctionType) else vars(sys.modules[self._home])
        self._field = field
        self._done: set[str] = set()
        self._taken: dict[str, str] = {}
        """Module next to the program → its text, each before those that import it."""
        self.imports: list[str] = []
        self.constants: list[str] = []
        self.definitions: list[str] = []

    def add(self, name: str, value: FunctionType | type) -> None:
        """Adds one of those that are asked for."""
        if value.__module__ != self._home:
            raise InvalidInput(
                f"`{name}` is of {value.__module__}, not of {self._home}",
                field=self._field,
                cure="write both in one file",
            )
        around = "the names"
        if isinstance(value, FunctionType):
            around = ", ".join(value.__code__.co_freevars)
        if around and (isinstance(value, FunctionType) or "<locals>" in value.__qualname__):
            problem = f"uses {around} of the function around it"
            raise InvalidInput(problem, field=self._field, cure="give it a module's level")
        if name not in self._done:
            self.define(name, value)

    def text(self) -> str:
        head = HEAD
        if self._taken:
            modules = "".join(f"\n{TAKES}({name!r}, {text!r})" for name, text in self._taken.items())
            head += f"{TAKE_ALONG}\n{modules}\n"
        return head + "\n".join((*self.imports, *self.constants, *self.definitions))

    def define(self, name: str, value: FunctionType | type) -> None:
        """Adds a function or a class, and before it what it uses."""
        self._done.add(name)
        try:
            text = textwrap.dedent(_text_of(value))
            code = compile(text, "", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
        except (OSError, TypeError, SyntaxError) as error:
            raise InvalidInput(
                f"the source of `{name}` cannot be read: {error}", field=self._field, cure="write it into a file"
            ) from error
        if not any(getattr(statement, "name", "") == name for statement in ast.parse(text).body):
            raise InvalidInput(f"the source of `{name}` has no `def {name}`", field=self._field, cure="give it a `def`")
        for used in _names_of(code):
            if used not in self._done and used in self._names:
                self._add(used, self._names[used])
        self.definitions.append(f"\n\n{text.rstrip()}")

    def _take_module(self, name: str, module: str) -> None:
        """Takes the text of a module next to the program along; an installed one is left to be imported.

        Args:
            name: The name that the function uses of it.
            module: The module.

        Raises:
            InvalidInput: It is a part of a package, or its text can't be read.
        """
        if module in self._taken or not _is_next_to_program(module):
            return
        if "." in module or hasattr(sys.modules[module], "__path__"):
            raise InvalidInput(
                f"uses `{name}` of {module}, a package next to the program, which isn't there where the function runs",
                field=self._field,
                cure=HELPER_CURE,
            )
        try:
            text = inspect.getsource(sys.modules[module])
            imported = [other for other, _ in imports_of(text)]
        except (OSError, TypeError, SyntaxError, ValueError) as error:
            raise InvalidInput(
                f"uses `{name}` of {module}, whose source cannot be read: {error}", field=self._field, cure=HELPER_CURE
            ) from error
        # One that imports this one in turn meets it as half done, as it does in the program.
        self._taken[module] = text
        for other in imported:
            if other in sys.modules:
                self._take_module(name, other)
        self._taken[module] = self._taken.pop(module)

    def _add(self, name: str, value: Any) -> None:
        home = getattr(value, "__module__", None)
        there = getattr(value, "__qualname__", "")
        if isinstance(value, FunctionType | type) and home == self._home:
            self.define(name, value)
            return
        self._done.add(name)
        if isinstance(value, ModuleType):
            self._take_module(name, value.__name__)
            self.imports.append(f"import {value.__name__} as {name}")
        elif there and home != "__main__" and getattr(sys.modules.get(home or ""), there, None) is value:
            self._take_module(name, home or "")
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


def _is_next_to_program(module: str) -> bool:
    """Returns True for a module that is found only since it lies in the folder of the program that runs."""
    top = module.partition(".")[0]
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    file = getattr(sys.modules.get(top), "__file__", None)
    if not program or not file:
        return False
    # A package's file is the `__init__.py` of its folder.
    folder = Path(file).resolve().parent
    home = folder.parent if Path(file).name == "__init__.py" else folder
    return home == Path(program).resolve().parent and not is_installed(top)


def _text_of(value: FunctionType | type) -> str:
    """Raises OSError or TypeError. A class of a notebook's cell, which is in no file, is found by a method of its."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        method = _method_of(value) if isinstance(value, type) else None
        if method is None:
            raise
    lines = linecache.getlines(method.__code__.co_filename)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ClassDef) and node.name == value.__name__:
            first = min(part.lineno for part in (node, *node.decorator_list))
            if first <= method.__code__.co_firstlineno <= (node.end_lineno or first):
                return "".join(lines[first - 1 : node.end_lineno])
    raise OSError("it is in no file")


def _method_of(value: type) -> FunctionType | None:
    """Returns a method that is written in the class; a decorator makes others. None where there is no such method."""
    for member in vars(value).values():
        if isinstance(member, FunctionType) and linecache.getlines(member.__code__.co_filename):
            return member
    return None


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
