"""Locks around the processes that run foreign code: completions, plug-ins, environments and chat templates.

    service ── exec, empty environment ──▶ keeper ── fork, caged here ──▶ nursery ── fork ──▶ child
                                           waits                          imports, forks      scores, plays

Each lock is tried by itself, since no platform has them all; `enter` answers which ones are not there, in words that
the service logs at its start. docs/cage.md says what each of them keeps out, and what is left without it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Literal

from contracts.encoding.wire import Record
from onbeat.base.cage import kernel
from onbeat.base.cage.file_rules import import_places, restrict_files, scopes_signals
from onbeat.base.cage.syscall_filter import compiled, lock_syscalls
from onbeat.base.cage.syscall_rules import cage_filter
from onbeat.base.process.launcher import NUMERIC_THREADS

SCRATCH_BYTES = 64 * 1024 * 1024
"""The child's own folder, where it has one, is a memory file system of this size, emptied for the next one."""
MAX_FILE_BYTES = SCRATCH_BYTES
MAX_OPEN_FILES = 256
MAX_PROCESSES = 64
"""Processes and threads of one cage, the nursery included."""
MAX_CPU_S = 24 * 3600
"""Processor seconds of one process, whatever its deadline: what escapes every other end meets this one."""
UIDS_EACH = 256
"""For each service its own, and for each of its cages another: the limit on processes counts those of a uid."""
MAX_PROCESS_IDS = 2**22
"""Most that a kernel has, and so the slots of one kind of service, of UIDS_EACH uids each."""
SPREAD = 2_654_435_761
"""Odd, so that no two namespaces have a slot in common by their numbers alone."""
FIRST_UIDS = {
    "rewards": (1_000_000_000, 60_600),
    "environments": (1_000_000_000 + MAX_PROCESS_IDS * UIDS_EACH, 60_600 + UIDS_EACH),
    "templates": (1_000_000_000 + 2 * MAX_PROCESS_IDS * UIDS_EACH, 60_600 + 2 * UIDS_EACH),
}
"""Kind of service → the first uid of its own, and the first where the container maps 65,536 uids only, of those that
Debian's and systemd's conventions leave unused: up to 61,183. Chat templates use 64 of theirs."""
ONE_THREAD = (*NUMERIC_THREADS, "RAYON_NUM_THREADS")


class CageRules(Record, frozen=True, kw_only=True):
    """The rules of one cage.

    The service that owns the cage creates them and passes them on the command line of the cage's keeper, which reads
    them; nothing changes them. They hold no secret, since any user can read a command line.
    """

    folder: str
    """An empty folder: the working folder, and where a scratch file system is mounted."""
    memory_mb: int
    """Address space of each process."""
    network: bool
    """True where its processes may open sockets."""
    hidden: tuple[str, ...]
    """Folders whose files may not be read, wherever they lie: the stack's own."""
    readable: tuple[str, ...] = ()
    """Files and folders that may be read beside what code is imported from: the operator's."""
    home: str = ""
    """The home folder of the service's user, which nothing but `readable` opens; "" where it has none."""
    service: Literal["rewards", "environments", "templates"]
    """The kind of code in it: scorers, environments, or the chat template of a model."""
    service_slot: int
    """Its `own_slot`."""
    number: int
    """The cage's number in its service."""
    loopback: bool = False
    """True where its processes may open connections to each other: IPv4, in a network of the cage's own. On a platform
    that has none for it they may not."""
    processes: int = MAX_PROCESSES
    """Processes and threads, the nursery included."""
    open_files: int = MAX_OPEN_FILES
    """Most of each process."""

    @property
    def own_uids(self) -> tuple[int, int]:
        """Returns the uid that the cage becomes, then the uid that it becomes where the first isn't mapped."""
        first, first_mapped = FIRST_UIDS[self.service]
        offset = self.number % UIDS_EACH
        return first + self.service_slot * UIDS_EACH + offset, first_mapped + offset


