"""The table of system calls, against the kernel's own headers; the uids of cages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onbeat.base.cage.cage import FIRST_UIDS, MAX_PROCESS_IDS, UIDS_EACH, CageRules, own_slot
from onbeat.base.cage.syscall_numbers import ARCHITECTURES, FIRST_UNREAD, NUMBERS
from onbeat.base.cage.syscall_rules import PROGRAM, cage_filter
from tests.integration.kernel_calls import MACHINES, NEITHER, calls, numbers

HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}
SPELLED_OTHERWISE = {"fstatat": "newfstatat"}
NO_CALLS = {"syscalls", "arch_specific_syscall"}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_tables_have_every_call_of_the_kernels_headers_by_its_number(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"the kernel's headers for {machine} aren't installed ({path})")
    lines: list[tuple[str, str]] = re.findall(pattern, path.read_text())
    found = {SPELLED_OTHERWISE.get(name, name): int(number) for name, number in lines}
    kernel = {name: number for name, number in found.items() if name not in NO_CALLS and not is_of_32_bits(name)}
    walked = numbers(machine)
    assert kernel.keys() - walked.keys() - set(NEITHER.split()) == set()
    assert {name: number for name, number in walked.items() if kernel.get(name, number) != number} == {}
    column = list(ARCHITECTURES).index(machine)
    filtered = {name: both[column] for name, both in NUMBERS.items() if name in kernel}
    assert filtered == {name: kernel[name] for name in filtered}


EMPTIES = """
import ctypes, errno, os, struct, sys
from onbeat.base.cage import kernel
from onbeat.base.cage.syscall_filter import compiled, lock_syscalls
from onbeat.base.cage.syscall_rules import cage_filter

assert kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
assert lock_syscalls(compiled(cage_filter(sockets=False, only_ipv4=False, attributes=False)))
try:
    os.open(sys.argv[1], os.O_RDONLY | os.O_TRUNC)
except OSError as error:
    told = [errno.errorcode[error.errno]]
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall(437, -100, sys.argv[1].encode(), struct.pack("QQQ", os.O_TRUNC, 0, 0), 24)
told += [errno.errorcode[ctypes.get_errno()], open(sys.argv[1]).read()]
open(sys.argv[1], "w").close()
print(*told, "done", end="")
"""


def is_of_32_bits(name: str) -> bool:
    """Calls that only machines of 32 bits have, whose times have 64."""
    return name.endswith("time64")


def test_no_call_is_newer_than_those_that_were_read() -> None:
    assert max(max(numbers(machine).values()) for machine in MACHINES) < FIRST_UNREAD


def test_a_program_has_none_of_the_calls_that_take_a_process_or_a_path() -> None:
    assert PROGRAM.rules.keys() & {call.name for call in calls()} == set()


def test_a_cage_without_mounts_of_its_own_is_refused_what_the_table_says() -> None:
    rules = cage_filter(sockets=False, only_ipv4=False, attributes=False).rules
    assert {call.name for call in calls() if call.ends != "kept"} - rules.keys() == set()


@pytest.mark.skipif(os.uname().machine not in MACHINES or sys.platform != "linux", reason="filters are Linux's")
def test_a_file_is_not_emptied_by_opening_it_to_read_where_only_the_filter_holds(tmp_path: Path) -> None:
    file = tmp_path / "kept"
    file.write_text("kept")
    done = subprocess.run([sys.executable, "-c", EMPTIES, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == "EACCES ENOSYS kept done"


def rules_of(service: Any, slot: int, number: int = 0) -> CageRules:
    return CageRules(
        folder="/tmp", memory_mb=256, network=False, hidden=(), service=service, service_slot=slot, number=number
    )


def test_cages_of_two_kinds_of_services_share_no_uid_whatever_their_process_ids_are() -> None:
    ranges = []
    for kind in FIRST_UIDS:
        first, last = rules_of(kind, 0), rules_of(kind, MAX_PROCESS_IDS - 1, UIDS_EACH - 1)
        for low, high in zip(first.own_uids, last.own_uids, strict=True):
            ranges.append((low, high))
    ranges.sort()
    assert all(high < low for (_, high), (low, _) in pairwise(ranges))
    assert ranges[-1][1] < 2**32 - 2, "the last uids mean none at all"


def test_the_first_processes_of_two_containers_have_slots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    slots = set()
    for namespace in range(4026531836, 4026531836 + 1000):
        facts = type("Facts", (), {"st_ino": namespace})
        monkeypatch.setattr(os, "stat", lambda path, facts=facts: facts)
        slots.add(own_slot())
    assert len(slots) == 1000
