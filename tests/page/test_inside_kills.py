"""A job's inside on the page while processes of a real stack die: what the page shows is what became of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from contracts.encoding.wire import encode_json
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from tests.chaos.short_job import DEADLINE_S, long_variant, short_job
from tests.forked import ForkedChild
from tests.page.browsing import chromium, opened
from tests.until import until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[EmbeddedStack]:
    options = StackOptions(run_root=tmp_path / "runs", model_root=ROOT, threads=1, generators=2)
    with EmbeddedStack(options, child=ForkedChild) as made:
        yield made


def ask(stack: EmbeddedStack, method: str, path: str, **request: Any) -> Any:
    headers = {"Authorization": f"Bearer {stack.api_key}", "Content-Type": "application/json"}
    answer = httpx.request(method, f"{stack.gateway_url}{path}", headers=headers, timeout=60.0, **request)
    answer.raise_for_status()
    return answer.json()


def seen(stack: EmbeddedStack, element: Locator, what: str) -> None:
    """Waits until the page shows it; the launcher replaces what died meanwhile."""
    until(element.count, what, deadline_s=DEADLINE_S, tick=stack.tick)


def generators(page: Page, state: str) -> Locator:
    return page.locator("tr").filter(has=page.locator(".badge", has_text=state))


@long_variant
def test_killed_processes_are_seen_to_go_and_new_ones_to_come_and_the_job_ends_verified(stack: EmbeddedStack) -> None:
    job_id = ask(stack, "POST", "/v1/jobs", content=encode_json(short_job(iterations=150, recording={})))["job_id"]
    with (
        chromium() as browser,
        opened(browser, stack.gateway_url, stack.api_key, f"jobs/{job_id}/fence") as fence,
        opened(browser, stack.gateway_url, stack.api_key, f"jobs/{job_id}/lanes") as lanes,
    ):
        seen(stack, generators(fence, "live").nth(1), "two live generators")
        seen(stack, lanes.locator(".lane-labels li").nth(2), "the lanes of the trainer and of two generators")
        os.kill(stack.pids["generator-1"], signal.SIGKILL)
        seen(stack, generators(fence, "gone"), "the killed generator as gone")
        seen(stack, generators(fence, "live").nth(1), "a new generator in its place")
        before = stack.pids["gateway"]
        os.kill(before, signal.SIGKILL)
        seen(stack, fence.get_by_text("The gateway does not answer"), "the banner")
        seen(stack, fence.locator("body:not(:has(.banner))"), "the page without it")
        assert stack.pids["gateway"] != before
        ask(stack, "POST", f"/v1/jobs/{job_id}/cancel")
        seen(stack, fence.locator(".badge.cancelled"), "the end of the job")
        fence.get_by_role("link", name="Rollouts").click()
        seen(stack, fence.locator(".token.heat-1, .token.heat-2, .token.heat-3").first, "a sampled token's shade")
        seen(stack, fence.locator(".sample-again", has_text=f"onbeat replay {job_id}"), "the command that repeats it")
        fence.get_by_role("link", name="Audit").click()
        fence.get_by_role("button", name="Verify").click()
        seen(stack, fence.get_by_text("Verified."), "the verdict")
