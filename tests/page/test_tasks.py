"""Tasks on the page: a job is verified and exported by a worker, and the Stack screen has queues, tasks and the clock.

A worker is played by its transitions in Redis, so that each moment of a task is looked at as long as a test likes.
"""

from __future__ import annotations

import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from broker.connection.client import connect
from broker.presence import TaskPresence
from broker.task_store import Attempt, TaskStore
from broker.trainer_side import TrainerSide
from contracts.answers import AuditVerdict
from contracts.jobs import JobState
from contracts.monitor import TaskWorkerSeen
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import ClockEntry, ExportedFiles, TaskArguments, TaskProgress, TaskResult
from onbeat.loop.chain import rewind_record
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec
from tests.integration.test_gateway import manifest
from tests.page.browsing import PHONE
from tests.page.test_screens import HOSTILE, Gateway, at, browser, gateway  # noqa: F401
from tests.until import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, expect
else:
    expect = pytest.importorskip("playwright.sync_api").expect

exports = pytest.importorskip("onbeat.tasks.exports", reason="the extra that offers tasks is not there")
DIGEST = "ab" * 32
MIB = 2**20
FILES = {"config.json": b"{}" + b" " * (MIB - 2), "model.safetensors": bytes(range(256)) * (4 * MIB // 256)}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """Its own: the Stack screen shows the tasks of a whole server."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


class PlayedWorker:
    """A worker of tasks whose every step is a test's."""

    def __init__(self, settings: StackSettings) -> None:
        broker = connect(settings)
        self.store = TaskStore(broker)
        self.presence = TaskPresence(broker)
        self.worker_id = f"tasks-{uuid4().hex[:8]}"
        self.running: tuple[str, ...] = ()
        self._leaving = threading.Event()
        self._beating = threading.Thread(target=self._beat)

    def live(self) -> None:
        """Says that it lives from now on."""
        self._beating.start()

    def _beat(self) -> None:
        while not self._leaving.is_set():
            queues = ("check", "clock", "files")
            seen = TaskWorkerSeen(worker_id=self.worker_id, host="node-3", queues=queues, running=self.running)
            self.presence.beat(seen)
            self._leaving.wait(1.0)

    def leave(self) -> None:
        """Leaves, and no task waits any more."""
        self._leaving.set()
        if self._beating.is_alive():
            self._beating.join()
        self.presence.leave(self.worker_id)
        for task in self.store.open():
            if task.state is TaskState.QUEUED:
                self.store.cancel(task.task_id, by="the test")

    def begin(self, kind: TaskKind, job_id: str) -> Attempt:
        """Begins the task of this kind that waits for the job, once a page has asked for it."""
        until(lambda: self._waiting(kind, job_id), f"a task {kind.value} of {job_id}")
        (task_id,) = self._waiting(kind, job_id)
        attempt = self.store.begin(task_id, worker=self.worker_id)
        assert attempt is not None
        return attempt

    def _waiting(self, kind: TaskKind, job_id: str) -> list[str]:
        queued = [task for task in self.store.open() if task.state is TaskState.QUEUED]
        return [task.task_id for task in queued if task.kind is kind and task.arguments.job_id == job_id]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A job with an audit record, and with iterations for the page to show."""

    gateway: Gateway
    browser: Browser
    worker: PlayedWorker
    job_id: str

    def at(self, place: str, **options: Any) -> AbstractContextManager[Page]:
        return at(self.browser, self.gateway, place, **options)


@pytest.fixture
def shown(gateway: Gateway, browser: Browser) -> Iterator[Shown]:  # noqa: F811
    job_id, _ = gateway.jobs.create(job_spec(name="checked"))
    gateway.jobs.move(job_id, JobState.RUNNING)
    trainer = TrainerSide(connect(gateway.settings), job_id, owner="t", lease_s=600.0)
    epoch = trainer.acquire()
    trainer.publish_weights(manifest(0), oldest_kept=0)
    trainer.rewind(rewind_record("", manifest(0), trainer_epoch=epoch))
    gateway.trained(job_id, range(2))
    worker = PlayedWorker(gateway.settings)
    yield Shown(gateway=gateway, browser=browser, worker=worker, job_id=job_id)
    worker.leave()
    gateway.jobs.move(job_id, JobState.FAILED, reason="the test is over")


def verdict(job_id: str, *gaps: str) -> TaskResult:
    numbers = dict.fromkeys(("records", "iterations", "batches_trained", "batches_evaluated", "rewinds"), 3)
    checked = AuditVerdict(job_id=job_id, verified=not gaps, digests_recomputed=2, gaps=gaps, **numbers)
    return TaskResult(verdict=checked)


def exported(until_s: float) -> TaskResult:
    made = ExportedFiles(
        policy_version=2,
        weights_digest=DIGEST,
        files_digest=DIGEST,
        source="a",
        files={name: len(content) for name, content in FILES.items()},
        num_bytes=5 * MIB,
        until_s=until_s,
        host="node-3",
    )
    return TaskResult(exported=made)


def unpacked(tar: Path) -> dict[str, bytes]:
    """The files of a tar, by their names without folders."""
    with tarfile.open(tar) as archive:
        files = [(Path(member.name).name, archive.extractfile(member)) for member in archive if member.isfile()]
        return {name: file.read() for name, file in files if file is not None}


def test_a_check_is_a_task_whose_progress_and_verdict_are_seen_also_after_a_reload(shown: Shown) -> None:
    shown.worker.live()
    with shown.at(f"jobs/{shown.job_id}/audit") as page:
        check = page.get_by_role("region", name="Does it hold?")
        check.get_by_role("button", name="Verify").click()
        expect(check.get_by_role("button", name="Verifying…")).to_be_disabled()
        expect(check).to_contain_text("has waited for a worker for")
        attempt = shown.worker.begin(TaskKind.VERIFY, shown.job_id)
        progress = TaskProgress(files_done=3, files_total=12, bytes_done=MIB, bytes_total=4 * MIB)
        shown.worker.store.renew(attempt, progress)
        bar = check.get_by_role("progressbar", name="Progress of: Verify a job")
        expect(bar).to_have_attribute("aria-valuenow", "25")
        expect(check).to_contain_text("3 of 12 files, 1.0 MB of 4.0 MB")
        expect(check).to_contain_text("asked for by the operator")
        page.reload()
        expect(bar).to_have_attribute("aria-valuenow", "25")
        shown.worker.store.end(attempt, TaskState.DONE, progress=progress, result=verdict(shown.job_id))
        expect(check.get_by_role("status")).to_contain_text("Verified. 3 records of 3 iterations")
        expect(check.get_by_role("status")).to_contain_text("2 versions hashed again")
        expect(bar).to_have_count(0)
        check.get_by_role("button", name="Verify").click()
        attempt = shown.worker.begin(TaskKind.VERIFY, shown.job_id)
        shown.worker.store.end(attempt, TaskState.DONE, result=verdict(shown.job_id, f"iteration 1: {HOSTILE}"))
        expect(check.get_by_role("status")).to_contain_text("It does not hold: 1 gap.")
        expect(check.get_by_role("status")).to_contain_text(f"iteration 1: {HOSTILE}")
        assert page.title() == "Onbeat"


def test_without_a_worker_a_task_says_what_it_waits_for_and_can_be_cancelled(shown: Shown) -> None:
    with shown.at(f"jobs/{shown.job_id}/audit") as page:
        check = page.get_by_role("region", name="Does it hold?")
        check.get_by_role("button", name="Verify").click()
        expect(check).to_contain_text("waits for a worker of the queue check, but none is running")
        check.get_by_role("button", name="Cancel: Verify a job").click()
        expect(page.get_by_role("dialog")).to_contain_text("It has not begun, and won\u2019t.")
        page.get_by_role("button", name="Keep as it is").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        check.get_by_role("button", name="Cancel: Verify a job").click()
        page.get_by_role("button", name="Cancel the task").click()
        expect(check.get_by_role("status").first).to_contain_text("It was cancelled")
        expect(check.get_by_role("button", name="Verify", exact=True)).to_be_enabled()
        assert shown.worker.store.newest(1)[0].state is TaskState.CANCELLED
        page.get_by_role("link", name="Overview").click()
        told = page.locator(".events li").filter(has_text="task changed")
        expect(told.filter(has_text="verify asked for by the operator")).to_have_count(1)
        expect(told.filter(has_text="verify cancelled: cancelled by the operator")).to_have_count(1)


def test_a_refusal_and_a_failure_say_why(shown: Shown) -> None:
    shown.worker.live()
    empty, _ = shown.gateway.jobs.create(job_spec(name="nothing committed"))
    with shown.at(f"jobs/{empty}/audit") as page:
        page.get_by_role("button", name="Verify").click()
        expect(page.get_by_role("alert")).to_contain_text("nothing was committed yet, so there is nothing to verify")
        expect(page.get_by_role("button", name="Verify")).to_be_enabled()
    with shown.at(f"jobs/{shown.job_id}/audit") as page:
        page.get_by_role("button", name="Verify").click()
        attempt = shown.worker.begin(TaskKind.VERIFY, shown.job_id)
        shown.worker.store.end(attempt, TaskState.FAILED, reason=f"the folder is gone {HOSTILE}")
        check = page.get_by_role("region", name="Does it hold?")
        expect(check.get_by_role("status").first).to_contain_text("It failed")
        expect(check.get_by_role("status").first).to_contain_text(f"the folder is gone {HOSTILE}")
        page.get_by_role("link", name="Overview").click()
        failed = page.locator(".events li").filter(has_text="verify failed: the folder is gone")
        expect(failed.locator(".badge")).to_have_class("badge bad")
    shown.gateway.jobs.move(empty, JobState.CANCELLED)


def test_a_model_is_exported_and_comes_through_the_browser_with_the_key(shown: Shown) -> None:
    shown.worker.live()
    with shown.at(f"jobs/{shown.job_id}") as page:
        # A dialog of the system, which no test can press: where it is missing the browser keeps the file by itself.
        page.evaluate("delete window.showSaveFilePicker")
        model = page.get_by_role("region", name="The trained model")
        model.get_by_label("Version to export").select_option("number")
        model.get_by_label("Number of the version").fill("two")
        expect(model.get_by_role("button", name="Export", exact=True)).to_be_disabled()
        model.get_by_label("Number of the version").fill("2")
        model.get_by_role("button", name="Export", exact=True).click()
        attempt = shown.worker.begin(TaskKind.EXPORT, shown.job_id)
        assert attempt.arguments == TaskArguments(job_id=shown.job_id, version=2)
        expect(model.get_by_role("progressbar")).to_have_attribute("aria-valuetext", "at work")
        shown.worker.store.renew(attempt, TaskProgress(files_done=1, files_total=2))
        expect(model.get_by_role("progressbar")).to_have_attribute("aria-valuetext", "1 of 2 files")
        written = exported(time.time() + 3600)
        folder = exports.folder_of(shown.gateway.settings, attempt.task_id, written.exported)
        folder.mkdir(parents=True)
        for name, content in FILES.items():
            (folder / name).write_bytes(content)
        shown.worker.store.end(attempt, TaskState.DONE, result=written)
        expect(model).to_contain_text("Exported. Version 2, 2 files of 5.0 MB, digest abababababab")
        with page.expect_download() as download:
            model.get_by_role("button", name="Download 5.0 MB").click()
        assert download.value.suggested_filename == f"{shown.job_id}-v2.tar"
        assert unpacked(Path(download.value.path())) == FILES
        expect(model).to_contain_text(f"tar -xf {shown.job_id}-v2.tar")
        page.route("**/v1/tasks/*/files", lambda route: route.abort())
        model.get_by_role("button", name="Download 5.0 MB").click()
        expect(model.get_by_role("alert")).to_contain_text("the gateway does not answer")


def test_an_export_that_is_over_is_not_offered_and_the_best_one_is_asked_for(shown: Shown) -> None:
    shown.worker.live()
    with shown.at(f"jobs/{shown.job_id}") as page:
        model = page.get_by_role("region", name="The trained model")
        model.get_by_label("Version to export").select_option("best")
        model.get_by_role("button", name="Export", exact=True).click()
        attempt = shown.worker.begin(TaskKind.EXPORT, shown.job_id)
        assert attempt.arguments == TaskArguments(job_id=shown.job_id, best=True)
        shown.worker.store.end(attempt, TaskState.DONE, result=exported(time.time() - 1))
        expect(model).to_contain_text("Exported. Version 2 (best held-out score)")
        expect(model).to_contain_text("export it again to download it")
        expect(model.get_by_role("button", name="Download")).to_have_count(0)


def test_the_stack_screen_has_queues_workers_the_newest_tasks_and_the_clock(shown: Shown) -> None:
    with shown.at("stack") as page:
        tasks = page.get_by_role("region", name="Tasks")
        expect(tasks).to_contain_text("Exports and checks wait until one starts")
        expect(tasks).to_contain_text("No process keeps the clock now: nothing is started by itself.")
        shown.worker.store.create(TaskKind.BACKUP, TaskArguments(), who=f"ada {HOSTILE}", queue="files@node-4")
        expect(tasks).to_contain_text("Tasks wait in the queue files@node-4, and no running worker takes from it")
        shown.worker.store.create(TaskKind.EXPORT, TaskArguments(job_id=shown.job_id, version=5), who="ada")
        attempt = shown.worker.begin(TaskKind.EXPORT, shown.job_id)
        shown.worker.store.renew(attempt, TaskProgress(bytes_done=MIB, bytes_total=2 * MIB))
        shown.worker.running = (attempt.task_id,)
        shown.worker.live()
        queue = tasks.get_by_role("group", name="Queues of tasks").locator("tbody tr").filter(has_text="files").first
        expect(queue.locator("td")).to_have_text(["files", "0", "—", "1", "1"])
        expect(tasks.get_by_role("group", name="Workers of tasks")).to_contain_text(
            f"node-3check, clock, files{attempt.task_id}"
        )
        newest = tasks.get_by_role("group", name="Newest tasks").locator("tbody tr")
        running = newest.filter(has_text=attempt.task_id)
        expect(running).to_contain_text("Export a model, version 5")
        expect(running.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "50")
        expect(running.get_by_role("link", name=shown.job_id)).to_have_attribute("href", f"#/jobs/{shown.job_id}")
        expect(newest.filter(has_text="Back up the stack")).to_contain_text(f"ada {HOSTILE}")
        running.get_by_role("button", name="Cancel: Export a model").click()
        shown.worker.store.renew(attempt, TaskProgress(bytes_done=MIB, bytes_total=2 * MIB))
        page.get_by_role("button", name="Cancel the task").click()
        expect(running.locator(".badge")).to_have_text("cancelling")
        expect(running.get_by_role("button", name="Cancel: Export a model")).to_have_count(0)
        assert shown.worker.store.renew(attempt, TaskProgress()), "the worker is asked to end it"
        shown.worker.store.end(attempt, TaskState.CANCELLED, reason=f"it was asked to end {HOSTILE}")
        expect(running.locator(".badge")).to_have_text("cancelled")
        expect(running).to_contain_text(f"it was asked to end {HOSTILE}")
        assert page.title() == "Onbeat"
        assert page.locator("main img").count() == 0


def test_the_clock_says_what_it_starts_when_and_whose_it_is(shown: Shown) -> None:
    nightly = ClockEntry(name="nightly", kind=TaskKind.BACKUP, interval_s=86_400.0)
    remove_files = ClockEntry(name="remove_files", kind=TaskKind.REMOVE_FILES, interval_s=60.0)
    shown.worker.store.hold_clock("clock-1", [nightly, remove_files], lease_s=600.0)
    task_id, _ = shown.worker.store.create(TaskKind.BACKUP, TaskArguments(), who="the clock", entry=nightly)
    attempt = shown.worker.store.begin(task_id, worker=shown.worker.worker_id)
    assert attempt is not None
    shown.worker.store.end(attempt, TaskState.DONE)
    with shown.at("stack", size=PHONE, scheme="dark") as page:
        tasks = page.get_by_role("region", name="Tasks")
        expect(tasks).to_contain_text("The clock is kept by clock-1.")
        entries = tasks.get_by_role("group", name="Started by the clock").locator("tbody tr")
        expect(entries.nth(0).locator("td").nth(1)).to_have_text("1 d")
        expect(entries.nth(0)).to_contain_text("Back up the stack nightly")
        expect(entries.nth(0).locator("td").nth(3)).to_contain_text("now")
        expect(entries.nth(1).locator("td")).to_have_text(
            ["See to run folders of ended jobs remove_files", "1 min", "not yet", "not yet", "now"]
        )
        expect(tasks.get_by_role("group", name="Newest tasks")).to_contain_text("the clock")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], "the page itself is not wider than a phone"
