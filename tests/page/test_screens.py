"""The screens over a real gateway: jobs, the editor of a spec, curves; with hostile names and a gateway that dies."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from msgspec.structs import replace

from broker.connection.client import connect
from broker.job_store import JobStore
from contracts.encoding.json_lines import append_json_lines, read_json_lines
from contracts.encoding.wire import convert, encode_json
from contracts.events import HealthChanged, IterationCommitted, IterationMetrics, MismatchAlarm
from contracts.jobs import HealthProblem, JobState
from contracts.rewards import PluginReward, RewardSpec
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.datasets import JsonlDataset
from contracts.spec.job import JobSpec
from gateway.app import create_app
from onbeat.stack.access import page_address
from onbeat.stack.ports import free_port
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec, stub_model
from tests.contract.golden_files import iteration_metrics, trajectory_metrics
from tests.page.browsing import PHONE, chromium, opened, spec_editor, spec_text, write_spec
from tests.served import services_over, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Route, expect
else:
    expect = pytest.importorskip("playwright.sync_api").expect

HOSTILE = "<img src=x onerror=\"document.title='run'\">"
ACCEPTED = "The gateway accepts this spec."
REPOSITORY = Path(__file__).parents[2]
JSONL = JsonlDataset(train_path="rows.jsonl", evaluation_path="held-out.jsonl")
BANNER = "The gateway does not answer since"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made


class Gateway:
    """A gateway that can be ended and started again at its address."""

    def __init__(self, settings: StackSettings) -> None:
        self.settings = settings
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.jobs = JobStore(connect(settings))
        self._open = ExitStack()

    def start(self) -> None:
        services = self._open.enter_context(services_over(self.settings))
        self._open.enter_context(serving(create_app(services), self.port, grace_s=2.0))
        self._open.callback(services.closing.set)

    def stop(self) -> None:
        self._open.close()

    def trained(self, job_id: str, iterations: range, *, rise: float = 0.1, **changes: Any) -> None:
        """Writes and tells what a trainer would of these iterations."""
        folder = RunFolder(self.settings.run_root_path, job_id)
        folder.path.mkdir(exist_ok=True)
        rows = [replace(iteration_metrics(), iteration=n, reward_mean=rise * n, **changes) for n in iterations]
        append_json_lines(folder.metrics, rows)
        broker = connect(self.settings)
        broker.redis.hset(broker.job_keys(job_id).fence, "committed", iterations[-1])
        for row in rows:
            self.jobs.tell(job_id, IterationCommitted(at_s=1.0, metrics=row, weights_digest="a" * 64))

    def count(self, job_id: str, what: str, number: int) -> None:
        broker = connect(self.settings)
        broker.redis.hset(broker.job_keys(job_id).counters, what, number)

    def tokens_of(self, job_id: str) -> list[int]:
        folder = RunFolder(self.settings.run_root_path, job_id)
        return [row.num_tokens for row in read_json_lines(folder.metrics, IterationMetrics)]


@pytest.fixture(scope="module")
def gateway(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("page")
    model = folder / "models" / "qwen3"
    stub_model(model)
    settings = StackSettings(
        redis_url=redis_server.url, run_root=str(folder), api_key="test-key", model_root=str(model.parent)
    )
    made = Gateway(settings)
    made.start()
    yield made
    made.stop()


@contextmanager
def at(browser: Browser, gateway: Gateway, place: str, **options: Any) -> Iterator[Page]:
    with opened(browser, gateway.url, gateway.settings.api_key, place, **options) as page:
        yield page


def toml(*, name: str = "typed", iterations: str = "3", model: str = "qwen3") -> str:
    """A spec as a person types it, of the model that the gateway of these tests has."""
    return f"""name = {json.dumps(name)}
iterations = {iterations}

[model]
path = "{model}"

[dataset]
type = "addition"

[rollout]
sampling = {{ max_new_tokens = 6 }}

