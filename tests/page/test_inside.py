"""A job's inside on the page: lanes, fence, rollouts and audit chain over a real gateway, with hostile texts in all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from broker.presence import ConsumerPresence, Presence
from contracts.encoding.arrays import pack_int32
from contracts.encoding.json_lines import append_json_lines
from contracts.encoding.wire import encode
from contracts.jobs import JobState
from contracts.monitor import ConsumerSeen, GeneratorSeen, ServiceSeen
from contracts.rollouts import batch_digest
from contracts.run_folder import STACK_FILE, RunFolder
from gateway.services import Services
from onbeat.recording.records import RecordedBatch
from tests.integration.dead_batches import bury, running
from tests.integration.test_gateway import audit_record, services, serving  # noqa: F401
from tests.page.browsing import PHONE, chromium, opened
from tests.recorded import record_of, recorded
from tests.spans import one_iteration
from tests.trajectories import played

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, expect
else:
    expect = pytest.importorskip("playwright.sync_api").expect

HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">\u202eabc\x1b[31m"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "<b>1</b>"}}\n</tool_call>'
TABS = ("lanes", "fence", "rollouts", "audit")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A running job with something in each of its tabs."""

    services: Services
    browser: Browser
    url: str
    job_id: str

    def tab(self, name: str, **options: object):
        key = self.services.settings.api_key
        return opened(self.browser, self.url, key, f"jobs/{self.job_id}/{name}", **options)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def shown(services: Services, browser: Browser) -> Iterator[Shown]:  # noqa: F811
    job = running(services.settings, name=f"a job of {HOSTILE[:40]}", recording={})
    bury(job, f"the scorer raised {HOSTILE}")
    trained = record_of(job.job_id, "3/train/1", text=HOSTILE)
    recorded(services, job.job_id, replace(trained, pieces=(HOSTILE, "46")))
    recorded(services, job.job_id, trajectory_of(job.job_id, "2/train/0"))
    folder = RunFolder(services.settings.run_root_path, job.job_id)
    for number in range(3):
        append_json_lines(folder.timeline, one_iteration(8.7 * number, number))
    with serving(services) as url:
        yield Shown(services=services, browser=browser, url=url, job_id=job.job_id)
    services.jobs.move(job.job_id, JobState.FAILED, reason="the test is over")


def trajectory_of(job_id: str, batch_id: str) -> RecordedBatch:
    """The record of a batch whose first completion asked a tool, with whose answer it began anew."""
    made = record_of(job_id, batch_id)
    asked = played([[10], [12]], [[11]], turn_rewards=[0.25, 0.5], metrics={"calls": 1.0}, anew={0})
    asked = replace(asked, reward_breakdown={"exact": 0.75})
    (group,) = made.batch.groups
    batch = replace(made.batch, groups=(replace(group, rollouts=(asked, group.rollouts[1])),))
    return replace(
        made,
        batch=batch,
        batch_digest=batch_digest(batch),
        piece_ids=pack_int32([6, 10, 11, 12]),
        pieces=("x", CALL, HOSTILE, "done"),
        advantages=(1.5, -1.5),
        trainer_logprobs=None,
    )


def assert_no_script_ran(page: Page) -> None:
    assert page.title() != "run"
    assert page.locator("main script, main img[onerror], main b").count() == 0


def test_hostile_texts_of_models_and_data_are_text_in_every_tab(shown: Shown) -> None:
    with shown.tab("rollouts?batch=3/train/1") as page:
        first = page.locator("#sample-0")
        first.get_by_text("<script>document.title='run'</script>").wait_for()
        assert "U+202E" in first.locator(".named").all_inner_texts()
        assert page.locator(".prompt").get_by_text("<img src=x onerror=alert(1)>").is_visible()
        assert_no_script_ran(page)
    with shown.tab("fence") as page:
        page.locator(".letter-reason").get_by_text("the scorer raised <script>").wait_for()
        assert page.get_by_role("heading", level=1).inner_text().startswith("a job of <script>")
        assert_no_script_ran(page)


def test_a_completion_is_read_token_by_token_with_the_keyboard(shown: Shown) -> None:
    with shown.tab("rollouts?batch=3/train/1") as page:
        strip = page.locator("#sample-0 .tokens")
        strip.focus()
        facts = page.locator("#sample-0 .token-facts")
        assert "token 1" in facts.inner_text()
        page.keyboard.press("ArrowRight")
        assert "token 2" in facts.inner_text()
        assert "generator -1 (36.8 %)" in facts.inner_text()
        assert "trainer -0.2500 (77.9 %)" in facts.inner_text()
        assert "difference 0.7500" in facts.inner_text()
        page.get_by_role("button", name="difference").click()
        assert "more-7" in (strip.locator("[data-at='1']").get_attribute("class") or "")
        assert page.locator("#sample-1 .token.unknown").count() == 1


