"""Processes that are forked from one that has imported what they need: a start takes tenths of a second, not seconds.

    test ── a start ──▶ nursery ── fork ──▶ `python -m MODULE ARGUMENTS`, with an environment and a log of its own
         ── its number ─▶       ◀── its exit code, once it has ended

In all else they are what a ChildProcess starts: a process group of their own, SIGTERM when their launcher ends. Only
/proc shows the nursery's command and environment: a test that looks there starts a ChildProcess.

A worker that is forked has a nursery of its own, forked before the worker has threads: its trainers are forked too.
The processes of a run by xdist have one nursery each, all of them forked from one that has imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import psutil

from contracts.settings import PREFIX
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.folders import make_missing
from onbeat.base.process.launcher import LAUNCHER_PID, end_with_launcher, with_own_packages

STAGE_WORKER = "onbeat.stages"
TASK_WORKER = "onbeat.tasks"
WORKER = "consumer.supervisor"
MODULES = ("consumer", STAGE_WORKER, "producer", "reward_service", "gateway", TASK_WORKER, WORKER)
IMPORTED = (
    *(f"{module}.__main__" for module in MODULES),
    *("consumer.trainer.job_run", "producer.engine.transformers.engine", "producer.engine.fingerprint"),
    "reward_service.app",
    "transformers.models.qwen3.modeling_qwen3",
)
SITE = Path(__file__).parent / "forked_site"
"""Folder of the module by which a command's or a program's stack forks."""
FORKED_LOG = "TEST_FORKED_LOG"
"""Environment variable: a file to which each forked process appends its number and the time at which it started."""
FORKED_RANKS = "TEST_FORKED_RANKS"
"""Environment variable of a trainer: its ranks are forked too. A test that finds ranks by /proc doesn't set it."""
RANKS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
SHARED = "TEST_NURSERY"
"""Environment variable: the path of the socket at which a run's processes get nurseries."""
PROGRAM = ".py"
NSENTER = "nsenter"
"""The program whose options lead a command to another host of a test: `--net=FILE`, `--mount=FILE`, …"""
MAX_BYTES = 1 << 18
ANSWERS_WITHIN_S = 300.0
LISTENS = "listens"
"""The word for a nursery of nurseries: its socket is one at which others call."""
THREADS = "OMP_NUM_THREADS"
"""Environment variable: the threads of a process, which libraries read as they are loaded: here it is set again."""
DEVICE = f"{PREFIX}DEVICE"