[reward]
components = [{{ type = "exact" }}]
"""


def findings(page: Page) -> Locator:
    """The list beside the editor: line, field, problem and cure of each refusal."""
    return page.locator(".findings")


def underlined(page: Page) -> Locator:
    return page.locator(".cm-lintRange-error")


def row(page: Page, name: str) -> Locator:
    return page.locator("tbody tr").filter(has=page.get_by_role("link", name=name, exact=True))


def test_the_page_asks_for_the_key_takes_it_from_the_address_and_leaves_it_out_there(
    gateway: Gateway, browser: Browser
) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="a job behind a key"))
    page = browser.new_page()
    page.goto(gateway.url)
    page.get_by_role("heading", name="This gateway asks for its key.").wait_for()
    page.get_by_label("Key of the gateway").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="The gateway refuses this key.").wait_for()
    page.get_by_label("Key of the gateway").fill(gateway.settings.api_key)
    page.keyboard.press("Enter")
    row(page, "a job behind a key").wait_for()
    page.close()
    page = browser.new_page()
    page.goto(f"{gateway.url}/#/jobs/{job_id}?key={gateway.settings.api_key}")
    page.get_by_role("heading", name="a job behind a key").wait_for()
    assert gateway.settings.api_key not in page.url
    page.reload()
    page.get_by_role("heading", name="a job behind a key").wait_for()
    page.close()
    gateway.jobs.move(job_id, JobState.CANCELLED)


def test_jobs_change_while_they_are_looked_at_and_are_filtered_by_state_and_name(
    gateway: Gateway, browser: Browser
) -> None:
    with at(browser, gateway, "jobs?name=live") as page:
        first, _ = gateway.jobs.create(job_spec(name="live one"))
        second, _ = gateway.jobs.create(job_spec(name=f"live {HOSTILE}"))
        expect(row(page, "live one")).to_contain_text("queued")
        gateway.jobs.move(first, JobState.RUNNING)
        gateway.jobs.move(first, JobState.FAILED, reason=f"the scorer raised {HOSTILE}")
        expect(row(page, "live one")).to_contain_text("failed")
        expect(row(page, "live one")).to_contain_text(HOSTILE)
        page.get_by_role("button", name=re.compile("^failed")).click()
        expect(page.locator("tbody tr")).to_have_count(1)
        page.get_by_label("Filter by name").fill("no job is called so")
        page.get_by_text("No job matches").wait_for()
        page.goto(f"{gateway.url}/#/jobs?name=onerror")
        row(page, f"live {HOSTILE}").wait_for()
        assert page.locator("main img").count() == 0
        assert page.title() == "Onbeat"
    gateway.jobs.move(second, JobState.CANCELLED)


def test_a_job_that_ended_unwell_is_no_green_one_and_says_what_to_do(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="unwell"))
    gateway.jobs.move(job_id, JobState.RUNNING)
    gateway.trained(job_id, range(3))
    problem = HealthProblem(rule="reward_collapsed", since=2, problem=f"0 after {HOSTILE}", cure="lower the rate")
    gateway.jobs.record_health(job_id, (problem,))
    gateway.jobs.tell(job_id, HealthChanged(at_s=1.0, iteration=2, problems=(problem,)))
    gateway.jobs.move(job_id, JobState.SUCCEEDED)
    with at(browser, gateway, "jobs?name=unwell") as page:
        badges = row(page, "unwell").locator(".badge")
        expect(badges).to_have_text(["succeeded", "reward collapsed"])
        expect(badges.first).to_have_class("badge warn")
        row(page, "unwell").get_by_role("link", name="unwell", exact=True).click()
        expect(page.locator(".health")).to_have_text(
            f"reward collapsed since iteration 2: 0 after {HOSTILE} — lower the rate"
        )
        expect(page.locator(".events li").filter(has_text="health changed")).to_contain_text(f"0 after {HOSTILE}")
        expect(page.locator(".of-events")).to_contain_text("Alarms only (1)")


def test_a_job_that_ended_well_says_what_was_wrong_for_a_time(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="well in the end"))
    gateway.jobs.move(job_id, JobState.RUNNING)
    gateway.trained(job_id, range(3))
    past = HealthProblem(
        rule="mismatch_unusual", since=0, until=2, problem=f"K3 of {HOSTILE}", cure="compare the folders"
    )
    gateway.jobs.record_health(job_id, (), (past,))
    gateway.jobs.move(job_id, JobState.SUCCEEDED)
    with at(browser, gateway, f"jobs/{job_id}") as page:
        expect(page.locator(".health")).to_have_text(
            f"mismatch unusual from iteration 0 until 2: K3 of {HOSTILE} — compare the folders"
        )
        expect(page.locator(".health")).not_to_have_class(re.compile("warn"))


def test_a_job_that_ended_before_its_first_iteration_is_said_to_have_none(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="none"))
    with at(browser, gateway, f"jobs/{job_id}") as page:
        expect(page.get_by_text("No iteration is committed yet")).to_be_visible()
        gateway.jobs.move(job_id, JobState.RUNNING)
        gateway.jobs.fail(job_id, "no such model")
        expect(page.get_by_text("No iteration was committed")).to_be_visible()
        expect(page.get_by_role("heading", name="No iteration", exact=True)).to_be_visible()
        for tab, said in (("audit", "No iteration was"), ("lanes", "No iteration was"), ("rollouts", "Nothing was")):
            page.goto(f"{gateway.url}/#/jobs/{job_id}/{tab}")
            expect(page.get_by_text(said)).to_be_visible()


def test_a_job_is_cancelled_resumed_and_deleted_after_a_question_that_names_it(
    gateway: Gateway, browser: Browser
) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="asked about", iterations=10))
    with at(browser, gateway, f"jobs/{job_id}") as page:
        dialog = page.get_by_role("dialog")
        page.get_by_role("button", name="Cancel asked about").click()
        expect(dialog).to_contain_text("Cancel “asked about”?")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        assert gateway.jobs.state(job_id) is JobState.QUEUED
        page.get_by_role("button", name="Cancel asked about").click()
        dialog.get_by_role("button", name="Cancel the job").click()
        expect(page.locator(".job-head .badge")).to_have_text("cancelled")
        page.get_by_role("button", name="Resume asked about").click()
        dialog.get_by_label("Iterations in all").fill("none")
        expect(dialog.get_by_role("button", name="Resume the job")).to_be_disabled()
        dialog.get_by_label("Iterations in all").fill("25")
        page.keyboard.press("Enter")
        expect(page.locator(".job-head .badge")).to_have_text("queued")
        expect(page.locator(".job-facts")).to_contain_text("of 25")
        gateway.jobs.move(job_id, JobState.CANCELLED)
        page.get_by_role("button", name="Delete asked about").click()
        dialog.get_by_role("button", name="Delete for ever").click()
        page.wait_for_url("**/#/jobs")
        assert job_id not in gateway.jobs.job_ids()


def test_a_refused_question_says_why_and_stays(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="busy"))
    with at(browser, gateway, f"jobs/{job_id}") as page:
        page.get_by_role("button", name="Cancel busy").click()
        gateway.jobs.move(job_id, JobState.RUNNING)
        gateway.jobs.move(job_id, JobState.SUCCEEDED)
        page.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
        expect(page.get_by_role("alert")).to_contain_text("a succeeded job cannot be cancelled")


def test_a_refused_field_is_underlined_with_its_cure_and_the_spec_is_submitted_once_it_is_fixed(
    gateway: Gateway, browser: Browser
) -> None:
    with at(browser, gateway, "new") as page:
        submit = page.get_by_role("button", name="Submit job")
        write_spec(page, toml(model="nowhere"))
        expect(underlined(page)).to_have_text('path = "nowhere"')
        expect(findings(page)).to_contain_text("line 5: model.path")
        expect(findings(page)).to_contain_text("name a Hugging Face causal LM folder")
        # The folder could have come since the check: a submission is refused by the gateway, and leads to the field.
        submit.click()
        expect(page.get_by_role("alert")).to_contain_text("name a Hugging Face causal LM folder")
        expect(spec_editor(page)).to_be_focused()
        write_spec(page, toml(iterations="-1"))
        expect(underlined(page)).to_have_text("iterations = -1")
        expect(findings(page)).to_contain_text("line 2: iterations")
        findings(page).get_by_role("button").click()
        expect(spec_editor(page)).to_be_focused()
        page.keyboard.press("End")
        page.keyboard.press("Backspace")
        page.keyboard.press("Backspace")
        page.keyboard.type("12")
        expect(page.get_by_text(ACCEPTED)).to_be_visible()
        expect(underlined(page)).to_have_count(0)
        write_spec(page, toml(name=HOSTILE, iterations="12"))
        expect(page.get_by_text(ACCEPTED)).to_be_visible()
        submit.click()
        page.wait_for_url("**/#/jobs/job-*")
        job_id = page.url.rpartition("/")[2]
        assert gateway.jobs.spec(job_id).name == HOSTILE
        assert gateway.jobs.spec(job_id).iterations == 12
        expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
        assert page.title() == "Onbeat"
    gateway.jobs.move(job_id, JobState.CANCELLED)


def test_all_refusals_of_an_answer_are_listed_and_underlined_in_order(gateway: Gateway, browser: Browser) -> None:
    refusals = [
        {"field": "model.path", "problem": f"no such folder {HOSTILE}", "cure": "put the model there"},
        {"field": "rollout.sampling.top_k", "problem": "must be above 1", "cure": ""},
        {"field": "", "problem": "the spec asks for too much", "cure": "ask for less"},
    ]
    problem = {"type": "about:blank", "title": "Unprocessable", "status": 422, "detail": "no such folder", "cure": None}
    body = json.dumps(problem | {"field": "model.path", "refusals": refusals})
    with at(browser, gateway, "new") as page:
        page.route(
            "**/v1/jobs/check",
            lambda route: route.fulfill(status=422, content_type="application/problem+json", body=body),
        )
        write_spec(page, toml())
        expect(findings(page).get_by_role("button")).to_have_text(
            ["line 5: model.path", "line 11: rollout.sampling.top_k", "line 1"]
        )
        expect(findings(page)).to_contain_text(HOSTILE)
        expect(findings(page).locator(".cure")).to_have_text(["put the model there", "ask for less"])
        # A refusal of the whole spec stands at the first line, a key that the text leaves out at the table around it.
        expect(underlined(page)).to_have_text(['name = "typed"', 'path = "qwen3"', "sampling = { max_new_tokens = 6 }"])
        assert page.locator("aside img").count() == 0
        assert page.title() == "Onbeat"


def test_a_text_that_is_neither_toml_nor_json_yet_is_said_so_and_survives_a_reload(
    gateway: Gateway, browser: Browser
) -> None:
    with at(browser, gateway, "new") as page:
        write_spec(page, '{"iterations": ')
        expect(findings(page)).to_contain_text("The text is not JSON yet")
        expect(page.get_by_role("button", name="Submit job")).to_be_disabled()
        page.reload()
        expect(spec_editor(page)).to_have_text('{"iterations": ')
        write_spec(page, 'name = "unfinished')
        expect(findings(page)).to_contain_text("The text is not TOML yet")


def test_toml_and_json_are_the_same_spec_both_ways(gateway: Gateway, browser: Browser) -> None:
    with at(browser, gateway, "new") as page:
        write_spec(page, toml(name="in two languages"))
        spec = tomllib.loads(toml(name="in two languages"))
        page.get_by_role("button", name="JSON").click()
        expect(spec_editor(page)).to_contain_text('"name": "in two languages"')
        assert json.loads(spec_text(page)) == spec
        page.get_by_role("button", name="TOML").click()
        expect(spec_editor(page)).to_contain_text('name = "in two languages"')
        assert tomllib.loads(spec_text(page)) == spec


def test_keys_are_offered_at_the_cursor_with_what_they_mean(gateway: Gateway, browser: Browser) -> None:
    with at(browser, gateway, "new") as page:
        with page.expect_response("**/openapi.json"):
            write_spec(page, toml())
        page.keyboard.press("Control+End")
        page.keyboard.type("\n[algorithm]\nkl_coeff")
        option = page.get_by_role("option", name=re.compile("^kl_coefficient"))
        expect(option).to_have_attribute("aria-selected", "true")
        expect(page.locator(".cm-completionInfo")).not_to_be_empty()
        option.click()
        page.keyboard.type(" = 0.5")
        expect(page.get_by_text(ACCEPTED)).to_be_visible()
        assert tomllib.loads(spec_text(page))["algorithm"] == {"kl_coefficient": 0.5}


def test_a_template_takes_the_place_of_the_text_and_the_text_comes_back(gateway: Gateway, browser: Browser) -> None:
    with at(browser, gateway, "new") as page:
        expect(spec_editor(page)).to_contain_text('name = "two-digit addition"')
        write_spec(page, toml(name="typed before"))
        page.get_by_label("Begin from a template").select_option("dapo")
        expect(spec_editor(page)).not_to_contain_text("typed before")
        assert spec_text(page) == (REPOSITORY / "configs" / "dapo.toml").read_text()
        page.get_by_role("button", name="Bring back the earlier text").click()
        expect(spec_editor(page)).to_contain_text("typed before")
        assert spec_text(page) == toml(name="typed before")


def test_a_clone_has_what_was_set_and_what_was_typed_before_comes_back(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="the original", seed=41))
    with at(browser, gateway, "new") as page:
        write_spec(page, toml(name="typed before"))
        page.goto(f"{gateway.url}/#/new?from={job_id}")
        expect(spec_editor(page)).to_contain_text('name = "the original"')
        assert convert(tomllib.loads(spec_text(page)), JobSpec) == gateway.jobs.spec(job_id)
        assert "deterministic" not in spec_text(page)
        page.get_by_role("button", name="Bring back the earlier text").click()
        expect(spec_editor(page)).to_contain_text('name = "typed before"')
        page.reload()
        expect(spec_editor(page)).to_contain_text('name = "typed before"')
    gateway.jobs.move(job_id, JobState.CANCELLED)


def test_a_clone_of_a_job_with_files_and_a_plug_in_is_submitted_as_it_is(gateway: Gateway, browser: Browser) -> None:
    """The first job's spec has the digests of its files. A clone keeps them, so it means the same files."""
    folder = Path(gateway.settings.model_root)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "reference": "2"}\n' * 8)
    (folder / "held-out.jsonl").write_text('{"prompt": "2+2=", "reference": "4"}\n' * 8)
    (folder / "score.py").write_text("def brief(completion: str) -> float:\n    return 1.0 / (1 + len(completion))\n")
    of_file = PluginReward(entry_point="brief", file="score.py")
    of_package = PluginReward(entry_point="polite", package="manners 1.0")
    reward = RewardSpec(components=(of_file, of_package))
    spec = job_spec(name="with files", dataset=JSONL, reward=reward)
    first = httpx.post(
        f"{gateway.url}/v1/jobs",
        content=encode_json(spec),
        headers={"Authorization": f"Bearer {gateway.settings.api_key}", "Content-Type": "application/json"},
        timeout=60.0,
    )
    assert first.status_code == 201, first.text
    first_id = first.json()["job_id"]
    with at(browser, gateway, f"jobs/{first_id}") as page:
        page.get_by_role("link", name="Clone with files").click()
        expect(page.get_by_text(ACCEPTED)).to_be_visible()
        page.get_by_role("button", name="Submit job").click()
        page.wait_for_url(re.compile(f"/#/jobs/job-(?!{first_id[4:]})"))
        second_id = page.url.rpartition("/")[2]
    clone = gateway.jobs.spec(second_id)
    assert clone == gateway.jobs.spec(first_id)
    assert isinstance(clone.reward.components[0], PluginReward)
    assert "def brief" in clone.reward.components[0].source
    assert set(clone.file_digests) >= {"rows.jsonl", "held-out.jsonl"}
    for job_id in (first_id, second_id):
        gateway.jobs.move(job_id, JobState.CANCELLED)


