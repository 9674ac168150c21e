"""Ranks of several processes come from an extra; a job that asks for them where it isn't is refused by its field."""

from __future__ import annotations

from typing import Any

import pytest

import consumer.__main__ as program
from broker.job_store import JobStore
from consumer.ranks import rank_processes as processes
from consumer.ranks.rank_processes import own_processes, rank_processes
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from tests.builders import job_spec

HOSTS: dict[str, Any] = {"trainer__hosts": {"least": 1, "most": 1}, "weights": {"transport": "redis"}}


class Installed:
    """What an extra offers, and how it was called."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def launch(self, settings: StackSettings, broker: object, spec: object, job_id: str) -> int:
        self.called.append((settings.threads, job_id))
        return 7

    def follow(self, settings: StackSettings) -> int:
        self.called.append("follow")
        return 8


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the group of entry points offers."""
    found: dict[str, object] = {}
    monkeypatch.setattr(processes, "all_of", lambda group: found if group == "onbeat.ranks" else {})
    return found


def runs(monkeypatch: pytest.MonkeyPatch, rank: str = "", **changes: Any) -> int:
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(program, "connect", lambda *_, **__: None)
    monkeypatch.setattr(program, "end_with_parent", lambda _: None)
    monkeypatch.setattr(JobStore, "__init__", lambda *_: None)
    monkeypatch.setattr(JobStore, "spec", lambda *_: job_spec(**changes))
    return program.run(StackSettings(), "job")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer__world_size": 2}, "trainer.world_size"),
        ({"trainer__world_size": 2, "trainer__sharding": "fsdp"}, "trainer.world_size"),
        (HOSTS, "trainer.hosts"),
    ],
)
def test_a_job_of_several_ranks_is_refused_by_its_field_where_nothing_starts_them(
    changes: dict[str, Any], field: str, offers: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput) as refused:
        runs(monkeypatch, **changes)
    assert (refused.value.field, "isn't installed" in refused.value.problem) == (field, True)
    assert "let one process train" in (refused.value.cure or "")


def test_what_is_installed_launches_ranks_and_is_followed_by_those_beside_the_first(
    offers: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = offers["processes"] = Installed()
    assert (runs(monkeypatch, trainer__world_size=2), runs(monkeypatch, **HOSTS)) == (7, 7)
    assert runs(monkeypatch, rank="1") == 8
    assert installed.called == [(1, "job"), (1, "job"), "follow"]


def test_only_a_rank_of_several_has_others(offers: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    offers["processes"] = Installed()
    monkeypatch.delenv("RANK", raising=False)
    assert own_processes() is None
    monkeypatch.setenv("RANK", "0")
    assert own_processes() is rank_processes() is offers["processes"]
