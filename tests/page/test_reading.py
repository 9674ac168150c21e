"""What one reads of a job: its curves over three axes, their points as files, its spec, its log, its model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from contracts.events import Rewound, TrainerStarted
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from tests.builders import job_spec
from tests.page.browsing import PHONE
from tests.page.test_screens import Gateway, at, browser, gateway, row  # noqa: F401

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, expect
else:
    expect = pytest.importorskip("playwright.sync_api").expect

PNG = b"\x89PNG\r\n\x1a\n"


def saved(page: Page, button: str) -> bytes:
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    return Path(download.value.path()).read_bytes()


def test_curves_stand_over_time_and_tokens_and_are_saved(gateway: Gateway, browser: Browser) -> None:  # noqa: F811
    job_id, _ = gateway.jobs.create(job_spec(name="=read"))
    gateway.jobs.move(job_id, JobState.RUNNING)
    gateway.trained(job_id, range(4))
    with at(browser, gateway, f"jobs/{job_id}") as page:
        reward = page.get_by_role("slider", name=re.compile("^Reward"))
        expect(reward).to_have_attribute("aria-label", "Reward. Reward: 0 at 0, 0.300 at 3")
        assert saved(page, "Save Reward as CSV").decode() == "iteration,Reward\n0,0\n1,0.1\n2,0.2\n3,0.3\n"
        page.get_by_label("Curves over").select_option("tokens")
        tokens = gateway.tokens_of(job_id)
        first, last = f"{tokens[0]:,}", f"{sum(tokens):,}"
        expect(reward).to_have_attribute(
            "aria-label", f"Reward. Reward: 0 at after {first} tokens, 0.300 at after {last} tokens"
        )
        reward.focus()
        page.keyboard.press("Home")
        expect(page.get_by_label("Numbers of one iteration").get_by_role("heading")).to_have_text("Iteration 0")
        assert saved(page, "Save Reward as CSV").startswith(b"tokens,Reward\n")
        page.get_by_label("Log scale").check()  # iteration 0 has no logarithm, and the others stay
        expect(reward).to_be_visible()
        assert saved(page, "Save Reward as PNG").startswith(PNG)
        page.reload()
        expect(page.get_by_label("Curves over")).to_have_value("tokens")
        page.get_by_label("Curves over").select_option("time")
        expect(reward).to_have_attribute(
            "aria-label", re.compile(r"^Reward\. Reward: 0 at after .* s, 0\.300 at after")
        )
    gateway.jobs.move(job_id, JobState.FAILED, reason="the test is over")


def test_several_jobs_lie_over_one_another_and_each_can_go(gateway: Gateway, browser: Browser) -> None:  # noqa: F811
    made = [gateway.jobs.create(job_spec(name=f"seed {number}"))[0] for number in range(3)]
    for number, job_id in enumerate(made):
        gateway.trained(job_id, range(3 + number))
    with at(browser, gateway, f"jobs/{made[0]}") as page:
        reward = page.get_by_role("slider", name=re.compile("^Reward"))
        for other in made[1:]:
            page.get_by_label("Compare with another job").select_option(value=other)
        expect(reward).to_have_attribute(
            "aria-label", "Reward. seed 0: 0 at 0, 0.200 at 2; seed 1: 0 at 0, 0.300 at 3; seed 2: 0 at 0, 0.400 at 4"
        )
        expect(page.get_by_label("Numbers of one iteration").get_by_role("heading")).to_have_text("Iteration 2")
        page.get_by_role("button", name="Compare no more with seed 1").click()
        expect(reward).to_have_attribute("aria-label", re.compile("^Reward. seed 0: [^;]*; seed 2: [^;]*$"))
        assert page.url.endswith(f"compare={made[2]}")
    for job_id in made:
        gateway.jobs.move(job_id, JobState.CANCELLED)


def test_runs_of_one_tag_are_found_and_drawn_as_their_mean(gateway: Gateway, browser: Browser) -> None:  # noqa: F811
    tagged = [gateway.jobs.create(job_spec(name=f"run {number}", tags=["a sweep"]))[0] for number in range(3)]
    other, _ = gateway.jobs.create(job_spec(name="run without a tag"))
    for number, job_id in enumerate(tagged):
        gateway.trained(job_id, range(4), rise=0.1 * (1 + number))
    with at(browser, gateway, "jobs?name=run") as page:
        row(page, "run without a tag").wait_for()
        row(page, "run 0").get_by_role("link", name="a sweep").click()
        expect(page.locator("tbody tr")).to_have_count(3)
        page.get_by_role("button", name="Show others than those tagged a sweep").click()
        row(page, "run without a tag").wait_for()
        row(page, "run 0").get_by_role("link", name="run 0", exact=True).click()
        page.get_by_label("Compare with another job").select_option("tagged a sweep")
        reward = page.get_by_role("slider", name=re.compile("^Reward"))
        expect(reward).to_have_attribute("aria-label", re.compile("run 0: [^;]*; run 2: [^;]*; run 1: [^;]*$"))
        page.get_by_label("Mean by tags").check()
        expect(reward).to_have_attribute("aria-label", "Reward. a sweep (mean of 3): 0 at 0, 0.600 at 3")
        expect(page.get_by_text("a sweep (mean of 3)").first).to_be_visible()
    for job_id in (*tagged, other):
        gateway.jobs.move(job_id, JobState.CANCELLED)


def test_a_killed_trainer_is_an_event_that_stands_out(gateway: Gateway, browser: Browser) -> None:  # noqa: F811
    job_id, _ = gateway.jobs.create(job_spec(name="killed"))
    started = TrainerStarted(at_s=1.0, trainer_epoch=7, next_iteration=0, resumed=False)
    gateway.jobs.tell(job_id, started)
    gateway.trained(job_id, range(3))
    with at(browser, gateway, f"jobs/{job_id}") as page:
        events = page.locator(".events li")
        expect(events.filter(has_text="begins at iteration 0")).to_have_count(1)
        expect(page.get_by_text("Alarms only")).to_have_count(0)
        gateway.jobs.tell(job_id, replace(started, trainer_epoch=8, next_iteration=1, resumed=True))
        gateway.jobs.tell(job_id, Rewound(at_s=2.0, iteration=1, committed=2, trainer_epoch=8))
        gateway.trained(job_id, range(1, 3), rise=0.25)
        goes_on = "goes on at iteration 1 where the trainer before it ended, or was killed"
        expect(events.filter(has_text=goes_on)).to_have_count(1)
        expect(events.filter(has_text="to iteration 1: what was trained up to 2 is done again")).to_have_count(1)
        expect(page.get_by_text("Alarms only (2)")).to_be_visible()
        gateway.count(job_id, "reclaimed", 3)
        expect(page.get_by_text("3 batches were taken over from generators that were killed")).to_be_visible()
        reward = page.get_by_role("slider", name=re.compile("^Reward"))
        expect(reward).to_have_attribute("aria-label", "Reward. Reward: 0 at 0, 0.500 at 2")
        reward.focus()
        page.keyboard.press("ArrowLeft")
        expect(reward).to_have_attribute("aria-valuetext", "iteration 1; Reward: 0.250")
    gateway.jobs.move(job_id, JobState.CANCELLED)


def test_spec_log_and_the_command_for_the_model_are_there(gateway: Gateway, browser: Browser) -> None:  # noqa: F811
    job_id, _ = gateway.jobs.create(job_spec(name="<b>whole</b>", seed=41))
    gateway.trained(job_id, range(2))
    folder = RunFolder(gateway.settings.run_root_path, job_id)
    folder.trainer_log.write_text("".join(f"line {number}\n" for number in range(20_000)) + "\x1b[2J the end\n")
    with at(browser, gateway, f"jobs/{job_id}") as page:
        command = page.locator(".model .command")
        expect(command).to_have_text(f"onbeat export {job_id} my-model")
        page.get_by_role("link", name="Spec", exact=True).click()
        expect(page.locator(".spec-text")).to_contain_text('"seed": 41')
        expect(page.locator(".spec-text")).to_contain_text('"name": "<b>whole</b>"')
        assert json.loads(saved(page, "Save as JSON"))["seed"] == 41
        page.get_by_role("link", name="Log", exact=True).click()
        log = page.get_by_role("log")
        expect(log).to_contain_text("line 19999")
        expect(log).to_contain_text("ESC[2J the end")
        assert "line 100\n" not in log.inner_text()
        with folder.trainer_log.open("a") as file:
            file.write("one more\n")
        expect(log).to_contain_text("one more")
        page.get_by_role("button", name="Show more of it").click()
        expect(log).to_contain_text("line 2000\n")
        page.goto(f"{gateway.url}/#/jobs?name=whole")
        expect(row(page, "<b>whole</b>").get_by_role("button", name=f"copy {job_id}")).to_have_text(job_id)
    gateway.jobs.move(job_id, JobState.CANCELLED)


def test_on_a_phone_numbers_stand_before_what_changes_the_view(gateway: Gateway, browser: Browser) -> None:  # noqa: F811
    job_id, _ = gateway.jobs.create(job_spec(name="on a phone"))
    gateway.trained(job_id, range(3))
    with at(browser, gateway, f"jobs/{job_id}", size=PHONE) as page:
        places = [".job-facts", ".job-top .actions", ".charts", ".readout", ".controls", ".model", ".of-events"]
        page.locator(".chart canvas").first.wait_for()
        tops = [page.locator(place).evaluate("(one) => one.getBoundingClientRect().top") for place in places]
        assert tops == sorted(tops)
        for tab in page.locator(".tabs a").all():
            box = tab.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= PHONE["width"], "no tab lies where nobody looks"
        page.goto(f"{gateway.url}/#/jobs/{job_id}/fence")
        expect(page.get_by_text("scroll it sideways").first).to_be_visible()
    with at(browser, gateway, f"jobs/{job_id}/fence") as page:
        page.get_by_role("heading", name="Streams in Redis").wait_for()
        expect(page.get_by_text("scroll it sideways")).to_have_count(0)
    gateway.jobs.move(job_id, JobState.CANCELLED)