def test_another_text_cant_be_submitted_while_the_clone_that_was_asked_for_is_on_its_way(
    gateway: Gateway, browser: Browser
) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="slow to read"))
    held: list[Route] = []
    with at(browser, gateway, f"jobs/{job_id}") as page:
        page.route("**/spec?defaults=false", lambda route: held.append(route))
        page.get_by_role("link", name="Clone slow to read").click()
        expect(page.get_by_text(f"Reading the spec of {job_id}")).to_be_visible()
        submit = page.get_by_role("button", name="Submit job")
        expect(submit).to_be_disabled()
        for route in held:
            route.continue_()
        expect(submit).to_be_enabled()
        expect(page.get_by_text(f"Cloned from {job_id}")).to_be_visible()
    gateway.jobs.move(job_id, JobState.CANCELLED)


def test_a_gateway_that_dies_and_comes_back_costs_nothing_that_was_seen_or_typed(
    gateway: Gateway, browser: Browser
) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="outlives its gateway"))
    with at(browser, gateway, "jobs?name=outlives") as page:
        row(page, "outlives its gateway").wait_for()
        gateway.stop()
        page.get_by_text(BANNER).wait_for()
        expect(row(page, "outlives its gateway")).to_contain_text("queued")
        gateway.jobs.move(job_id, JobState.CANCELLED)
        gateway.start()
        expect(row(page, "outlives its gateway")).to_contain_text("cancelled")
        expect(page.get_by_text(BANNER)).to_have_count(0)
        page.goto(f"{gateway.url}/#/new")
        expect(spec_editor(page)).to_be_visible()
        gateway.stop()
        write_spec(page, toml(name="typed while it was away"))
        page.get_by_role("button", name="Submit job").click()
        page.get_by_role("alert").get_by_text("the gateway does not answer").wait_for()
        page.get_by_text("Not checked: the gateway does not answer").wait_for()
        gateway.start()
        expect(page.get_by_text(ACCEPTED)).to_be_visible()
        page.reload()
        expect(spec_editor(page)).to_contain_text("typed while it was away")
        page.get_by_role("button", name="Submit job").click()
        page.wait_for_url("**/#/jobs/job-*")
        made = page.url.rpartition("/")[2]
    assert gateway.jobs.spec(made).name == "typed while it was away"
    gateway.jobs.move(made, JobState.CANCELLED)


