"""A job of several ranks: the first process launches them, and each of those that it starts knows what it is."""

from __future__ import annotations

from typing import Any

import pytest

import consumer.__main__ as program
from broker.job_store import JobStore
from consumer.ranks import launching
from contracts.settings import StackSettings
from tests.builders import job_spec

HOSTS: dict[str, Any] = {"trainer__hosts": {"least": 1, "most": 1}, "weights": {"transport": "redis"}}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of `launching` that were called, in order, each with the job that it was called for."""
    called: list[str] = []

    def launch(settings: StackSettings, broker: object, spec: object, job_id: str) -> int:
        called.append(f"launch {job_id}")
        return 7

    def follow(settings: StackSettings) -> int:
        called.append("follow")
        return 8

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr(launching, "follow", follow)
    return called


def exit_code(monkeypatch: pytest.MonkeyPatch, rank: str = "", **changes: Any) -> int:
    """Runs `python -m consumer` for a job of these changes, as the rank where one is named."""
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(program, "connect", lambda *_, **__: None)
    monkeypatch.setattr(program, "end_with_parent", lambda _: None)
    monkeypatch.setattr(JobStore, "__init__", lambda *_: None)
    monkeypatch.setattr(JobStore, "spec", lambda *_: job_spec(**changes))
    return program.run(StackSettings(), "job")


@pytest.mark.parametrize("changes", [{"trainer__world_size": 2}, HOSTS], ids=["of one host", "of several"])
def test_the_first_process_of_a_job_of_several_ranks_launches_them(
    changes: dict[str, Any], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code(monkeypatch, **changes) == 7
    assert calls == ["launch job"]


def test_a_rank_other_than_0_follows_the_first(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(monkeypatch, rank="1") == 8
    assert calls == ["follow"]


def test_only_a_process_that_a_launcher_started_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert not launching.is_rank()
    monkeypatch.setenv("RANK", "0")
    assert launching.is_rank()
