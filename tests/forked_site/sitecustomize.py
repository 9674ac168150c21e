"""On the PYTHONPATH of a command or program of a test, this has the nursery fork it, and its stack the services.

    shell ── executes ──▶ this process ── its words, environment and streams ──▶ nursery ── fork ──▶ the command
                                       ── signals ─────────────────────────────────────────────────▶
                                       ◀── exit code ── nursery

Python imports this module at each start. A process that is neither a command of ours nor a program, or that finds no
nursery, goes on as it would without it, but for its stack: the children of that are started by
`tests.forked.ForkedChild`, as those of tests' own stacks are. `onbeat up` goes on too: who starts it in the background
looks for a stack that has its number.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any, NoReturn

STACK = "onbeat.stack.stack"
NURSERY = "TEST_NURSERY"
"""As tests.forked.SHARED, whose module imports more than this process needs."""
EXECUTES = "TEST_EXECUTES"
"""As in that module."""
COMMAND = "onbeat"
MODULES = ("onbeat", "onbeat.cli", "onbeat.replay.probe_again", "onbeat.base.machine_kernels")
"""A command of ours, and what one executes."""
SAFE_PATH = "-P"
"""A flag of Python that changes nothing for a module of ours."""
PROGRAM = ".py"
STAYS = "up"
"""The command that isn't forked."""
STREAMS = (0, 1, 2)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.02
MAX_BYTES = 1 << 10


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


def is_forked(words: list[str]) -> bool:
    """Returns True where what follows Python in a command is a command of ours or a program."""
    if len(words) == 0 or STAYS in words:
        return False
    if words[0] == "-m":
        return words[1] in MODULES
    return os.path.basename(words[0]) == COMMAND or words[0].endswith(PROGRAM)


def be_forked(words: list[str]) -> NoReturn:
    """Has the nursery fork this command, hands signals on to it, and ends as it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    nursery = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nursery.connect(os.environ[NURSERY])
    start = {"words": words, "environment": dict(os.environ), "cwd": os.getcwd(), "group": 0}
    start |= {"log": "", "namespaces": [], "descriptors": STREAMS}
    socket.send_fds(nursery, [json.dumps(start).encode()], STREAMS)
    pid = json.loads(nursery.recv(MAX_BYTES))

    def forward(number: int, _: FrameType | None) -> None:
        os.kill(pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    exit_code = None
    while exit_code is None:
        time.sleep(POLL_S)
        nursery.send(json.dumps(pid).encode())
        exit_code = json.loads(nursery.recv(MAX_BYTES))
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)


command = [word for number, word in enumerate(sys.orig_argv[1:]) if number or word != SAFE_PATH]
if NURSERY in os.environ and EXECUTES not in os.environ and is_forked(command):
    be_forked(command)
sys.meta_path.insert(0, FindsStack())