def test_a_tab_that_is_not_looked_at_asks_nothing_and_catches_up_when_it_is(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="out of sight"))
    asked: list[str] = []
    with at(browser, gateway, f"jobs/{job_id}") as page:
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_role("heading", name="out of sight").wait_for()
        look(page, hidden=True)
        page.wait_for_timeout(1500)  # what was under way is over
        asked.clear()
        gateway.jobs.move(job_id, JobState.CANCELLED)
        page.wait_for_timeout(2500)  # more than two of its looks
        assert asked == []
        look(page, hidden=False)
        expect(page.locator(".job-head .badge")).to_have_text("cancelled")
        expect(page.get_by_text(BANNER)).to_have_count(0)


def test_seven_windows_show_a_running_job_and_the_last_one_cancels_it(gateway: Gateway, browser: Browser) -> None:
    """A browser has six connections to a host for all its windows: none may be held while one only looks."""
    job_id, _ = gateway.jobs.create(job_spec(name="in seven windows"))
    gateway.jobs.move(job_id, JobState.RUNNING)
    gateway.trained(job_id, range(3))
    with at(browser, gateway, f"jobs/{job_id}") as first:
        windows = [first, *(first.context.new_page() for _ in range(6))]
        for window in windows[1:]:
            window.goto(page_address(gateway.url, gateway.settings.api_key, job_id=job_id))
        for window in windows:
            expect(window.get_by_role("slider", name=re.compile("^Reward.* at 2$"))).to_be_visible()
        gateway.trained(job_id, range(3, 5))
        for window in windows:
            expect(window.get_by_role("slider", name=re.compile("^Reward.* at 4$"))).to_be_visible()
        last = windows[-1]
        last.get_by_role("button", name="Cancel in seven windows").click()
        last.get_by_role("button", name="Cancel the job").click()
        for window in windows:
            expect(window.locator(".job-head .badge")).to_have_text("cancelling")
            expect(window.get_by_text("Waiting for")).to_have_count(0)
    assert gateway.jobs.state(job_id) is JobState.CANCELLING
    gateway.jobs.move(job_id, JobState.CANCELLED)