def test_a_batchs_rewards_are_counted_and_its_completions_sorted_by_them(shown: Shown) -> None:
    with shown.tab("rollouts?batch=3/train/1") as page:
        rewards = page.get_by_label("Completions by reward")
        rewards.get_by_text("1").first.wait_for()
        assert [row.get_attribute("aria-label") for row in rewards.locator("li").all()] == [
            "reward 0: 1 completion, 1 of this group",
            "reward 1: 1 completion, 1 of this group",
        ]
        samples = page.locator(".completion")
        assert [one.get_attribute("id") for one in samples.all()] == ["sample-0", "sample-1"]
        page.get_by_label("Order of groups and completions").select_option("lowest reward first")
        page.locator(".completion").first.get_by_text("#1").wait_for()
        assert [one.get_attribute("id") for one in samples.all()] == ["sample-1", "sample-0"]
        page.get_by_text("all training batches, and evaluations, of the newest 20 iterations").wait_for()


def test_a_trajectory_shows_its_turns_its_calls_and_what_was_not_trained(shown: Shown) -> None:
    with shown.tab("rollouts?batch=2/train/0") as page:
        first = page.locator("#sample-0")
        first.get_by_text("Observation after turn 1").wait_for()
        assert first.locator(".stretch.observed .tag").inner_text() == "not trained"
        assert "begins anew" in first.locator(".stretch.observed").inner_text()
        assert first.locator(".calls").inner_text().split() == ["calls", "add", '{"a":"<b>1</b>"}']
        assert "reward 0.250" in first.get_by_label("Turn 1", exact=True).inner_text()
        assert "2 turns, done" in first.inner_text()
        assert_no_script_ran(page)


def test_a_batch_shows_the_command_that_samples_it_again_or_why_there_is_none(shown: Shown) -> None:
    run_root = shown.services.settings.run_root_path.resolve()
    (run_root / STACK_FILE).touch()  # as a running `onbeat up` has it
    with shown.tab("rollouts?batch=3/train/1") as page:
        command = f"onbeat replay {shown.job_id} --iteration 3 --batch 1 --run-dir {run_root}"
        page.get_by_role("button", name=f"copy {command}", exact=True).get_by_text(command).wait_for()
    folder = RunFolder(shown.services.settings.run_root_path, shown.job_id)
    (folder.weights_of(0) / "weights.safetensors").unlink()
    with shown.tab("rollouts?batch=3/train/1") as page:
        page.locator(".sample-again").get_by_text("version 0 is not kept").wait_for()


def test_a_text_is_found_and_leads_to_its_completion(shown: Shown) -> None:
    with shown.tab("rollouts") as page:
        page.get_by_role("searchbox").fill("onerror")
        page.keyboard.press("Enter")
        found = page.locator(".found a").filter(has_text="3/train/1, sample 0")
        found.click()
        page.locator("#sample-0:focus").wait_for()
        assert_no_script_ran(page)


def test_a_job_that_records_nothing_says_how_to_record(shown: Shown) -> None:
    other = running(shown.services.settings, recording=None)
    with opened(shown.browser, shown.url, shown.services.settings.api_key, f"jobs/{other.job_id}/rollouts") as page:
        page.get_by_text("[recording]").wait_for()
        assert (
            page.get_by_role("link", name="Submit this job again").get_attribute("href") == f"#/new?from={other.job_id}"
        )
    shown.services.jobs.move(other.job_id, JobState.FAILED, reason="the test is over")


def test_the_stack_has_redis_the_disk_and_what_lives_on_one_screen(shown: Shown) -> None:
    away = ServiceSeen(name="reward service", away_s=12.0, why=f"at x: {HOSTILE}")
    Presence(shown.services.broker).beat(GeneratorSeen(worker_id="generator-7", services=(away,)))
    with opened(shown.browser, shown.url, shown.services.settings.api_key, "stack") as page:
        page.get_by_text("No consumer is running, so no job can get a trainer.").wait_for()
        ConsumerPresence(shown.services.broker).beat(ConsumerSeen(worker_id="consumer-7", lives_s=1.0))
        idle = page.get_by_role("group", name="Consumers").get_by_role("row", name="consumer-7")
        idle.get_by_text("idle", exact=True).wait_for()
        page.get_by_role("region", name="Services").get_by_text("generator-7 misses reward service for 12 s").wait_for()
        page.get_by_role("group", name="Trainers").locator(f"a[href='#/jobs/{shown.job_id}']").wait_for()
        assert page.get_by_role("region", name="Redis").get_by_text("without a limit").is_visible()
        assert page.get_by_role("region", name="Disk of the run root").get_by_text("%").is_visible()
        page.get_by_role("group", name="Generators").get_by_text("generator-7").first.wait_for()
        assert_no_script_ran(page)


