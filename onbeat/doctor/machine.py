"""Cores, memory, disks, ports and limits: functions of what was measured, and the measuring."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from contracts.errors import InvalidInput
from contracts.settings import StackSettings, usable_cores
from onbeat.base.process.host_memory import CONTROL_GROUP, left_bytes
from onbeat.base.process.launcher import check_threads_stand_still
from onbeat.doctor.finding import GIB, Finding, bad, gib, ok, refused, warn
from onbeat.doctor.service import REWARD_SERVICE, STACK, Access, Service
from onbeat.stack.access import read_stack_file
from onbeat.stack.ports import is_free

SHARED_MEMORY = Path("/dev/shm")
LEAST_DISK = 1 * GIB
LITTLE_DISK = 10 * GIB
LEAST_MEMORY = GIB // 2
LITTLE_MEMORY = 2 * GIB
LEAST_WITHOUT_MODEL = GIB // 16
LEAST_TEMPORARY = GIB // 16
LITTLE_TEMPORARY = GIB // 4
"""Bytes that a process needs in the folder of temporary files: it keeps small things there, mostly in memory."""
LITTLE_SHARED_MEMORY = GIB // 8
"""Containers have half as much where nothing is said."""
FEW_FILES = 1024
"""Descriptors of a gateway: 256 connections, 100 event streams, and a Redis connection for each thread."""
SWAPPED = 0.25


def look(settings: StackSettings, run_root: Path, port: int, service: Service) -> Iterator[Finding]:
    """Yields the findings about the machine. Memory is measured first, before a later check imports torch.

    Args:
        settings: The stack's settings.
        run_root: The run root.
        port: The gateway's port; 0 for any free one.
        service: The service whose needs count.
    """
    memory = psutil.virtual_memory()
    swap = psutil.swap_memory()
    available = min(memory.available, left_bytes(CONTROL_GROUP))
    yield cores(usable_cores(), os.getloadavg()[0], quota_cores(CONTROL_GROUP))
    yield threads(settings)
    yield of_memory(available, swap_share=swap.percent / 100, holds_model=service.holds_model)
    if service.run_root is Access.WRITES or (service.fills_run_root and settings.objects):
        yield folder("run root", run_root)
    elif service.run_root is Access.READS:
        yield read_folder("run root", run_root)
    yield temporary_folder(Path(tempfile.gettempdir()))
    if SHARED_MEMORY.is_dir() and (service is STACK or settings.device == "cuda"):
        yield shared_memory(psutil.disk_usage(str(SHARED_MEMORY)).free)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if port or service is STACK:
        yield of_port(port)
    if service is STACK:
        yield stack_there(run_root)
    if service is not REWARD_SERVICE:
        yield model_root(settings)


def cores(usable: int, load: float, quota: float | None) -> Finding:
    """Judges the number of cores.

    Args:
        usable: Cores that this process may use.
        load: The load average.
        quota: Cores that the group of this process may use; None for no limit.
    """
    if quota is not None and quota < usable:
        return warn(
            "cores",
            f"{usable} are seen, {quota:g} may be used: threads share them and wait for one another",
            f"set ONBEAT_THREADS={max(1, int(quota / 2))}, or raise the container's limit",
        )
    if load > usable:
        return warn("cores", f"{usable}, and {load:.1f} processes want one already", "wait, or end what computes here")
    return ok("cores", f"{usable}, load {load:.1f}")


def threads(settings: StackSettings) -> Finding:
    try:
        check_threads_stand_still()
    except InvalidInput as error:
        return refused("threads", error)
    chosen = settings.threads
    if os.environ.get("ONBEAT_THREADS") and chosen > usable_cores():
        return warn("threads", f"ONBEAT_THREADS={chosen} on {usable_cores()} cores", "at most as many as cores")
    return ok("threads", "shared among the processes of a stack")


def of_memory(available: float, *, swap_share: float, holds_model: bool = True) -> Finding:
    """Judges the free memory.

    Args:
        available: Free bytes.
        swap_share: The used share of the swap.
        holds_model: False for a process that keeps no weights in memory.
    """
    if not holds_model:
        if available < LEAST_WITHOUT_MODEL:
            return bad("memory", f"{gib(available)} are free", "raise this process's limit, or end other processes")
        return ok("memory", f"{gib(available)} free")
    if available < LEAST_MEMORY:
        return bad("memory", f"{gib(available)} are free", "end other processes, or take a larger machine")
    if available < LITTLE_MEMORY:
        return warn(
            "memory", f"{gib(available)} are free: little beside a trainer and a generator", "take a small model"
        )
    if swap_share > SWAPPED:
        return warn("memory", f"{swap_share:.0%} of the swap are in use: leases may run out", "end other processes")
    return ok("memory", f"{gib(available)} free")


def folder(subject: str, path: Path) -> Finding:
    """Looks at the nearest folder that is there: `up` makes what is missing."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return bad(
            subject, f"{there} can't be written", "choose another --run-dir, or give this user the right to write"
        )
    free = psutil.disk_usage(str(there)).free
    if free < LEAST_DISK:
        return bad(
            subject, f"{gib(free)} are free at {there}", "delete ended jobs (onbeat delete), or choose another disk"
        )
    if free < LITTLE_DISK:
        return warn(
            subject,
            f"{gib(free)} are free at {there}",
            "set ONBEAT_KEEP_ENDED_DAYS, delete ended jobs (onbeat delete), or choose another disk",
        )
    return ok(subject, f"{gib(free)} free at {there}")