def test_an_answer_that_is_late_is_waited_for_in_words(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="late"))
    with at(browser, gateway, f"jobs/{job_id}") as page:
        page.get_by_role("heading", name="late").wait_for()
        held: list[Route] = []
        answers_late = True
        page.route("**/v1/**", lambda route: held.append(route) if answers_late else route.continue_())
        page.get_by_role("button", name="Cancel late").click()
        page.get_by_role("button", name="Cancel the job").click()
        expect(page.get_by_role("dialog").get_by_text("Waiting for the gateway…")).to_be_visible()
        page.get_by_text("Waiting for an answer of the gateway since").wait_for()
        answers_late = False
        for route in held:
            route.continue_()
        expect(page.locator(".job-head .badge")).to_have_text("cancelled")
        expect(page.get_by_text("Waiting for")).to_have_count(0)
    assert gateway.jobs.state(job_id) is JobState.CANCELLED


def look(page: Page, *, hidden: bool) -> None:
    page.evaluate(
        "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )


def test_the_curves_grow_while_a_job_trains_and_another_lies_over_them(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="this one"))
    other, _ = gateway.jobs.create(job_spec(name="the other one"))
    gateway.jobs.move(job_id, JobState.RUNNING)
    gateway.trained(job_id, range(3), loss_metrics={"kl_to_teacher": 0.5})
    gateway.trained(other, range(5), rise=0.05)
    with at(browser, gateway, f"jobs/{job_id}") as page:
        # A number of this kind of job comes first among those that were not chosen.
        expect(page.locator(".charts h2").nth(1)).to_have_text(re.compile("teacher", re.IGNORECASE))
        reward = page.get_by_role("slider", name=re.compile("^Reward"))
        expect(reward).to_have_attribute("aria-label", "Reward. Reward: 0 at 0, 0.200 at 2")
        gateway.trained(job_id, range(3, 5))
        expect(reward).to_have_attribute("aria-label", "Reward. Reward: 0 at 0, 0.400 at 4")
        alarm = MismatchAlarm(
            at_s=9.0, iteration=4, mismatch_k3=0.5, mismatch_max=1.5, effective_sample_share=0.5, threshold=0.1
        )
        gateway.jobs.tell(job_id, alarm)
        expect(page.locator(".events")).to_contain_text("iteration 4: K3 0.500 is above 0.100", ignore_case=True)
        page.get_by_label("Compare with another job").select_option(value=other)
        expect(reward).to_have_attribute(
            "aria-label", "Reward. this one: 0 at 0, 0.400 at 4; the other one: 0 at 0, 0.200 at 4"
        )
        page.get_by_label("Smoothed").fill("0.9")
        expect(reward).not_to_have_attribute("aria-label", re.compile("0.400 at 4"))
        page.get_by_label("Add a curve").select_option("loss")
        page.get_by_role("slider", name=re.compile("^loss", re.IGNORECASE)).wait_for()
        box = reward.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        readout = page.get_by_label("Numbers of one iteration")
        expect(readout).to_contain_text("under the cursor")
        expect(readout.get_by_role("heading")).to_have_text("Iteration 2")
        expect(readout.locator("tr").filter(has_text="reward mean")).to_contain_text("0.200")
        expect(readout.locator("tr").filter(has_text="reward mean")).to_contain_text("0.100")
    gateway.jobs.move(job_id, JobState.FAILED, reason="the test is over")
    gateway.jobs.move(other, JobState.CANCELLED)