def test_lanes_are_read_by_keys_and_exported(shown: Shown, tmp_path: Path) -> None:
    with shown.tab("lanes?last=3") as page:
        lanes = page.get_by_role("application")
        lanes.focus()
        assert [text.split()[0] for text in page.locator(".lane-labels li").all_inner_texts()] == [
            "trainer",
            "g1",
            "g2",
        ]
        facts = page.locator(".span-facts")
        page.keyboard.press("c")
        page.get_by_text("on the critical path").wait_for()
        first = facts.inner_text()
        page.keyboard.press("c")
        expect(facts).not_to_have_text(first)
        page.keyboard.press("+")
        page.keyboard.press("0")
        box = lanes.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 5, box["y"] + 70)
        with page.expect_download() as download:
            page.get_by_role("button", name="Export for Perfetto").click()
        download.value.save_as(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert download.value.suggested_filename == f"{shown.job_id}.trace.json"
    assert len(trace["traceEvents"]) > 40


def test_a_generator_that_is_gone_stays_on_the_page_as_gone(shown: Shown) -> None:
    presence = Presence(shown.services.broker)
    mine = f"generator-{shown.job_id[-6:]}"
    doing = f"generating {HOSTILE}"
    presence.beat(GeneratorSeen(worker_id=mine, policy_version=7, doing=doing, tokens_per_s=1234.0))
    with shown.tab("fence") as page:
        row = page.locator("tr").filter(has_text=mine)
        row.get_by_text("generating <script>").wait_for()
        assert "1,234" in row.inner_text()
        presence.leave(mine)
        row.locator(".badge.bad").wait_for()
        assert_no_script_ran(page)


def test_a_dead_letter_is_tried_again_from_the_page(shown: Shown) -> None:
    shown.services.jobs.move(shown.job_id, JobState.FAILED, reason="batch 0/train/0 is dead")
    with shown.tab("fence") as page:
        page.locator(".letter").get_by_role("button", name="Retry").click()
        page.get_by_role("dialog").get_by_role("button", name="Retry").click()
        page.get_by_text("the job is queued, and samples it anew").wait_for()
    assert shown.services.jobs.state(shown.job_id) is JobState.QUEUED
    shown.services.jobs.move(shown.job_id, JobState.RUNNING)


def test_a_tab_that_throws_says_so_and_the_others_are_there(shown: Shown) -> None:
    with shown.tab("fence", may_log="TypeError") as page:
        page.locator(".letter-reason").wait_for()
        page.route("**/timeline?*", lambda route: route.fulfill(json={"iterations": []}))
        page.get_by_role("link", name="Lanes").click()
        alert = page.get_by_role("alert")
        alert.get_by_role("heading", name="Lanes can").wait_for()
        expect(alert).to_contain_text("The page failed at it: ")
        page.get_by_role("link", name="Fence").click()
        page.locator(".letter-reason").wait_for()
        expect(alert).to_have_count(0)
        page.unroute("**/timeline?*")
        page.get_by_role("link", name="Lanes").click()
        page.get_by_role("application").wait_for()


def test_every_tab_fits_a_phone_and_is_dark_where_the_device_is(shown: Shown) -> None:
    for tab in TABS:
        with shown.tab(tab, size=PHONE, scheme="dark") as page:
            page.locator("main section").first.wait_for()
            assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"], tab
            assert is_dark(page)


def test_the_newest_records_of_a_long_chain_stand_first_and_older_ones_come_when_asked(shown: Shown) -> None:
    made = audit_record({"0/train/0": "ab" * 32})
    for iteration in range(25):
        record = replace(
            made, iteration=iteration, policy_version=iteration, abandoned={f"{iteration}/train/1": HOSTILE}
        )
        shown.services.broker.redis.xadd(
            shown.services.broker.job_keys(shown.job_id).audit, {"record": encode(record), "digest": "cd" * 32}
        )
    with shown.tab("audit") as page:
        links = page.locator(".link strong")
        links.filter(has_text="Iteration 24").wait_for()
        assert (links.count(), links.last.inner_text()) == (20, "Iteration 5")
        page.get_by_role("button", name="5 older records").click()
        links.get_by_text("Iteration 0", exact=True).wait_for()
        links.filter(has_text="Iteration 24").click()
        page.get_by_text("24/train/1 was given up: <script>").wait_for()
        assert_no_script_ran(page)
    (newest,) = shown.services.jobs.audit(shown.job_id, last=1)
    assert newest.iteration == 24


def is_dark(page: Page) -> bool:
    """Whether the text is lighter than what it stands on."""
    return page.evaluate(
        """() => {
            const light = (color) => color.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
            const ground = getComputedStyle(document.documentElement).backgroundColor;
            return light(getComputedStyle(document.body).color) > light(ground);
        }"""
    )