def read_folder(subject: str, path: Path) -> Finding:
    """Checks a folder that another process writes; mounted read-only it is as it should be."""
    if not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return bad(subject, f"{path.absolute()} can't be read", "mount the trainer's there, or set ONBEAT_RUN_ROOT")
    return ok(subject, f"{path.absolute()} can be read; nothing is written to it here")


def temporary_folder(path: Path) -> Finding:
    subject = "temporary folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return bad(subject, f"{path} can't be written", "choose another TMPDIR")
    free = psutil.disk_usage(str(path)).free
    says = f"{free / 2**20:.0f} MiB are free at {path}"
    if free < LEAST_TEMPORARY:
        return bad(subject, says, "remove what lies there, or choose another TMPDIR")
    if free < LITTLE_TEMPORARY:
        return warn(subject, says, "remove what lies there, or choose another TMPDIR")
    return ok(subject, f"{gib(free)} free at {path}")


def shared_memory(free: float) -> Finding:
    if free < LITTLE_SHARED_MEMORY:
        cure = "docker run --shm-size 1g, or shm_size in compose: vLLM and ranks on GPUs use it"
        return warn("shared memory", f"{free / 2**20:.0f} MiB are free at {SHARED_MEMORY}", cure)
    return ok("shared memory", f"{gib(free)} free at {SHARED_MEMORY}")


def open_files(limit: int) -> Finding:
    if 0 < limit < FEW_FILES:
        return warn("open files", f"a process may open {limit}", f"ulimit -n {4 * FEW_FILES}")
    return ok("open files", f"{limit} a process" if limit > 0 else "no limit")


def of_port(port: int) -> Finding:
    if not port:
        return ok("ports", "a stack takes free ones from 20000 to 32000")
    if is_free(port):
        return ok("ports", f"{port} is free")
    return bad("ports", f"{port} is in use{_by(port)}", "choose another --port, or 0 for any free one")


def _by(port: int) -> str:
    """Names the process that listens on a port, as ` by process 12 (python)`; "" where this user may not know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""


def stack_there(run_root: Path) -> Finding:
    try:
        stack = read_stack_file(run_root)
    except InvalidInput as error:
        return refused("stack", error)
    if stack is None:
        return ok("stack", f"none runs in {run_root}")
    if not psutil.pid_exists(stack.pid):
        return warn("stack", f"that of {run_root} was killed", "onbeat up goes on with its jobs")
    return ok("stack", f"process {stack.pid} runs one in {run_root}, at {stack.gateway_url}")


def model_root(settings: StackSettings) -> Finding:
    root = Path(settings.model_root).resolve()
    if not root.is_dir():
        return bad("model root", f"there is no folder {root}", "set ONBEAT_MODEL_ROOT to the folder of models and data")
    return ok("model root", str(root))


def quota_cores(group: Path) -> float | None:
    """Returns the control group's share of the processor in cores; None without a limit, or where none can be read."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