def test_a_job_of_many_turns_shows_its_turns_and_calls_first(gateway: Gateway, browser: Browser) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="an agent"))
    gateway.trained(job_id, range(3), trajectories=trajectory_metrics())
    with at(browser, gateway, f"jobs/{job_id}") as page:
        heads = page.locator(".charts h2")
        expect(heads.nth(3)).to_be_visible()
        assert {"Turns mean", "Done share", "Environment: calls"} <= set(heads.all_inner_texts()[:5])
    gateway.jobs.move(job_id, JobState.CANCELLED)


def test_a_curve_is_walked_by_keys_and_tells_the_numbers_that_the_mouse_would(
    gateway: Gateway, browser: Browser
) -> None:
    job_id, _ = gateway.jobs.create(job_spec(name="read by keys"))
    gateway.jobs.move(job_id, JobState.RUNNING)
    gateway.trained(job_id, range(30), rise=0.01)
    with at(browser, gateway, f"jobs/{job_id}") as page:
        reward = page.get_by_role("slider", name=re.compile("^Reward"))
        readout = page.get_by_label("Numbers of one iteration")
        expect(reward).to_have_attribute("aria-valuetext", "iteration 29; Reward: 0.290")
        reward.focus()
        for key, stands_at in (("ArrowLeft", 28), ("PageDown", 18), ("Home", 0), ("ArrowRight", 1), ("PageUp", 11)):
            page.keyboard.press(key)
            expect(reward).to_have_attribute("aria-valuenow", str(stands_at))
            expect(readout.get_by_role("heading")).to_have_text(f"Iteration {stands_at}")
        expect(reward).to_have_attribute("aria-valuetext", "iteration 11; Reward: 0.110")
        expect(readout).to_contain_text("under the cursor")
        gateway.trained(job_id, range(30, 40), rise=0.01)
        expect(reward).to_have_attribute("aria-valuemax", "39")
        expect(readout.get_by_role("heading")).to_have_text("Iteration 11")
        page.keyboard.press("Escape")
        expect(readout).to_contain_text("the newest")
        expect(reward).to_have_attribute("aria-valuenow", "39")
    gateway.jobs.move(job_id, JobState.FAILED, reason="the test is over")


