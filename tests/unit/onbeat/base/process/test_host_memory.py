"""Freed memory goes back to the machine."""

from __future__ import annotations

import ctypes
import sys
from mmap import PAGESIZE, mmap
from pathlib import Path

import psutil
import pytest

from consumer.supervisor.trainer_process import trainer_environment
from onbeat.base.process import host_memory
from onbeat.base.process.host_memory import TUNABLES, give_free_memory_back, with_large_pages

PIECE, NUM_PIECES = 64 * 1024, 2000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc keeps it")
def test_free_memory_between_pieces_that_are_held_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("this C library isn't glibc")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE) for _ in range(NUM_PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces[:-1]:
        libc.free(piece)
    process = psutil.Process()
    before = process.memory_info().rss
    give_free_memory_back()
    assert before - process.memory_info().rss > PIECE * NUM_PIECES // 2
    libc.free(pieces[-1])


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    host_memory._malloc_trim.cache_clear()
    give_free_memory_back()
    host_memory._malloc_trim.cache_clear()


def test_a_process_gets_large_pages_beside_what_its_environment_says_of_the_c_library() -> None:
    assert with_large_pages({"HOME": "/"}) == {"HOME": "/", TUNABLES: "glibc.malloc.hugetlb=1"}
    assert with_large_pages({TUNABLES: "glibc.malloc.check=3"})[TUNABLES] == (
        "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    )
    assert with_large_pages({TUNABLES: "glibc.malloc.hugetlb=0"})[TUNABLES] == "glibc.malloc.hugetlb=0"


def test_a_worker_starts_its_trainers_with_large_pages_and_without_its_own_queue() -> None:
    inherited = {"ONBEAT_REDIS_URL": "redis://r", "ONBEAT_NAME": "worker"}
    assert trainer_environment(inherited) == {
        "ONBEAT_REDIS_URL": "redis://r",
        "ONBEAT_METRICS_PORT": "0",
        TUNABLES: "glibc.malloc.hugetlb=1",
    }


def test_the_room_of_a_process_is_what_machine_and_control_group_have_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   3 kB\nSwapFree:  2 kB\n")
    monkeypatch.setattr(host_memory, "MACHINE_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CONTROL_GROUP", tmp_path)
    assert host_memory.room_bytes() == 5 * 1024
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 500\nactive_file 0\n")
    assert host_memory.room_bytes() == 4096 - 2500
    assert host_memory.usable_bytes() == 4096
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "meminfo").unlink()
    assert host_memory.room_bytes() == float("inf")
    assert host_memory.usable_bytes() == host_memory.memory_bytes()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system says it by /proc")
def test_a_peak_is_forgotten_and_met_again() -> None:
    host_memory.forget_peak()
    before = host_memory.peak_bytes()
    assert abs(before - host_memory.resident_bytes()) < 8 * 2**20
    # Of the system itself: what a library frees may stay with the process, as earlier tests have left its settings.
    with mmap(-1, 64 * 2**20) as piece:
        for offset in range(0, len(piece), PAGESIZE):
            piece[offset] = 1
        assert host_memory.peak_bytes() - before > 60 * 2**20
    host_memory.forget_peak()
    assert host_memory.peak_bytes() - before < 32 * 2**20
