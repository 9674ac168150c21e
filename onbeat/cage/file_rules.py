"""Landlock (Linux 5.13): a process that asks for no privilege gives up writing files, and reading some of them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from onbeat.cage import kernel
from onbeat.cage.kernel import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
VERSION = 1

WRITE_FILE, READ_FILE = 1 << 1, 1 << 2
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
ALL_OF_VERSION_1 = (1 << 13) - 1
REFER, TRUNCATE = 1 << 13, 1 << 14
CONNECT_OR_BIND_TCP = 0b11
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2
DEVICES = ("/dev/null", "/dev/zero", "/dev/full")


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def restrict_files(*, writable: str | None, hidden: Sequence[str], tcp: bool, abstract_sockets: bool) -> list[str]:
    """Forbids writing but below `writable`, and reading below `hidden`; returns what could not be had.

    tcp: whether it may listen and connect. abstract_sockets: whether it may reach those of processes outside.
    It also keeps this process from looking into processes outside (their environment and memory), and, where the kernel
    is new enough, from signalling them. Call it without privileges, after PR_SET_NO_NEW_PRIVS.
    """
    version = syscall(CREATE_RULESET, None, 0, VERSION) if kernel.IS_LINUX else -1
    if version < 1:
        return ["files that its uid may write or read can be written and read"]
    visible, exposed = _split(hidden)
    writes = WRITE_FILE | REMOVE_AND_MAKE | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    rules = _Ruleset(
        handled_access_fs=writes | (READ_FILE if visible else 0),
        handled_access_net=CONNECT_OR_BIND_TCP if version >= 4 and not tcp else 0,
        scoped=SCOPE_SIGNALS | (0 if abstract_sockets else SCOPE_ABSTRACT_SOCKETS) if version >= 6 else 0,
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = syscall(CREATE_RULESET, ctypes.byref(rules), size, 0)
    if ruleset < 0:
        return ["files that its uid may write or read can be written and read"]
    try:
        if writable is not None:
            _allow(ruleset, writable, writes | (READ_FILE if visible else 0))
        for device in DEVICES:
            _allow(ruleset, device, WRITE_FILE)
        for path in _around(visible):
            _allow(ruleset, path, READ_FILE)
        if syscall(RESTRICT_SELF, ruleset, 0) != 0:
            return ["files that its uid may write or read can be written and read"]
    finally:
        os.close(ruleset)
    return [f"{path} is readable, since code is imported from inside it" for path in exposed]


def close_all_files() -> None:
    """Forbids opening any file from here on, to read it, write it or run it, where the kernel can."""
    rules = _Ruleset(handled_access_fs=ALL_OF_VERSION_1)
    ruleset = syscall(CREATE_RULESET, ctypes.byref(rules), 8, 0) if kernel.IS_LINUX else -1
    if ruleset >= 0:
        syscall(RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def scopes_signals() -> bool:
    """Whether the kernel can keep a process from signalling those outside: Linux 6.12."""
    return kernel.IS_LINUX and syscall(CREATE_RULESET, None, 0, VERSION) >= 6


def _split(hidden: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Folders that can be hidden, and those that hold what is imported."""
    code = [Path(entry).resolve() for entry in (*sys.path, sys.prefix, sys.base_prefix) if entry]
    paths = [Path(entry).resolve() for entry in hidden]
    exposed = [path for path in paths if any(entry.is_relative_to(path) for entry in code)]
    return [path for path in paths if path not in exposed], exposed


def _around(hidden: Sequence[Path]) -> Iterator[str]:
    """Lists everything but the hidden folders: the neighbours of each folder on the way to one."""
    if not hidden:
        return
    on_the_way = {parent for path in hidden for parent in path.parents}
    for folder in on_the_way:
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            path = Path(entry.path)
            if path not in on_the_way and path not in hidden:
                yield entry.path


def _allow(ruleset: int, path: str, access: int) -> None:
    """Allows a path, unless it is gone, or is a link that leads into a hidden folder."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        rule = _PathBeneath(allowed_access=access, parent_fd=handle)
        syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(handle)
