"""`onbeat status` and `onbeat down`: the stack of a run folder, found by stack.lock, which the kernel gives back at its
end."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil
import typer
from msgspec import field

from contracts.answers import StackState
from contracts.encoding.json_lines import open_plain
from contracts.encoding.wire import Record, decode_json
from contracts.errors import InvalidInput, OnbeatError
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.commands import options
from onbeat.stack.access import read_stack_file, run_root_from
from onbeat.stack.folder_lock import FILE_NAME, MAX_BYTES, Holder
from onbeat.terminal.output import FAILED, console_for, tell
from onbeat.terminal.words import count, duration, one_line, plural

DOWN_WITHIN_S = 90.0
"""A trainer has 20 s for a checkpoint, the other processes 8 s and Redis 10 s one after the other."""
POLL_S = 0.1
NAME = "ONBEAT_NAME"


class StackLook(Record, frozen=True, kw_only=True):
    """What `onbeat status --json` prints."""

    run_root: str
    state: str
    """down, starting (or stopping: its gateway doesn't answer) or up."""
    pid: int = 0
    since_s: float = 0.0
    gateway_url: str = ""
    processes: dict[str, int] = field(default_factory=dict)
    """Name → process number; `trainer` where one runs."""
    shared: StackState | None = None
    """What its gateway says that all jobs share."""


def status(run_dir: options.RunDir = None, json_output: options.Json = False) -> None:
    """Show the stack of a run folder: its processes, and what its jobs share; exit code 1 unless it is up."""
    look = look_at(run_root_from(os.environ, run_dir))
    tell(look, "\n".join(lines(look)), json_output=json_output)
    if look.state != "up":
        raise typer.Exit(FAILED)


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
    """The stack that lives over this folder; None where none does, or the file is of another hand."""
    try:
        with open_plain(root / FILE_NAME) as file:
            holder = decode_json(file.read(MAX_BYTES), Holder)
    except (OSError, InvalidInput):
        return None
    return holder if holder.lives else None


def look_at(root: Path) -> StackLook:
    """Raises InvalidInput for a file that another user has put there."""
    holder = holder_of(root)
    if holder is None:
        return StackLook(run_root=str(root), state="down")
    stack = read_stack_file(root)
    shared = None
    if stack is not None and stack.pid == holder.pid:
        with contextlib.suppress(OnbeatError), GatewayClient(stack.gateway_url, stack.api_key) as client:
            shared = client.stack()
    return StackLook(
        run_root=str(root),
        state="starting" if shared is None else "up",
        pid=holder.pid,
        since_s=holder.started_s,
        gateway_url="" if stack is None else stack.gateway_url,
        processes=_processes(holder),
        shared=shared,
    )


def _processes(holder: Holder) -> dict[str, int]:
    """Those that the stack has started, by their names, and its trainer."""
    found: dict[str, int] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(holder.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                name = child.environ().get(NAME, "")
                if child.ppid() == holder.pid:
                    found[name or "redis"] = child.pid
                elif child.cmdline()[1:3] == ["-m", "consumer"]:
                    found["trainer"] = child.pid
    return found


def lines(look: StackLook) -> list[str]:
    if look.state == "down":
        return [f"no stack runs in {one_line(look.run_root)}: onbeat up --detach starts one"]
    age = duration(max(0.0, time.time() - look.since_s))
    said = [f"{look.state}   {one_line(look.run_root)}, process {look.pid}, for {age}   {one_line(look.gateway_url)}"]
    said.append("   ".join(f"{one_line(name)} {pid}" for name, pid in sorted(look.processes.items())))
    if (shared := look.shared) is not None:
        most = f" of {count(shared.redis_max_bytes / 2**20)}" if shared.redis_max_bytes else ""
        said.append(
            f"{plural(shared.num_jobs, 'job')}   {plural(shared.live_generators, 'live generator')}   "
            f"{plural(shared.live_stage_workers, 'live stage worker')}   "
            f"{plural(shared.live_consumers, 'live consumer')}   "
            f"{plural(shared.live_task_workers, 'live worker')} of tasks   "
            f"Redis {count(shared.redis_used_bytes / 2**20)}{most} MiB"
        )
    return said
