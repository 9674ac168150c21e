"""`/readyz` is open to everyone: what it costs is one check in a while, and what it says is that check's answer."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import httpx
import pytest
from fastapi import FastAPI, Request

from contracts.errors import Unavailable
from onbeat.base.http.process_routes import NOT_READY_S, READY_S, Readiness, process_routes


class Checked:
    """A check that is counted, and waits until it may end."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.num_checks = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None
        self.readiness = Readiness(self._check, clock=lambda: self.now_s)

    async def _check(self) -> None:
        self.num_checks += 1
        await self.may_end.wait()
        if self.error:
            raise self.error


async def test_a_thousand_questions_at_once_are_one_check_also_where_the_first_client_is_gone() -> None:
    checked = Checked()
    asked = [asyncio.create_task(checked.readiness.require()) for _ in range(1000)]
    await asyncio.sleep(0)
    asked[0].cancel()
    await asyncio.sleep(0)
    checked.may_end.set()
    await asyncio.gather(*asked[1:])
    assert checked.num_checks == 1


@pytest.mark.parametrize(("error", "lasts_s"), [(None, READY_S), (Unavailable("not now"), NOT_READY_S)])
async def test_an_answer_stands_for_a_while_and_then_the_service_is_asked_again(
    error: Exception | None, lasts_s: float
) -> None:
    checked, counted = Checked(), []
    checked.may_end.set()
    checked.error = error
    for passes_s in (0.0, 0.5 * lasts_s, 0.499 * lasts_s, 0.01 * lasts_s):
        checked.now_s += passes_s
        with pytest.raises(Unavailable, match="not now") if error else nullcontext():
            await checked.readiness.require()
        counted.append(checked.num_checks)
    assert counted == [1, 1, 1, 2]


async def test_the_route_asks_once_for_many_requests() -> None:
    num_checks = 0

    async def check(_: Request) -> None:
        nonlocal num_checks
        num_checks += 1

    app = FastAPI()
    app.include_router(process_routes(require_ready=check, exposition=lambda _: b""))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert {(await client.get("/readyz")).status_code for _ in range(10)} == {200}
    assert num_checks == 1
