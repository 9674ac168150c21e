"""A reward plug-in that tries to get out of its cage, as the completion says; its error tells what came of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from hostile_walk import walk

score_of_everything = 1.0
CLONES = {"x86_64": 56, "aarch64": 220}


class Told(Exception):
    """What a try came to."""


def refused(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def environments(secret: str) -> str:
    """Every environment that can be read, its own first; the secret is of the reward service's own."""
    own = Path("/proc/self/environ").read_bytes()
    found = [str(os.environ)]
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return f"own {len(own)} bytes, secret {any(secret in text for text in found)}"


def read(path: str) -> str:
    return refused(lambda: Path(path).read_bytes())


def list_folder(path: str) -> str:
    return refused(lambda: os.listdir(path))


def connect(port: str) -> str:
    def by_unix_path() -> None:
        socket.socket(socket.AF_UNIX).connect("/run/dbus/system_bus_socket")

    return " ".join(
        (
            refused(lambda: socket.create_connection(("127.0.0.1", int(port)), timeout=5.0)),
            refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", int(port)))),
            refused(by_unix_path),
            refused(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)),
        )
    )


def fork(_: str) -> str:
    """Forks until it is refused; the children stay."""
    for number in range(300):
        try:
            if os.fork() == 0:
                signal.pause()
        except OSError as error:
            return f"{number} {type(error).__name__}"
    return "300"


def fill_memory(_: str) -> str:
    kept = [mmap.mmap(-1, 1 << 26, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)]
    with contextlib.suppress(OSError):
        for _number in range(1000):
            kept.append(mmap.mmap(-1, 1 << 26, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
    shared = len(kept)
    kept.clear()
    blocks = [bytearray(1 << 26)]
    while len(blocks) < 1000:
        try:
            blocks.append(bytearray(1 << 26))
        except MemoryError:
            private = len(blocks)
            blocks.clear()
            return f"{shared * 64} {private * 64}"
    return f"{shared * 64} 64000"


def fill_disk(_: str) -> str:
    """MiB that could be written into its own folder, then what came of writing elsewhere."""
    written = 0
    with contextlib.suppress(OSError):
        for number in range(1000):
            with open(f"file-{number}", "wb") as file:
                for _block in range(32):
                    written += file.write(b"\0" * (1 << 20))
                    file.flush()
    elsewhere = [
        refused(lambda folder=folder: Path(folder, "left-behind").write_bytes(b"x"))
        for folder in ("/tmp", "/dev/shm", "/var/tmp")
    ]
    return f"{written >> 20} {' '.join(elsewhere)}"


def become_root(_: str) -> str:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    facts = f"privileges {int(status['CapEff'], 16) + int(status['CapPrm'], 16)} barred {status['NoNewPrivs']}"
    handles = len(os.listdir("/proc/self/fd"))
    return f"{facts} handles {handles} {refused(lambda: os.setuid(os.getuid() ^ 1))}"


def kill(pid: str) -> str:
    """The reward service, its own parent, the first process, and all processes."""
    targets = {int(pid), os.getppid(), 1}
    said = [refused(lambda target=target: os.kill(target, signal.SIGKILL)) for target in sorted(targets - {0})]
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL) if os.getppid() in (0, 1) else None
    return " ".join(said)


def leave_a_child(mark: str) -> str:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", mark], start_new_session=True)
    return "left"


def lie(_: str) -> str:
    """Answers the highest score for every further item, also for those of other requests."""
    global score_of_everything
    score_of_everything = 1000.0
    from reward_service.scorers import rubric, texts

    for kind in rubric.SCORERS:
        rubric.SCORERS[kind] = rubric.Scorer(score=lambda component, item: 1000.0)
    texts.whole_format = lambda component, item: 1000.0
    return "lied"


def babble(_: str) -> str:
    """Half a message of four gigabytes, on each socket that it has."""
    for handle in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(handle, b"\xff\xff\xff\xff" * 64)
    return "babbled"


def answer(made_up: str) -> str:
    """Writes the service's answer itself."""
    own = next(one for one in gc.get_objects() if isinstance(one, socket.socket) and one.fileno() >= 0)
    body = msgspec.msgpack.encode({"result": {"type": "scored", **eval(made_up)}})
    own.sendall(struct.pack("!I", len(body)) + body)
    signal.pause()
    return "answered"


def call(name: str) -> str:
    """A system call of the C library by its name; "absent" where the kernel says that it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = {
        "shmget": (0, 1 << 20, 0o1600),
        "msgget": (0, 0o1600),
        "semget": (0, 1, 0o1600),
        "mq_open": (b"/kept", os.O_CREAT | os.O_RDWR, 0o600, None),
        "memfd_create": (b"kept", 0),
        "mount": (b"none", b"/", None, ctypes.c_ulong(0x44000), None),
        "chroot": (b"/",),
    }[name]
    return "done" if getattr(libc, name)(*arguments) != -1 else errno.errorcode[ctypes.get_errno()]


def clone(_: str) -> str:
    """Clones into a user namespace of its own; then starts a thread, as every library does."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = 0x10000000 | signal.SIGCHLD
    pid = libc.syscall(ctypes.c_long(CLONES[os.uname().machine]), ctypes.c_ulong(flags), None, None, None, None)
    if pid == 0:
        os._exit(0)
    said = "done" if pid > 0 else errno.errorcode[ctypes.get_errno()]
    met: list[str] = []
    thread = threading.Thread(target=lambda: met.append("a thread"))
    thread.start()
    thread.join()
    return f"{said} {' '.join(met)}"


def itself(_: str) -> str:
    """What a library does to its own process and files, and what came of it."""
    Path("own").write_bytes(b"x") if os.access(".", os.W_OK) else None
    return " ".join(
        refused(one)
        for one in (
            lambda: resource.prlimit(0, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)),
            lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
            lambda: os.nice(1),
            lambda: os.isatty(0),
            lambda: socket.socketpair()[0].setblocking(False),
            lambda: os.chmod("own", 0o700),
            lambda: os.utime("own"),
        )
    )


def program(code: str) -> str:
    """What a program of the Python tool is answered in this cage; nothing, where its extra was deleted."""
    try:
        from onbeat.environments.tools.python import Python
    except ModuleNotFoundError:
        return ""
    return Python().run(code)


def look(_: str) -> str:
    return " ".join(sorted(os.listdir(os.getcwd()))) or "an empty folder"


TRIES: dict[str, Callable[[str], str]] = {
    "environments": environments,
    "read": read,
    "list": list_folder,
    "connect": connect,
    "fork": fork,
    "fill_memory": fill_memory,
    "fill_disk": fill_disk,
    "become_root": become_root,
    "kill": kill,
    "leave_a_child": leave_a_child,
    "lie": lie,
    "babble": babble,
    "answer": answer,
    "call": call,
    "clone": clone,
    "look": look,
    "walk": walk,
    "itself": itself,
    "program": program,
}


def reward(*, prompt: str, completion: str, reference: str, task_entry: str) -> float:
    """`completion` names the try, `reference` what it needs."""
    if completion == "behave":
        return score_of_everything
    raise Told(TRIES[completion](reference))
