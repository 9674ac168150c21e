"""Threads with real scorer processes: one job's long items hold up no other job; a first call may load what is slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from broker.fence import FenceState
from broker.monitor import _generators_waited_for
from contracts.monitor import GeneratorSeen
from contracts.rewards import (
    FormatReward,
    PluginReward,
    RegexReward,
    Result,
    RewardComponent,
    RewardItem,
    RewardRequest,
    RewardSpec,
    Scored,
    Unscorable,
)
from contracts.settings import StackSettings
from onbeat.base.http.outgoing import make_async_client
from onbeat.scoring.reward_client import RewardClient
from reward_service.app import create_app
from reward_service.scoring import pool, scoring_thread
from reward_service.scoring.pool import ScorerPool
from tests.builders import job_spec
from tests.served import serving

DEADLINE_S = 120.0
"""Generous: what these tests forbid takes ten minutes."""
SLEEPS = """
import time

def sleeps(completion):
    time.sleep(float(completion))
    return 1.0
"""
LAZY = """
import functools, time

@functools.cache
def judge():
    time.sleep(4)  # as long as importing torch takes on a busy machine, in proportion
    return lambda text: float(len(text) > 3)

def lazy(completion):
    return judge()(completion)
"""
GROUPS = """
import time
is_loaded = []

def of_groups(completions):
    if not is_loaded:
        time.sleep(4)
        is_loaded.append(True)
    return [float(len(text)) for text in completions]
