"""The launcher's part in a child process: the packages that it runs, and its end together with its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from contracts.errors import InvalidInput

PR_SET_PDEATHSIG = 1
LAUNCHER_PID = "TRAINER_LAUNCHER_PID"
"""Environment variable: the process number of a rank's parent."""
NUMERIC_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Environment variables that numeric libraries read once, when they are loaded."""
THREADS_BY_LOAD = "OMP_DYNAMIC"
"""Environment variable: "true" lets OpenMP take fewer threads while the machine is busy, and so other bits (I7)."""
HOME = Path(__file__).resolve().parents[3]
"""The folder of our packages: a checkout, or an installation's."""


def with_own_packages(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which `python -m gateway` runs our package, whatever the working folder contains.

    Python would search the working folder first. A checkout that isn't installed stands in PYTHONPATH instead.
    """
    child_environment = {**environment, "PYTHONSAFEPATH": "1"}
    if (HOME / "pyproject.toml").is_file():
        others = [
            entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(HOME))
        ]
        child_environment["PYTHONPATH"] = os.pathsep.join([str(HOME), *others])
    return child_environment


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Rests the garbage collector during a block that imports large libraries, and has it pass over their objects ever
    after.

    They make hundreds of thousands of objects that stay: looking for cycles among them takes a fifth of the time to
    import torch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def check_threads_stand_still() -> None:
    """Raises InvalidInput where a deterministic job's bits would follow the machine's load."""
    if os.environ.get(THREADS_BY_LOAD, "").strip().lower() == "true":
        raise InvalidInput(
            "the number of threads, and the last bits with it, would follow the load of the machine",
            field=THREADS_BY_LOAD,
            cure="unset it, or submit the job with deterministic = false",
        )


def end_with_launcher() -> Callable[[], None] | None:
    """Makes a `preexec_fn` by which, on Linux, the kernel sends SIGTERM to the child when the thread that started it
    ends.

    Start children from a thread that lives as long as they should. The function runs in the child between fork and
    exec, and makes only calls that were prepared before the fork.

    Returns:
        The function; None on other systems, where a child ends when it loses Redis.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    launcher = os.getpid()

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(1)

    return ask_kernel


def end_with_parent(number: signal.Signals) -> None:
    """Does what `end_with_launcher` does, with a signal of the caller's choice, in a process that runs already.

    A process whose parent, as LAUNCHER_PID names it, died before this call ends at once: no signal would come.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    parent = os.environ.get(LAUNCHER_PID)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)
