"""Processes that are forked from one that has imported what they need: a start takes tenths of a second, not seconds.

    test ── a start ──▶ nursery ── fork ──▶ `python -m MODULE ARGUMENTS`, with an environment and a log of its own
         ── its number ─▶       ◀── its exit code, once it has ended

In all else they are what a ChildProcess starts: a process group of their own, SIGTERM when their launcher ends. Only
/proc shows the nursery's command and environment: a test that looks for a process reads the file of `FORKED_LOG`.

A command or program of a reader is forked too, with the three streams of the process that a shell has started for it
(tests/forked_site), which waits for its end and has its exit code.

A worker that is forked has a nursery of its own, forked before the worker has threads: its trainers are forked too.
The processes of a run by xdist have one nursery each, all of them forked from one that has imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
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
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil

from contracts.settings import PREFIX
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.folders import make_missing
from onbeat.base.process.launcher import LAUNCHER_PID, end_with_launcher, with_own_packages

STAGE_WORKER = "onbeat.stages"
TASK_WORKER = "onbeat.tasks"
WORKER = "consumer.supervisor"
WORKER_OF_STAND_INS = "tests.integration.consumer_of_stand_ins"
MODULES = ("consumer", STAGE_WORKER, "producer", "reward_service", "gateway", TASK_WORKER, WORKER, "onbeat.replay")
IMPORTED = (
    *(f"{module}.__main__" for module in MODULES),
    *("consumer.trainer.job_run", "producer.engine.transformers.engine", "producer.engine.fingerprint"),
    *("consumer.ranks.processes.launcher", "consumer.ranks.hosts.launcher", "reward_service.app", "onbeat.stack.stack"),
    "transformers.models.qwen3.modeling_qwen3",
)
SITE = Path(__file__).parent / "forked_site"
"""Folder of the module by which a command's or a program's stack forks."""
FORKED_LOG = "TEST_FORKED_LOG"
"""Environment variable: a file to which each forked process appends a line with what `ForkedProcess` has."""
FORKED_RANKS = "TEST_FORKED_RANKS"
"""Environment variable of a trainer: its ranks are forked too. A test of what executes a rank doesn't set it."""
ADDRESS_KIB = "TEST_ADDRESS_KIB"
"""Environment variable: the most memory that a forked process may address, as `ulimit -v` bounds it."""
RANKS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
RANKS_OF_HOSTS = "consumer.ranks.hosts.local_ranks"
EXECUTES = "TEST_EXECUTES"
"""Environment variable of a command or program: it is executed."""
SHARED = "TEST_NURSERY"
"""Environment variable: the path of the socket at which a run's processes get nurseries."""
PROGRAM = ".py"
OF_TESTS = "tests."
"""What the names of modules begin with that stand in for ours, and import the same libraries."""
NSENTER = "nsenter"
"""The program whose options lead a command to another host of a test: `--net=FILE`, `--mount=FILE`, …"""
MAX_BYTES = 1 << 18
MAX_PASSED = 8
"""Descriptors that a start may pass."""
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

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def is_forked(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns True for Python's `-m MODULE ARGUMENTS`, of a module for which the nursery has its imports or of one of
    the tests, and for `FILE.py ARGUMENTS`."""
    _, command = entered(command)
    is_plain = environment.get(THREADS, "").isdigit() and environment.get(DEVICE, "") in ("", "cpu")
    is_program = command[1].endswith(PROGRAM)
    is_module = command[1] == "-m" and (command[2] in MODULES or command[2].startswith(OF_TESTS))
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
        log = str(self.log_path)
        self._process = fork(command[1:], self.environment, log=log, namespaces=namespaces)  # type: ignore[assignment]


def fork(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    log: str,
    namespaces: Sequence[str],
    group: int = 0,
    passed: Sequence[int] = (),
) -> Forked:
    """Has the nursery of this process fork.

    Args:
        words: What follows Python in a command: `-m MODULE ARGUMENTS` or `FILE.py ARGUMENTS`.
        environment: Its environment.
        log: Path of the file that it writes to.
        namespaces: Files of those that it enters.
        group: The process group that it joins; 0: one of its own.
        passed: Descriptors of this process that it has by the same numbers.
    """
    start = {"words": words, "environment": dict(environment), "cwd": os.getcwd(), "group": group}
    start |= {"log": log, "namespaces": namespaces, "descriptors": passed}
    with _talks:
        pid = answer_of(nursery(), start, passed)
    return Forked(nursery(), pid or 0)


_nurseries: list[socket.socket] = []
_talks = threading.Lock()
"""Held from a question to its answer: a thread that watches a stack asks too."""
_namespaces: list[str] = []
"""Files of the namespaces that this process has entered: its ranks enter them too."""


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


def answer_of(nursery: socket.socket, question: dict[str, Any] | int, passed: Sequence[int] = ()) -> int | None:
    """Asks under `_talks`.

    Args:
        nursery: The launcher's end of the socket to it.
        question: A start, whose answer is its process number; or this, whose answer is its exit code after its end.
        passed: The descriptors of a start.
    """
    socket.send_fds(nursery, [json.dumps(question).encode()], passed)
    return json.loads(nursery.recv(MAX_BYTES))


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Forks until its launcher is gone; in a fork it returns what to run, with the passed descriptors as `received`."""
    while True:
        question, received, _, _ = socket.recv_fds(control, MAX_BYTES, MAX_PASSED)
        if not question:
            return None
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
            return request | {"received": received}
        for descriptor in received:
            os.close(descriptor)
        control.send(json.dumps(pid).encode())


def become(start: dict[str, Any], control: socket.socket) -> None:
    """Makes this process one that was started by itself."""
    environment = start["environment"]
    os.setpgid(0, start["group"])
    control.close()
    os.chdir(start["cwd"])
    remember(start)
    open_streams(start)
    enter(start["namespaces"])
    os.environ.clear()
    os.environ.update(environment)
    if ADDRESS_KIB in environment:
        most_bytes = 1024 * int(environment[ADDRESS_KIB])
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    # The nursery's libraries were loaded with one thread.
    num_threads = int(environment.get(THREADS) or 1)
    if num_threads > 1:
        import_module("torch").set_num_threads(num_threads)
    words = start["words"]
    is_module = words[0] == "-m"
    name = words[1] if is_module else words[0]
    search_as_python(environment, "" if is_module else os.path.dirname(os.path.abspath(name)))
    if name in (WORKER, WORKER_OF_STAND_INS):
        fork_trainers()
    if {FORKED_RANKS, SHARED} <= environment.keys() and "RANK" not in environment:
        fork_ranks()
    if not start["log"]:
        fork_services()
    if is_module and not hasattr(sys.modules.get(name), "__path__"):
        sys.modules.pop(name, None)  # the nursery has imported it: it runs anew
    sys.argv = words[1:] if is_module else words
    sys.orig_argv = [sys.executable, *words]
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(name), run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        end_at_once(end.code or 0)
    except KeyboardInterrupt:
        if is_module:
            raise
        # Python ends a program by the signal that has interrupted it.
        traceback.print_exc()
        finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    end_at_once(0)


def open_streams(start: dict[str, Any]) -> None:
    """Gives this process the descriptors that were passed, and, where those aren't all its streams, its log."""
    descriptors = dict(zip(start["descriptors"], start["received"], strict=True))
    if start["log"]:
        descriptors[0] = os.open(os.devnull, os.O_RDONLY)
        descriptors[1] = os.open(start["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        descriptors[2] = os.dup(descriptors[1])
    # Beyond all numbers that are to be taken: one of them may be another's source.
    sources = {
        number: fcntl.fcntl(source, fcntl.F_DUPFD, 1 + max(descriptors)) for number, source in descriptors.items()
    }
    for source in descriptors.values():
        os.close(source)
    for number, source in sources.items():
        os.dup2(source, number)
        os.close(source)


def search_as_python(environment: Mapping[str, str], folder: str) -> None:
    """Has this process look for modules where Python does at a start by itself.

    folder: of the program; "" stands for the working folder, of a module that is run.
    """
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if not environment.get("PYTHONSAFEPATH"):
        paths.insert(0, folder or os.getcwd())
    sys.path[:0] = [path for path in paths if path not in sys.path]


@dataclass(frozen=True)
class ForkedProcess:
    """A line of the file of `FORKED_LOG`."""

    pid: int
    create_time: float
    words: list[str]
    """What followed Python in its command."""

    def living(self) -> psutil.Process | None:
        """Returns the process, or None once it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if process.create_time() == self.create_time and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def remember(start: dict[str, Any]) -> None:
    """Appends this process to the file that its environment names, if any: /proc shows the nursery's environment."""
    if path := start["environment"].get(FORKED_LOG):
        own = psutil.Process()
        line = ForkedProcess(own.pid, own.create_time(), start["words"])
        with open(path, "a") as file:
            file.write(f"{json.dumps(asdict(line))}\n")


def forked_and_running(path: Path, *words: str) -> set[psutil.Process]:
    """Returns the processes of a file of `FORKED_LOG` that have not ended, or of these those with such words.

    At least one is in the file.
    """
    lines = [ForkedProcess(**json.loads(line)) for line in path.read_text().splitlines()]
    processes = [line.living() for line in lines if {*words} <= {*line.words}]
    return {process for process in processes if process is not None}


def end_at_once(exit_code: int) -> NoReturn:
    """Ends this process without freeing its objects.

    Python would free each of them, and the kernel copy each page that the nursery shares with this process: a third of
    a second for memory that goes with the process anyway.
    """
    finish()
    os._exit(exit_code)


def finish() -> None:
    """Does what Python does before it ends, in its order: threads, then `atexit`, then what is not written yet."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


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
    vars(import_module("consumer.supervisor.trainer_process"))["ChildProcess"] = ForkedChild


def fork_services() -> None:
    """Has each stack that this process makes from now on fork its services."""
    stack = import_module("onbeat.stack.stack").EmbeddedStack
    stack.__init__ = partialmethod(stack.__init__, child=ForkedChild)


def forking(environment: Mapping[str, str], *, executes: bool = False) -> dict[str, str]:
    """Returns the environment of a command or program that is forked, and whose stack forks its services.

    executes: Python goes on with what it was started for, and only the services are forked.
    """
    paths = (str(SITE), str(SITE.parents[1]), environment.get("PYTHONPATH", ""))
    variables = {**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return variables | ({EXECUTES: "1"} if executes else {})


def fork_ranks() -> None:
    """Has the launcher of ranks that this process becomes fork them. Its nursery's end ends them with it."""
    import_module(RANKS).SubprocessHandler._popen = forked_rank
    executed = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    vars(import_module(RANKS_OF_HOSTS))["subprocess"] = SimpleNamespace(Popen=forked_rank_of_host, **executed)


def forked_rank(_: object, command: Sequence[str], environment: Mapping[str, str]) -> Forked:
    """Stands in for the method by which torch's launcher executes a rank, which writes to the launcher's own log."""
    return fork(command[1:], without_launcher(environment), log=own_log(), namespaces=_namespaces)


def forked_rank_of_host(
    command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: object
) -> Forked:
    """Stands in for the Popen of `consumer.ranks.hosts.local_ranks`, whose ranks are of the launcher's group."""
    environment, group = without_launcher(env), os.getpgrp()
    return fork(command[1:], environment, log=own_log(), namespaces=_namespaces, group=group, passed=pass_fds)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns a rank's environment without its launcher's number: its parent is the nursery."""
    return {name: value for name, value in environment.items() if name != LAUNCHER_PID}


def own_log() -> str:
    """Returns the path of the file that this process writes to."""
    return os.readlink("/proc/self/fd/1")


def enter(namespaces: Sequence[str]) -> None:
    """Leads this process, which has one thread, into them. Raises OSError."""
    here, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)
    for path in namespaces:
        there = os.open(path, os.O_RDONLY)
        if libc.setns(there, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
        os.close(there)
    os.chdir(here)
    _namespaces[:] = namespaces


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