"""
BACKTRACKS = RegexReward(pattern=r"(?=a)(a+)+$")
"""RE2 has no look-ahead, so `re` matches it."""


@contextmanager
def threads(num_threads: int = 2) -> Iterator[ScorerPool]:
    opened = ScorerPool(num_threads=num_threads)
    try:
        yield opened
    finally:
        opened.close()


def submit(
    scorers: ScorerPool, *texts: str, component: RewardComponent, job_id: str, item_timeout_s: float = 600.0
) -> Future[tuple[Result, ...]]:
    items = tuple(RewardItem(prompt="", completion=text, reference="") for text in texts)
    request = RewardRequest(components=(component,), items=items, item_timeout_s=item_timeout_s, job_id=job_id)
    return scorers.submit(request)


def of_file(source: str, name: str) -> PluginReward:
    return PluginReward(entry_point=name, file=f"{name}.py", source=source)


def until_every_thread_is_busy(scorers: ScorerPool) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while len(scorers._turns._turns) < scorers.num_threads:
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def scores(results: tuple[Result, ...]) -> list[float | str]:
    return [result.reward if isinstance(result, Scored) else result.reason for result in results]


@pytest.mark.parametrize(
    ("component", "text"),
    [(of_file(SLEEPS, "sleeps"), "600"), (BACKTRACKS, "a" * 60 + "b")],
    ids=["plug-in", "pattern"],
)
def test_an_honest_job_is_scored_while_another_jobs_items_would_hold_every_thread_for_ten_minutes(
    component: RewardComponent, text: str
) -> None:
    with threads() as scorers:
        hog = submit(scorers, *[text] * 64, component=component, job_id="hog")
        until_every_thread_is_busy(scorers)
        for _ in range(2):
            honest = submit(scorers, "on time", component=FormatReward(pattern="on.*"), job_id="honest")
            assert scores(honest.result(DEADLINE_S)) == [1.0]
        assert not hog.done()


def test_what_was_taken_back_from_a_job_is_scored_later_and_counts_as_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reward_service.scoring.turns.PATIENCE_S", 1.0)
    restarts: list[int] = []
    scorers = ScorerPool(num_threads=2, on_restart=lambda: restarts.append(1))
    try:
        slow = submit(scorers, "6", "6", "6", component=of_file(SLEEPS, "sleeps"), job_id="slow")
        until_every_thread_is_busy(scorers)
        honest = submit(scorers, "on time", component=FormatReward(pattern="on.*"), job_id="honest")
        assert scores(honest.result(DEADLINE_S)) == [1.0]
        assert not slow.done()
        assert scores(slow.result(DEADLINE_S)) == [1.0, 1.0, 1.0]
    finally:
        scorers.close()
    assert restarts == []


def test_a_pattern_has_its_own_bound_whatever_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_service.scorers.rubric.MAX_PATTERNS_S", 2.0)
    with threads() as scorers:
        (result,) = submit(scorers, "a" * 60 + "b", component=BACKTRACKS, job_id="job").result(DEADLINE_S)
    assert isinstance(result, Unscorable)
    assert (result.reason, result.component) == ("timeout", "regex")
    assert "scoring the item took more than 2 s" in result.detail


@pytest.mark.parametrize(("source", "name"), [(LAZY, "lazy"), (GROUPS, "of_groups")])
def test_the_first_call_in_a_fresh_process_may_load_what_takes_longer_than_an_item(source: str, name: str) -> None:
    with threads() as scorers:
        lazy = submit(
            scorers, "long", "longer", "long", component=of_file(source, name), job_id="lazy", item_timeout_s=1.0
        )
        assert all(isinstance(score, float) for score in scores(lazy.result(DEADLINE_S)))


def test_a_first_call_that_hangs_has_the_longer_time_once_and_a_later_one_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "FIRST_CALL_S", 4.0)
    with threads(num_threads=1) as scorers:
        component = of_file(SLEEPS, "sleeps")
        hung = submit(scorers, "600", "600", component=component, job_id="hung", item_timeout_s=1.0).result(DEADLINE_S)
        assert [isinstance(result, Unscorable) and result.detail.partition(";")[0] for result in hung] == [
            "scoring the item took more than the 4 s of a first call",
            "scoring the item took more than 1 s",
        ]
        texts = ("0", "600", "600")
        later = submit(scorers, *texts, component=component, job_id="quick", item_timeout_s=1.0).result(DEADLINE_S)
        assert isinstance(later[0], Scored)
        assert {result.detail.partition(";")[0] for result in later[1:] if isinstance(result, Unscorable)} == {
            "scoring the item took more than 1 s"
        }
        assert scorers._threads[0]._starters["quick"] is scoring_thread._Starter.QUICK


async def test_what_a_long_request_meets_is_said_with_its_key_before_the_request_ends(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch's completions that each take too long kept a job for twelve minutes without a word."""
    monkeypatch.setattr(pool, "FIRST_CALL_S", 1.0)
    monkeypatch.setattr("onbeat.scoring.reward_client.WATCH_EVERY_S", 0.5)
    reward = RewardSpec(components=(of_file(SLEEPS, "sleeps"),), item_timeout_s=1.0)
    items = [RewardItem(prompt="", completion="600", reference="") for _ in range(256)]
    with serving(create_app(settings, num_threads=2)) as url:
        async with make_async_client(url) as http:
            client = RewardClient(http, key=settings.reward_key)
            scoring = asyncio.ensure_future(client.score(reward, items, job_id="job-1", tries=4, dependency_s=60.0))
            ends_s = time.monotonic() + DEADLINE_S
            while not client.service.seen.tries_again:
                assert time.monotonic() < ends_s
                assert not scoring.done()
                await asyncio.sleep(0.1)
            words = (client.service.seen.tries_again or {})["job-1"]
            scoring.cancel()
            await asyncio.wait({scoring})
    assert "reward `sleeps` timed out: scoring the item took more than 1 s" in words
    assert "raise reward.item_timeout_s, 1 s a completion now, load what is slow when the file is imported" in words
    fence = FenceState(state="open", committed=-1, versions={}, trainer_epoch=1, lease_until_s=0.0)
    live = [GeneratorSeen(worker_id="generator-1", services=(client.service.seen,))]
    waited_for = _generators_waited_for("job-1", job_spec(), fence, live)
    assert waited_for.startswith("the reward service, which is asked again: a scorer process is lost again and again")