def own_slot() -> int:
    """Returns this process's slot among the services of its kind on the machine.

    Processes of one container differ by their id. The first processes of several containers all have the same id, so
    the number of the container's process namespace is spread over the slots, too.

    Returns:
        A number in [0, MAX_PROCESS_IDS).
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return (os.getpid() + namespace * SPREAD) % MAX_PROCESS_IDS


class Cage:
    """The locks of one cage, and how many of them this machine could set.

    A keeper creates it, calls `separate`, forks, and calls `enter` in the child, which stays caged for ever. The keeper
    calls `end_all` when its service ends the child.
    """

    def __init__(self, rules: CageRules) -> None:
        self._rules = rules
        self.has_own_namespaces = False
        self.has_own_uid = False
        self._has_user_namespace = False
        self._has_scratch = False
        self._is_read_only = False
        self._has_own_loopback = False

    def separate(self) -> None:
        """Creates namespaces for all that is forked from here on: processes, mounts, shared memory, and a network that
        leads nowhere unless the rules allow one."""
        flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
        if not self._rules.network:
            flags |= kernel.CLONE_NEWNET
        uid = os.getuid()
        gid = os.getgid()
        if kernel.unshare(flags):
            self.has_own_namespaces = True
        elif uid != 0 and kernel.unshare(flags | kernel.CLONE_NEWUSER):
            self.has_own_namespaces = True
            self._has_user_namespace = True
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        if self._rules.loopback and self.has_own_namespaces and not self._rules.network:
            self._has_own_loopback = kernel.raise_loopback()

    def enter(self) -> tuple[str, ...]:
        """Locks this process in, and all that it will fork.

        Returns:
            A phrase for each lock that this machine doesn't have, as "the network"; the service logs them.
        """
        missing: list[str] = []
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel takes these first, before the service
        if self.has_own_namespaces:
            self._mount()
        else:
            missing.append("no namespaces of their own (processes, mounts, network)")
        self._take_own_uid()
        os.umask(0o077)
        if not (self.has_own_uid or self._has_user_namespace):
            missing.append("the service's own uid")
        if not (self.has_own_namespaces or self.has_own_uid):
            missing.append("processes that fork on and on may be left behind")
        self._forget_the_launcher()
        if not kernel.give_up_privileges():
            missing.append("no bar against new privileges")
        missing += self._limit()
        writable = self._rules.folder if self._has_scratch else None
        missing += restrict_files(
            writable=writable,
            readable=(self._rules.folder, *self._rules.readable),
            hidden=self._rules.hidden,
            home=self._rules.home,
            tcp=self._rules.network or self._has_own_loopback,
            abstract_sockets=self._rules.network,
        )
        if not (self.has_own_namespaces or self.has_own_uid or scopes_signals()):
            missing.append("signals reach the service")
        call_filter = cage_filter(
            sockets=self._rules.network or self._has_own_loopback,
            only_ipv4=self._has_own_loopback,
            attributes=self._is_read_only and self._has_scratch,
        )
        if not lock_syscalls(compiled(call_filter)):
            missing.append("no filter of system calls")
            if not (self.has_own_namespaces or self._rules.network):
                missing.append("the network")
        kernel.hide_from_own_uid(hidden=True)
        return tuple(missing)

    def end_all(self, child: int) -> int | None:
        """Kills a child and all that it has started, as far as this cage can tell.

        Returns:
            The child's wait status; None where it didn't end in time.
        """
        reaches_all = self.has_own_namespaces or self.has_own_uid
        if reaches_all:
            kernel.kill(-1)  # no process outside this cage has the uid, or is in the namespace
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        return kernel.end_children(child, scans=not reaches_all)

    def _mount(self) -> None:
        """Makes all mounts read-only, and mounts a scratch folder of limited size and a /proc of this cage alone.

        Where the kernel refuses a mount the cage goes on without it: `enter` names the locks that are missing.
        """
        if not kernel.unshare(kernel.CLONE_NEWNS):  # this process's own: the keeper removes the folder in the end
            return
        if not kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE):
            return
        if os.getuid() == 0:
            kernel.show_to_all([*map(str, import_places()), *self._rules.readable])
        self._is_read_only = kernel.make_read_only()
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        options = f"size={SCRATCH_BYTES},nr_inodes=4096,mode=700"
        self._has_scratch = kernel.mount("scratch", self._rules.folder, "tmpfs", flags, options)
        kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC | kernel.MS_RDONLY)
        os.chdir(self._rules.folder)

    def _take_own_uid(self) -> None:
        """Has root become a user of the cage's own. Where that user can't read the code, root stays, without
        privileges."""
        if os.getuid() != 0 or self._has_user_namespace:
            return
        for uid in self._rules.own_uids:
            if not _may_read_code(uid):
                continue
            try:
                if self._has_scratch:
                    os.chown(self._rules.folder, uid, uid)
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            except OSError:
                continue
            self.has_own_uid = True
            return

    def _forget_the_launcher(self) -> None:
        os.environ.clear()
        os.environ.update(dict.fromkeys(ONE_THREAD, "1"), TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
        os.environ.update(HOME=self._rules.folder, TMPDIR=self._rules.folder)
        # Where nothing may be written, matplotlib still asks for a folder whose mode says that it might: reasoning-gym
        # imports it.
        folder = Path(self._rules.folder)
        os.environ["MPLCONFIGDIR"] = str(folder if os.access(folder, os.W_OK) else folder.parent)

    def _limit(self) -> list[str]:
        """Limits each process's memory, files and core dumps, and the cage's processes."""
        memory = self._rules.memory_mb * 1024 * 1024
        missing: list[str] = []
        limits = {
            "memory": (resource.RLIMIT_AS, memory),
            "size of a file": (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
            "open files": (resource.RLIMIT_NOFILE, self._rules.open_files),
            "core dumps": (resource.RLIMIT_CORE, 0),
            "time": (resource.RLIMIT_CPU, MAX_CPU_S),
        }
        if self.has_own_uid or (self._has_user_namespace and kernel.counts_processes_by_namespace()):
            limits["processes"] = (resource.RLIMIT_NPROC, self._rules.processes)
        else:
            missing.append("no limit on processes")
        for what, (kind, most) in limits.items():
            try:
                hard = resource.getrlimit(kind)[1]
                within = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.setrlimit(kind, (within, within))
            except (OSError, ValueError):
                missing.append(f"no limit on {what}")
        if sys.platform != "linux":
            missing.append("a limit on memory only as far as this system keeps to it")
        return missing


def _may_read_code(uid: int) -> bool:
    """Returns True where that user reaches every place that modules are imported from.

    A child process becomes that user and tries: a process can't change back.
    """
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            entries = [*sys.path, sys.prefix, os.path.dirname(os.__file__)]
            reads = all(os.access(entry, os.R_OK) or _is_absent(entry) for entry in entries)
            os._exit(0 if reads else 1)  # an exit code: 0 says that all can be read
        except BaseException:
            # A forked copy of the service must not return into its caller's code.
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def _is_absent(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False
