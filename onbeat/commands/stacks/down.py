"""`onbeat down`: ends the stack of a run folder, which stack.lock names.

The kernel gives the lock back when the stack has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from contracts.encoding.json_lines import open_plain
from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput
from onbeat.base.process.waiting import Waiting
from onbeat.commands import options
from onbeat.stack.access import run_root_from
from onbeat.stack.folder_lock import FILE_NAME, MAX_BYTES, Holder
from onbeat.terminal.output import console_for, tell

DOWN_WITHIN_S = 90.0
"""A trainer has 20 s for a checkpoint, the other processes 8 s and Redis 10 s one after the other."""
POLL_S = 0.1


def down(run_dir: options.RunDir = None, json_output: options.Json = False) -> None:
    """End the stack of a run folder, as Ctrl-C does; its jobs go on at the next start. Nothing to end is no error."""
    root = run_root_from(os.environ, run_dir)
    holder = holder_of(root)
    if holder is None:
        tell({"stopped": None}, f"no stack runs in {root}", json_output=json_output)
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(holder.pid).terminate()
    waiting = Waiting(f"process {holder.pid} to end", deadline_s=DOWN_WITHIN_S, cure=f"see {root / 'logs'}")
    with console_for(json_output=True).status("stopping every process"):
        while holder.lives:
            waiting.poke()
            time.sleep(POLL_S)
    tell({"stopped": holder.pid}, f"stopped process {holder.pid} of {root}", json_output=json_output)


def holder_of(root: Path) -> Holder | None:
    """Returns the stack that lives over this folder; None where none does, or the lock's file can't be read."""
    try:
        with open_plain(root / FILE_NAME) as file:
            holder = decode_json(file.read(MAX_BYTES), Holder)
    except (OSError, InvalidInput):
        return None
    return holder if holder.lives else None
