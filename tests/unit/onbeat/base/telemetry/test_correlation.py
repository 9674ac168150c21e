"""One id for all lines about a batch, in each process that meets it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from msgspec.structs import replace
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from contracts.errors import OnbeatError
from contracts.rewards import RewardItem
from contracts.settings import StackSettings
from onbeat.base.http.access import Access, AccessRules
from onbeat.base.telemetry import logs
from onbeat.base.telemetry.correlation import about, about_batch, current_facts, trace_headers, trace_id_of
from onbeat.scoring.reward_client import RewardClient
from tests.builders import job_spec

BATCH = {"iteration": 7, "batch_id": "7/train/2", "attempt": 1}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure(replace(StackSettings(), log_format="json"), service="test", stream=stream)
    yield stream
    root.handlers[:], root.level = before, level


def test_each_line_about_a_batch_has_its_facts_and_one_id(lines: io.StringIO) -> None:
    log = logging.getLogger("any")
    with about_batch("job-1", **BATCH):  # type: ignore[arg-type]
        log.info("claimed")
    log.info("about nothing")
    with about(job="job-1", iteration=8):
        log.info("committed", extra={"facts": {"iteration": 9}})
    claimed, nothing, committed = (json.loads(line) for line in lines.getvalue().splitlines())
    facts = {name: claimed[name] for name in ("job", "iteration", "batch_id", "attempt", "trace_id")}
    assert facts == {"job": "job-1", **BATCH, "trace_id": trace_id_of("job-1", "7/train/2")}
    assert "job" not in nothing
    assert (committed["job"], committed["iteration"]) == ("job-1", 9)


async def test_two_batches_that_are_carried_at_once_keep_their_own_facts() -> None:
    async def carry(number: int) -> object:
        with about_batch("job-1", iteration=0, batch_id=f"0/train/{number}", attempt=1):
            await asyncio.sleep(0)
            return current_facts()["batch_id"]

    assert await asyncio.gather(carry(0), carry(1)) == ["0/train/0", "0/train/1"]
    assert trace_headers() == {}


async def test_the_id_goes_with_the_request_and_comes_out_in_the_lines_of_the_service(lines: io.StringIO) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        logging.getLogger("service").info("scoring")
        await PlainTextResponse("no", status_code=422)(scope, receive, send)

    rules = AccessRules.of(StackSettings(), key="k", key_setting="ONBEAT_REWARD_KEY")
    transport = httpx.ASGITransport(Access(app, rules))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        client = RewardClient(http, key="k")
        reward = replace(job_spec().reward, max_attempts=1)
        item = RewardItem(prompt="p", completion="c", reference="r")
        with about_batch("job-1", **BATCH), suppress(OnbeatError):  # type: ignore[arg-type]
            await client.score(reward, [item], job_id="job-1", tries=1, dependency_s=0.1)
        for hostile in ("", "00-0-0-0", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "x" * 10_000):
            await http.get("/", headers={"Authorization": "Bearer k", "traceparent": hostile})
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    scoring = [one.get("trace_id") for one in found if one["logger"] == "service"]
    assert scoring == [trace_id_of("job-1", "7/train/2"), None, None, None, None]
