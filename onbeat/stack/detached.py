"""A stack in the background: `onbeat up` as a process of its own session, until its stack.json says that it is up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from contracts.errors import InvalidInput, Unavailable
from onbeat.process.folders import make_private
from onbeat.process.waiting import Waiting
from onbeat.stack.access import StackFile, read_stack_file

LOG = Path("logs", "stack.log")
DETACH = ("--detach", "-d")
UP_WITHIN_S, STOPS_WITHIN_S = 180.0, 60.0
POLL_S = 0.1


def start_detached(arguments: Sequence[str], run_root: Path) -> StackFile:
    """Returns once the stack is up. arguments: of the command line that asks for it, `up` first.

    Raises Unavailable with the last line of a stack that ended, and DeadlineExceeded after it was ended.
    """
    path = run_root / LOG
    try:
        make_private(path.parent)
        log = path.open("ab")
    except OSError as error:
        raise InvalidInput(str(error), field="--run-dir", cure="choose a folder that you can write to") from error
    with log:
        at = log.tell()
        command = [sys.executable, "-m", "onbeat", *(one for one in arguments if one not in DETACH)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=os.environ
        )
    waiting = Waiting("the stack to be up", deadline_s=UP_WITHIN_S, cure=f"see {path.parent}")
    try:
        while (stack := read_stack_file(run_root)) is None or stack.pid != process.pid:
            if process.poll() is not None:
                said = path.read_bytes()[at:].decode(errors="replace").strip()
                raise Unavailable(said.rpartition("\n")[2].removeprefix("onbeat: ") or "the stack ended")
            waiting.poke()
            time.sleep(POLL_S)
    except BaseException:
        process.terminate()
        process.wait(STOPS_WITHIN_S)
        raise
    return stack