def test_a_job_is_submitted_with_the_keyboard_alone(gateway: Gateway, browser: Browser) -> None:
    with at(browser, gateway, "jobs?name=by-keyboard") as page:
        page.get_by_role("link", name="New job").first.focus()
        page.keyboard.press("Enter")
        expect(spec_editor(page)).to_be_visible()
        tab_until(page, "document.activeElement.shadowRoot !== null")
        page.keyboard.press("Control+a")
        page.keyboard.insert_text(toml(name="by-keyboard"))
        expect(page.get_by_text(ACCEPTED)).to_be_visible()
        # Tab leaves the editor, too.
        tab_until(page, "document.activeElement.textContent === 'Submit job'")
        page.keyboard.press("Enter")
        page.wait_for_url("**/#/jobs/job-*")
        job_id = page.url.rpartition("/")[2]
    assert gateway.jobs.spec(job_id).name == "by-keyboard"
    gateway.jobs.move(job_id, JobState.CANCELLED)


def tab_until(page: Page, condition: str) -> None:
    """Presses Tab until the element with the focus is the one that is meant, as a person would."""
    for _ in range(60):
        if page.evaluate(condition):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"Tab never leads to {condition}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_screen_is_wider_than_a_phone(scheme: str, gateway: Gateway, browser: Browser) -> None:
    name = "a" * 90 + scheme
    job_id, _ = gateway.jobs.create(job_spec(name=name))
    gateway.trained(job_id, range(3))
    with at(browser, gateway, "jobs?name=aaa", size=PHONE, scheme=scheme) as page:
        row(page, name).wait_for()
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert ground == ("rgb(18, 19, 22)" if scheme == "dark" else "rgb(250, 250, 248)")
        for place, landmark in ((None, "main"), (f"jobs/{job_id}", ".charts"), ("new", ".editor")):
            if place:
                page.goto(f"{gateway.url}/#/{place}")
            else:
                assert heads_seen(page) == ["Iterations", "Held-out", "Weights", "Disk", "Created"]
            page.locator(landmark).wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], place
    gateway.jobs.move(job_id, JobState.CANCELLED)


def heads_seen(page: Page) -> list[str]:
    """What stands over the cells of the first job, each of which lies within the screen."""
    return page.evaluate(
        """() => [...document.querySelectorAll("tbody tr:first-child td")]
            .filter((cell) => cell.getBoundingClientRect().right <= innerWidth && cell.offsetHeight > 0)
            .map((cell) => getComputedStyle(cell, "::before").content.replaceAll('"', ""))
            .filter((head) => head !== "none")"""
    )