class Forked:
    """A process of the nursery, with the parts of a `subprocess.Popen` that a ChildProcess uses."""

    def __init__(self, nursery: socket.socket, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Never waits for a talk that is under way: a signal handler, which may have interrupted it, polls too."""
        if self._exit_code is None and _talks.acquire(blocking=False):
            try:
                if self._exit_code is None:  # another thread may have had the answer, which is given once
                    self._exit_code = answer_of(self._nursery, self.pid)
            finally:
                _talks.release()
        return self._exit_code

    def wait(self, timeout: float = ANSWERS_WITHIN_S) -> int:
        ends_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > ends_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


def is_forked(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns True for Python's `-m MODULE ARGUMENTS`, of a module for which the nursery has its imports, and for
    `FILE.py ARGUMENTS`."""
    _, command = entered(command)
    is_plain = environment.get(THREADS, "").isdigit() and environment.get(DEVICE, "") in ("", "cpu")
    is_program = command[1].endswith(PROGRAM)
    is_module = command[1] == "-m" and command[2] in MODULES
    return is_plain and command[0] == sys.executable and (is_module or is_program)


def entered(command: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """The files of the namespaces that the words before a command lead to, and the command itself."""
    if command[0] != NSENTER:
        return [], command
    options = [word for word in command[1:] if word.startswith("--")]
    return [option.partition("=")[2] for option in options], command[1 + len(options) :]


class ForkedChild(ChildProcess):
    """It is forked where its command is one of those; any other is executed."""

    def start(self) -> None:
        if self.cwd or self.kept_open or not is_forked(self.command, self.environment):
            super().start()
            return
        make_missing(self.log_path.parent)
        namespaces, command = entered(self.command)
        argv = command[1:] if command[1].endswith(PROGRAM) else command[2:]
        start = {"argv": argv, "environment": self.environment, "log": str(self.log_path)}
        start |= {"namespaces": namespaces, "cwd": os.getcwd()}
        with _talks:
            pid = answer_of(nursery(), start)
        self._process = Forked(nursery(), pid or 0)  # type: ignore[assignment]


_nurseries: list[socket.socket] = []
_talks = threading.Lock()
"""Held from a question to its answer: a thread that watches a stack asks too."""


def nursery() -> socket.socket:
    """The nursery of this process, which ends with it."""
    if not _nurseries:
        if SHARED in os.environ:
            ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(ANSWERS_WITHIN_S)
            ours.connect(os.environ[SHARED])
        else:
            ours, theirs = control_sockets()
            with theirs:
                start_nursery(theirs)
        _nurseries[:] = [ours]
    return _nurseries[0]


def start_nursery(control: socket.socket, *words: str) -> subprocess.Popen[bytes]:
    """Starts a process that imports, and ends with this one. control: its end of a socket."""
    return subprocess.Popen(
        (sys.executable, "-m", "tests.forked", str(control.fileno()), *words),
        env=with_own_packages({**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}),
        pass_fds=(control.fileno(),),
        preexec_fn=end_with_launcher(),
        process_group=0,
    )


@contextlib.contextmanager
def shared_nursery() -> Iterator[None]:
    """Has the processes that this one starts meanwhile get their nurseries from one, which imports for the first."""
    folder = tempfile.mkdtemp(
        prefix="nursery-"
    )  # no TemporaryDirectory: a process that is forked meanwhile would remove it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        path = f"{folder}/socket"
        listening.bind(path)
        listening.listen()
        process = start_nursery(listening, LISTENS)
        os.environ[SHARED] = path
        yield
        del os.environ[SHARED]
        process.kill()
        process.wait()
    shutil.rmtree(folder)


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """The launcher's end, and the nursery's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(ANSWERS_WITHIN_S)
    return ours, theirs


def answer_of(nursery: socket.socket, question: dict[str, Any] | int) -> int | None:
    """Asks under `_talks`.

    Args:
        nursery: The launcher's end of the socket to it.
        question: A start, whose answer is its process number; or this, whose answer is its exit code after its end.
    """
    nursery.send(json.dumps(question).encode())
    return json.loads(nursery.recv(MAX_BYTES))


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Forks until its launcher is gone; in a fork it returns what to run."""
    while question := control.recv(MAX_BYTES):
        request = json.loads(question)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            control.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        ask_kernel = end_with_launcher()
        pid = os.fork()
        if not pid:
            if ask_kernel:
                ask_kernel()
            return request
        control.send(json.dumps(pid).encode())
    return None


def become(start: dict[str, Any], control: socket.socket) -> None:
    """Makes this process one that was started by itself."""
    os.setpgid(0, 0)
    control.close()
    os.chdir(start["cwd"])
    remember(start["environment"])
    log = os.open(start["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    enter(start["namespaces"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.environ.clear()
    os.environ.update(start["environment"])
    # As Python does at a start by itself.
    paths = [one for one in start["environment"].get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:0] = [one for one in paths if one not in sys.path]
    # The nursery's libraries were loaded with one thread.
    num_threads = int(os.environ[THREADS])
    if num_threads > 1:
        import_module("torch").set_num_threads(num_threads)
    module, *arguments = start["argv"]
    if module == WORKER:
        fork_trainers()
    if {FORKED_RANKS, SHARED} <= os.environ.keys() and "RANK" not in os.environ:
        fork_ranks()
    sys.argv = [module, *arguments]
    is_program = module.endswith(PROGRAM)
    sys.orig_argv = [sys.executable, *([] if is_program else ["-m"]), module, *arguments]
    try:
        if is_program:
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        end_at_once(end.code or 0)
    end_at_once(0)


def remember(environment: Mapping[str, str]) -> None:
    """Appends this process to the file that its environment names, if any: /proc shows the nursery's environment."""
    if path := environment.get(FORKED_LOG):
        own = psutil.Process()
        with open(path, "a") as file:
            file.write(f"{own.pid} {own.create_time()}\n")


def forked_and_running(path: Path) -> set[psutil.Process]:
    """Returns the processes of a file of `FORKED_LOG` that have not ended. At least one is in the file."""
    running = set()
    for line in path.read_text().splitlines():
        pid, create_time = line.split()
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.create_time() == float(create_time) and process.status() != psutil.STATUS_ZOMBIE:
                running.add(process)
    return running


def end_at_once(exit_code: int) -> NoReturn:
    """Ends this process in the order of Python's own end: threads, then `atexit`, then what is not written yet.

    Python would then free each object, and the kernel copy each page that the nursery shares with this process: a
    third of a second for memory that goes with the process anyway.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


def fork_trainers() -> None:
    """Has the worker that this process becomes fork its trainers, from a nursery of its own."""
    ours, theirs = control_sockets()
    ask_kernel = end_with_launcher()
    if not os.fork():
        if ask_kernel:
            ask_kernel()
        ours.close()
        run(theirs)
        end_at_once(0)
    theirs.close()
    _nurseries[:] = [ours]
    import_module("consumer.supervisor.trainer_process").ChildProcess = ForkedChild


def fork_services() -> None:
    """Has each stack that this process makes from now on fork its services."""
    stack = import_module("onbeat.stack.stack").EmbeddedStack
    stack.__init__ = partialmethod(stack.__init__, child=ForkedChild)


def forking(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a command or program whose stack forks its services."""
    paths = (str(SITE), str(SITE.parents[1]), environment.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def fork_ranks() -> None:
    """Has the launcher of ranks that this process becomes fork them. Its nursery's end ends them with it."""
    import_module(RANKS).SubprocessHandler._popen = forked_rank


def forked_rank(_: object, command: Sequence[str], environment: Mapping[str, str]) -> Forked:
    """Stands in for the method by which torch's launcher executes a rank, which writes to the launcher's own log."""
    # Its parent is the nursery.
    own = {name: value for name, value in environment.items() if name != LAUNCHER_PID}
    log = os.readlink("/proc/self/fd/1")
    start = {"argv": command[2:], "environment": own, "log": log, "namespaces": [], "cwd": os.getcwd()}
    with _talks:
        pid = answer_of(nursery(), start)
    return Forked(nursery(), pid or 0)


def enter(namespaces: Sequence[str]) -> None:
    """Leads this process, which has one thread, into them. Raises OSError."""
    here, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    for path in namespaces:
        there = os.open(path, os.O_RDONLY)
        if libc.setns(there, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
        os.close(there)
    os.chdir(here)


def run(control: socket.socket) -> None:
    """Is a nursery until its launcher is gone; each of its forks becomes what it was forked for."""
    if start := serve(control):
        become(start, control)


def fork_for_each_caller(listening: socket.socket) -> socket.socket:
    """Forks until its launcher is gone; in a fork it returns the socket to the caller whose nursery that is."""
    while True:
        control, _ = listening.accept()
        ask_kernel = end_with_launcher()
        if not os.fork():
            if ask_kernel:
                ask_kernel()
            listening.close()
            return control
        control.close()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    is_shared = LISTENS in sys.argv[2:]
    if is_shared:
        select.select([control], [], [])  # a run that forks nothing has nothing imported
    for name in IMPORTED:
        import_module(name)
    for module in MODULES:
        del sys.modules[f"{module}.__main__"]  # a fork runs it anew
    gc.freeze()
    run(fork_for_each_caller(control) if is_shared else control)
    end_at_once(0)


if __name__ == "__main__":
    # The module by its name: what a fork runs imports it too.
    import_module("tests.forked").main()
