"""Landlock (Linux 5.13): a process that asks for no privilege gives up writing files, and reading all but a list.

A caged process reads the interpreter, what is imported from, the system's libraries, its own folder, and what the
operator adds (`ONBEAT_CAGE_READABLE`). Whatever else its user may read is closed to it, the home folder above all.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from onbeat.base.cage import kernel
from onbeat.base.cage.kernel import syscall

CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
RULE_PATH_BENEATH = 1
VERSION = 1

WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
READS = READ_FILE | READ_DIR
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
ALL_OF_VERSION_1 = (1 << 13) - 1
REFER = 1 << 13
TRUNCATE = 1 << 14
CONNECT_OR_BIND_TCP = 0b11
SCOPE_ABSTRACT_SOCKETS = 1
SCOPE_SIGNALS = 2
DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
"""Devices that may be written and read."""
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store"),
    *("/dev/urandom", "/dev/random"),
    *("/proc", "/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm"),
)
"""Programs and libraries of the system, and where the kernel tells what the machine has. Of other processes' entries in
/proc Landlock shows neither environment nor memory nor open files, in a PID namespace of its own none is there."""
ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "alternatives", "os-release", "debian_version"),
    *("localtime", "timezone", "locale.alias", "mime.types", "magic", "fonts", "matplotlibrc", "passwd", "group"),
    *("ssl/openssl.cnf", "ssl/certs", "ssl/cert.pem", "pki/tls/cert.pem", "pki/tls/certs", "pki/ca-trust/extracted"),
    *("nsswitch.conf", "hosts", "host.conf", "resolv.conf", "gai.conf", "services", "protocols"),
)
"""Files and folders of /etc that libraries read. Others of it may hold secrets of the host."""


EDITABLE = "__editable__"
"""The names of setuptools' finders begin with it."""
UNLOCKED = "files that its uid may write or read can be written and read"
"""The sentence for a kernel without Landlock."""


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def restrict_files(
    *,
    writable: str | None,
    readable: Sequence[str],
    hidden: Sequence[str],
    home: str,
    tcp: bool,
    abstract_sockets: bool,
) -> list[str]:
    """Forbids this process to write but below `writable`, and to read but what code needs and what `readable` adds.

    It also keeps this process from looking into processes outside (their environment and memory), and, where the kernel
    is new enough, from signalling them. Call it without privileges, after PR_SET_NO_NEW_PRIVS.

    Args:
        writable: The one folder that may be written and read; None where nothing may be written.
        readable: Files and folders that may be read beside the interpreter, libraries and the system's files.
        hidden: Folders that stay closed where they lie inside of what may be read.
        home: The home folder of the service's user, which an entry of `sys.path` never opens; "" where it has none.
        tcp: True where it may listen and connect.
        abstract_sockets: True where it may reach those of processes outside.

    Returns:
        A sentence for each thing that this kernel, or the place of a folder, doesn't allow to lock.
    """
    version = syscall(CREATE_RULESET, None, 0, VERSION) if kernel.IS_LINUX else -1
    if version < 1:
        return [UNLOCKED]
    closed, exposed = _split(hidden)
    # Each version of Landlock knows more rights; a kernel refuses a set that names a right or a field which it doesn't
    # know, so the set has only what this kernel's version has, and its first `size` bytes.
    writes = WRITE_FILE | REMOVE_AND_MAKE
    if version >= 2:
        writes |= REFER
    if version >= 3:
        writes |= TRUNCATE
    rules = _Ruleset(handled_access_fs=writes | READS)
    size = 8
    if version >= 4:
        size = 16
        if not tcp:
            rules.handled_access_net = CONNECT_OR_BIND_TCP
    if version >= 6:
        size = 24
        rules.scoped = SCOPE_SIGNALS
        if not abstract_sockets:
            rules.scoped |= SCOPE_ABSTRACT_SOCKETS
    ruleset = syscall(CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset < 0:
        return [UNLOCKED]
    try:
        if writable is not None:
            _allow(ruleset, writable, writes | READS)
        for device in DEVICES:
            _allow(ruleset, device, WRITE_FILE | READ_FILE)
        for path, access in readable_places(readable, closed, home=home):
            _allow(ruleset, str(path), access)
        if syscall(RESTRICT_SELF, ruleset, 0) != 0:
            return [UNLOCKED]
    finally:
        os.close(ruleset)
    return [f"{path} is readable, since code is imported from inside it" for path in exposed]


def close_all_files() -> None:
    """Forbids opening any file from here on, to read it, write it or run it, where the kernel can."""
    rules = _Ruleset(handled_access_fs=ALL_OF_VERSION_1)
    ruleset = -1
    if kernel.IS_LINUX:
        ruleset = syscall(CREATE_RULESET, ctypes.byref(rules), 8, 0)
    if ruleset >= 0:
        syscall(RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def scopes_signals() -> bool:
    """Returns True where the kernel can keep a process from signalling those outside: Linux 6.12."""
    return kernel.IS_LINUX and syscall(CREATE_RULESET, None, 0, VERSION) >= 6


def import_places() -> list[Path]:
    """Lists the files and folders that this process imports from."""
    return list(dict.fromkeys((*_interpreter(), *_packages_in_place(), *_resolved(sys.path))))


def _interpreter() -> list[Path]:
    return _resolved((sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)))


def _packages_in_place() -> list[Path]:
    """Lists packages of `pip install -e`, which setuptools finds by tables of its own and not by `sys.path`."""
    tables = [getattr(module, "MAPPING", {}) for name, module in list(sys.modules.items()) if name.startswith(EDITABLE)]
    return _resolved([str(path) for table in tables for path in table.values()])


def _resolved(paths: Sequence[str]) -> list[Path]:
    return [Path(path).resolve() for path in paths if path]


def readable_places(added: Sequence[str], closed: Sequence[Path], *, home: str) -> Iterator[tuple[Path, int]]:
    """Yields each path that may be read, with READ_FILE, READ_DIR or both. A folder's rights reach all that is below.

    Args:
        added: The operator's files and folders.
        closed: Folders that stay closed, wherever they lie.
        home: The home folder of the service's user, "" where it has none.
    """
    system = [*SYSTEM, *(f"/etc/{name}" for name in ETC), *map(str, Path("/etc").glob("python3*"))]
    whole = [
        *_resolved(system),
        *_mapped_libraries(),
        *_interpreter(),
        *_packages_in_place(),
        *_resolved(added),
    ]
    for place in dict.fromkeys((*whole, *_resolved(sys.path))):
        is_project = not any(place.is_relative_to(folder) for folder in whole)
        closed_inside = [folder for folder in closed if folder.is_relative_to(place)]
        if any(place.is_relative_to(folder) for folder in closed) or (is_project and _holds(place, home)):
            continue
        if not (is_project and place.is_dir()) and not closed_inside:
            yield place, READS
            continue
        # Imports list the folder. The right reaches the closed folders inside, too: names there can be seen, not files.
        yield place, READ_DIR
        for path in _around(place, closed_inside):
            # A project's own folder is where `.env`, `.git` and the like stand.
            if not (is_project and path.parent == place and path.name.startswith(".")):
                yield path, READ_FILE


def _mapped_libraries() -> list[Path]:
    """Lists the shared libraries that this process has loaded, which needn't be the system's; no folder of theirs."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    # address, rights, offset, device, inode, and the file, which may have spaces in its name
    return sorted({Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line and ".so" in line})


def _holds(folder: Path, home: str) -> bool:
    """Returns True where the home folder is this folder, or lies in it."""
    return bool(home) and Path(home).resolve().is_relative_to(folder)


def _split(hidden: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Returns folders that can be closed, and those that hold what is imported."""
    code = import_places()
    paths = [Path(entry).resolve() for entry in hidden]
    exposed = [path for path in paths if any(entry.is_relative_to(path) for entry in code)]
    return [path for path in paths if path not in exposed], exposed


def _around(place: Path, closed: Sequence[Path]) -> Iterator[Path]:
    """Yields what is in a folder but the closed folders: the neighbors of each folder on the way to one."""
    on_the_way = {place, *(parent for path in closed for parent in path.parents if parent.is_relative_to(place))}
    for folder in on_the_way:
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            path = Path(entry.path)
            if path not in on_the_way and path not in closed:
                yield path


def _allow(ruleset: int, path: str, access: int) -> None:
    """Allows a path, unless it is gone, or is a link, which may lead anywhere. A file has no rights of folders."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            access &= WRITE_FILE | READ_FILE | TRUNCATE
        rule = _PathBeneath(allowed_access=access, parent_fd=handle)
        syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(handle)
