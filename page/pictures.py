"""The pictures of docs/images/ that show the page: `make page-pictures`, some minutes.

embedded stack ─▶ two demos, in one of which a generator is killed and comes back, one that fails, one that runs on
               ─▶ headless Chromium ─▶ docs/images/page-*.png
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from uuid import uuid4

from playwright.sync_api import Browser, Page, sync_playwright

from contracts.jobs import JobStatus
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.stack.access import page_address
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DESK, PHONE = (1280, 860), (390, 844)
POLL_S = 0.25
DEADLINE_S = 900.0
RECORDED = "recording.keep_iterations=5"
OTHER = ('name="half the learning rate"', "iterations=50", "optimizer.learning_rate=4.5e-4", 'tags=["learning rate"]')
SHOWN = ('name="two-digit addition"', "iterations=110", RECORDED, 'tags=["learning rate"]')
FAILS = ('name="prompts that are too long"', "iterations=20", "rollout.max_prompt_tokens=1")
RUNNING = ('name="two-digit addition, from another seed"', "iterations=400", "seed=7", RECORDED)
QUEUED = ('name="waits for its turn"', "iterations=100")


@dataclass(frozen=True, kw_only=True)
class Camera:
    browser: Browser
    url: str
    key: str

    def take(
        self,
        name: str,
        place: str,
        *,
        size: tuple[int, int] = DESK,
        scheme: Literal["light", "dark"] = "light",
        ready: str = "main .card",
        pose: Callable[[Page], None] = lambda page: None,
    ) -> None:
        context = self.browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, device_scale_factor=1.5
        )
        page = context.new_page()
        page.goto(page_address(self.url, self.key))
        page.goto(f"{self.url}/#/{place}")
        page.locator(ready).first.wait_for()
        pose(page)
        page.wait_for_timeout(1500)
        page.screenshot(path=IMAGES / f"page-{name}.png")
        context.close()


def submitted(
    client: GatewayClient, stack: EmbeddedStack, settings: tuple[str, ...], *, until: int | None = None
) -> JobStatus:
    """A job of the demo's spec with these settings, looked at until its end, or until so many iterations are done."""
    job = client.submit(load_spec(ROOT / "configs" / "demo.toml", settings), idempotency_key=uuid4().hex)
    return looked_at(client, stack, job, until=until)


def looked_at(client: GatewayClient, stack: EmbeddedStack, job: JobStatus, *, until: int | None = None) -> JobStatus:
    waiting = Waiting(f"job {job.name}", deadline_s=DEADLINE_S)
    while not (job.state.is_final or (until is not None and job.iterations_committed >= until)):
        waiting.poke()
        stack.tick()
        time.sleep(POLL_S)
        job = client.job(job.job_id)
    return job


def under_the_cursor(page: Page) -> None:
    box = page.get_by_role("slider", name=re.compile("^Reward")).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.5)


def smoothed(page: Page) -> None:
    page.get_by_label("Smoothed").fill("0.8")
    under_the_cursor(page)


def events(page: Page) -> None:
    page.get_by_role("heading", name="Events").scroll_into_view_if_needed()
    page.mouse.wheel(0, DESK[1])


def refused(page: Page) -> None:
    """Types a value that the gateway refuses, and waits until it is underlined."""
    page.get_by_role("textbox", name="Spec of the job").focus()
    page.keyboard.press("Control+Home")
    page.keyboard.type('tags = "learning rate"\n')
    page.locator(".findings").wait_for()


def first_batch(page: Page) -> None:
    page.wait_for_timeout(500)
    batch = page.locator("main a[href*='batch=']").first
    if batch.count():
        batch.click()
        page.locator("#sample-0").wait_for()


def take_all(camera: Camera, job_id: str, other_id: str) -> None:
    job = f"jobs/{job_id}"
    camera.take("jobs", "jobs")
    camera.take("jobs-dark", "jobs", scheme="dark")
    camera.take("jobs-phone", "jobs", size=PHONE)
    camera.take("overview", job, ready=".chart", pose=under_the_cursor)
    camera.take("compare-dark", f"{job}?compare={other_id}", scheme="dark", ready=".chart", pose=smoothed)
    camera.take("events", job, ready=".chart", pose=events)
    camera.take("overview-phone", job, size=PHONE, ready=".chart")
    camera.take("new", "new", ready=".editor", pose=refused)
    camera.take("lanes", f"{job}/lanes")
    camera.take("fence-dark", f"{job}/fence", scheme="dark")
    camera.take("rollouts", f"{job}/rollouts", pose=first_batch)
    camera.take("audit", f"{job}/audit")
    camera.take("spec-dark", f"{job}/spec", scheme="dark")
    camera.take("log", f"{job}/log", ready="[role=log]")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="onbeat-pictures-") as folder, sync_playwright() as playwright:
        options = StackOptions(run_root=Path(folder) / "runs", model_root=ROOT, threads=1, generators=2)
        with EmbeddedStack(options) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
            other = submitted(client, stack, OTHER)
            job = submitted(client, stack, SHOWN, until=40)
            os.kill(stack.pids["generator-2"], signal.SIGKILL)
            job = looked_at(client, stack, job)
            submitted(client, stack, FAILS)
            submitted(client, stack, RUNNING, until=8)
            submitted(client, stack, QUEUED, until=0)
            chromium = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            take_all(Camera(browser=browser, url=stack.gateway_url, key=stack.api_key), job.job_id, other.job_id)
            browser.close()


if __name__ == "__main__":
    main()
