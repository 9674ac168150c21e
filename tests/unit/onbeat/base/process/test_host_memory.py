"""Freed memory goes back to the machine."""

from __future__ import annotations

import ctypes
import sys

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
