"""On the PYTHONPATH of a command or program of a test, this has its stack fork the services, as tests' own stacks do.

Python imports this module at each start. A process that imports the stack then starts its children by
`tests.forked.ForkedChild`; all others are as they would be without it.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

STACK = "onbeat.stack.stack"


class FindsStack(MetaPathFinder):
    """Finds the module of the stack once, as Python would, and has it forked from as soon as it is executed."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != STACK:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_fork(module: ModuleType) -> None:
            execute(module)
            from tests.forked import fork_services

            fork_services()

        spec.loader.exec_module = execute_and_fork  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, FindsStack())
