"""The page over a whole stack: a job is submitted in the editor, trains as one looks, and outlives a killed gateway."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack
from tests.chaos.short_job import long_variant
from tests.forked import ForkedChild
from tests.page.browsing import chromium, opened, spec_editor, write_spec

if TYPE_CHECKING:
    from playwright.sync_api import expect
else:
    expect = pytest.importorskip("playwright.sync_api").expect

REPOSITORY = Path(__file__).parents[2]
MINUTES = 180_000
SPEC = """name = "{name}"
iterations = {iterations}
model.path = "configs/models/two-digit-addition"
dataset.type = "addition"
reward.components = [{{ type = "exact" }}]
rollout = {{ batches_per_iteration = 4, prompts_per_batch = 8, group_size = 8, sampling = {{ max_new_tokens = 5 }} }}
"""


@contextmanager
def ticking(stack: EmbeddedStack) -> Iterator[EmbeddedStack]:
    """A stack whose processes are watched, as `onbeat up` does, while the browser is waited for."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.25):
            stack.tick()

    with stack:
        watcher = threading.Thread(target=tick)
        watcher.start()
        try:
            yield stack
        finally:
            done.set()
            watcher.join()


@long_variant
def test_a_job_from_the_editor_to_its_deletion_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    options = StackOptions(run_root=tmp_path / "runs", model_root=REPOSITORY, threads=1)
    with (
        chromium() as browser,
        ticking(EmbeddedStack(options, child=ForkedChild)) as stack,
        opened(browser, stack.gateway_url, stack.api_key, "new") as page,
    ):
        expect.set_options(timeout=MINUTES)
        for name, iterations in (("first", "6"), ("second", "200")):
            page.goto(f"{stack.gateway_url}/#/new")
            expect(spec_editor(page)).to_be_visible()
            write_spec(page, SPEC.format(name=name, iterations=iterations))
            page.get_by_role("button", name="Submit job").click()
            page.wait_for_url("**/#/jobs/job-*")
            if name == "first":
                first = page.url.rpartition("/")[2]
                expect(page.locator(".job-head .badge")).to_have_text("succeeded")
                expect(page.get_by_role("slider", name=re.compile("^Reward"))).to_have_attribute(
                    "aria-label", re.compile(r"at 0, .* at 5$")
                )
        reward = page.get_by_role("slider", name=re.compile("^Reward"))
        expect(reward).to_have_attribute("aria-label", re.compile(r" at [3-9]\d*$"))
        killed = stack.pids["gateway"]
        os.kill(killed, signal.SIGKILL)
        page.get_by_text("The gateway does not answer since").wait_for(timeout=MINUTES)
        expect(page.get_by_text("The gateway does not answer since")).to_have_count(0)
        assert stack.pids["gateway"] != killed
        before = reward.get_attribute("aria-label")
        expect(reward).not_to_have_attribute("aria-label", before or "")
        page.get_by_label("Compare with another job").select_option(value=first)
        expect(reward).to_have_attribute("aria-label", re.compile("^Reward. second: .*; first: .* at 5$"))
        page.get_by_role("button", name="Cancel second").click()
        page.get_by_role("button", name="Cancel the job").click()
        expect(page.locator(".job-head .badge")).to_have_text("cancelled")
        page.get_by_role("button", name="Resume second").click()
        committed = int(page.locator(".job-facts").inner_text().split()[1])
        page.get_by_label("Iterations in all").fill(str(committed + 3))
        page.get_by_role("button", name="Resume the job").click()
        expect(page.locator(".job-head .badge")).to_have_text("succeeded")
        page.get_by_role("button", name="Delete second").click()
        page.get_by_role("button", name="Delete for ever").click()
        page.wait_for_url("**/#/jobs")
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("tbody tr")).to_contain_text("first")
