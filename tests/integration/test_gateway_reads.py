"""What the gateway answers a reader of jobs: lists by state and name, a spec, scores, a log, a check, a verdict."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from msgspec import UNSET
from msgspec.structs import asdict, replace

from broker.keys import GENERATORS, sealed_name
from broker.presence import Presence
from contracts.answers import JobStory, LogPart
from contracts.encoding.wire import convert, encode, encode_json
from contracts.errors import Unavailable
from contracts.events import BatchDead, IterationCommitted, StateChanged
from contracts.jobs import EvaluationScore, JobState
from contracts.monitor import GeneratorSeen
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from gateway.services import MOST_WAITING, Services
from tests.builders import job_spec
from tests.integration import test_gateway as rig
from tests.until import until

services = rig.services
ask = rig.ask
Ask = Callable[..., httpx.Response]


def folder_of(services: Services, job_id: str) -> RunFolder:
    folder = RunFolder(services.settings.run_root_path, job_id)
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def listed(ask: Ask, question: str) -> list[str]:
    answer = ask("GET", f"/v1/jobs?{question}")
    assert answer.status_code == 200, answer.text
    return [job["job_id"] for job in answer.json()["jobs"]]


def test_jobs_are_found_by_state_and_by_a_part_of_their_name(ask: Ask, services: Services) -> None:
    queued = rig.submit(ask, name="Sums of two digits (find me)")
    running = rig.submit(ask, name="sums of three digits (find me)")
    rig.submit(ask, name="products")
    services.jobs.move(running, JobState.RUNNING)
    assert listed(ask, "name=SUMS OF TWO&limit=1000") == [queued]
    assert listed(ask, "name=find me") == [running, queued]
    assert listed(ask, "name=find me&limit=1") == [running]
    assert listed(ask, "name=find me&state=queued") == [queued]
    assert listed(ask, "name=find me&state=running&state=queued") == [running, queued]
    assert listed(ask, "name=find me&state=failed") == []
    answer = ask("GET", "/v1/jobs?state=queued&state=sleeping")
    assert (answer.status_code, answer.json()["field"]) == (422, "state")


def test_answers_that_wait_for_files_of_other_hosts_leave_threads_for_the_others(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs: each answer that needs it waits for some seconds, and a page asks for several at once."""
    is_back, num_waiting = threading.Event(), threading.Semaphore(0)

    class Hanging:
        def bring(self, listed: bytes | None = None, *, below: str = "") -> None:
            num_waiting.release()
            assert is_back.wait(120.0)

    monkeypatch.setattr("gateway.services.run_files", lambda *_, **__: Hanging())
    services.settings = replace(services.settings, objects="file:///away")
    bearer = {"Authorization": f"Bearer {rig.KEY}"}
    with rig.serving(services) as url, httpx.Client(base_url=url, headers=bearer, timeout=120.0) as client:
        job_id = client.post("/v1/jobs", content=encode_json(job_spec()), headers=rig.JSON).json()["job_id"]
        with ThreadPoolExecutor(60) as pool:
            asked = [pool.submit(client.get, f"/v1/jobs/{job_id}/metrics") for _ in range(60)]
            try:
                for _ in range(MOST_WAITING):
                    assert num_waiting.acquire(timeout=30.0)
                assert client.get("/v1/jobs", timeout=30.0).status_code == 200
                new = client.post("/v1/jobs", content=encode_json(job_spec()), headers=rig.JSON, timeout=30.0)
                assert new.status_code == 201
                until(lambda: sum(one.done() for one in asked) == 60 - MOST_WAITING, "the others to be refused")
            finally:
                is_back.set()
        answers = [one.result() for one in asked]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(refused) == 60 - MOST_WAITING
    assert all((one.headers["Retry-After"], one.json()["field"]) == ("2", "ONBEAT_OBJECTS") for one in refused)
    assert {answer.status_code for answer in answers} == {200, 503}


def test_a_store_that_has_let_an_answer_wait_in_vain_is_asked_by_no_other_for_some_seconds(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[str] = []

    class Away:
        def bring(self, listed: bytes | None = None, *, below: str = "") -> None:
            parts.append(below)
            raise Unavailable("the store is away")

    monkeypatch.setattr("gateway.services.run_files", lambda *_, **__: Away())
    job_id, _ = services.jobs.create(job_spec())
    with pytest.raises(Unavailable, match="the store is away"):
        services.run_folder(job_id, below="metrics.jsonl")
    with pytest.raises(Unavailable, match="the object store is slow, and too many requests wait for it already"):
        services.run_folder(job_id, below="timeline.jsonl")
    services.asks_again_s = time.monotonic()  # the seconds are over
    with pytest.raises(Unavailable, match="the store is away"):
        services.run_folder(job_id, below="timeline.jsonl")
    assert parts == ["metrics.jsonl", "timeline.jsonl"]


def test_a_job_shows_the_tags_of_its_spec(ask: Ask) -> None:
    rig.submit(ask, name="tagged", tags=["lr 5e-4", "seeds"])
    (job,) = ask("GET", "/v1/jobs?name=tagged").json()["jobs"]
    assert (job["tags"], ask("GET", f"/v1/jobs/{job['job_id']}").json()["tags"]) == (["lr 5e-4", "seeds"],) * 2


def test_a_spec_that_is_read_back_makes_the_same_job_again(ask: Ask) -> None:
    job_id = rig.submit(ask, name="cloned", seed=7)
    answer = ask("GET", f"/v1/jobs/{job_id}/spec")
    read = convert(answer.json(), JobSpec)
    assert read.model.matmul == "torch"
    assert set(read.model.file_digests or ()) > {"qwen3/config.json"}
    as_submitted = replace(read, model=replace(read.model, matmul=UNSET, file_digests=UNSET))
    assert as_submitted == job_spec(name="cloned", seed=7), "what the gateway adds is by what the job is repeated"
    assert ask("POST", "/v1/jobs", content=answer.content, headers=rig.JSON).status_code == 201
    short = ask("GET", f"/v1/jobs/{job_id}/spec?defaults=false")
    assert convert(short.json(), JobSpec) == read, "keys with their default are left out, and nothing else"
    assert "deterministic" not in short.json()
    assert ask("POST", "/v1/jobs", content=short.content, headers=rig.JSON).status_code == 201


def test_the_models_and_rows_that_a_spec_may_name_are_listed(ask: Ask) -> None:
    files = ask("GET", "/v1/files").json()
    assert "qwen3" in files["models"]
    assert files["is_complete"] is True


def test_a_check_of_a_good_spec_creates_nothing(ask: Ask, services: Services) -> None:
    before = services.jobs.job_ids()
    good = ask("POST", "/v1/jobs/check", content=encode_json(job_spec()), headers=rig.JSON)
    assert (good.status_code, good.json()) == (200, {"valid": True})
    assert services.jobs.job_ids() == before


def test_evaluations_are_the_last_score_of_each_iteration(ask: Ask, services: Services) -> None:
    job_id = rig.submit(ask)
    assert ask("GET", f"/v1/jobs/{job_id}/evaluations").json() == {"evaluations": []}
    scores = [
        EvaluationScore(iteration=iteration, policy_version=iteration, sampled=sampled, num_prompts=2)
        for iteration, sampled in ((0, 0.25), (10, 0.5), (10, 0.75))
    ]
    folder_of(services, job_id).evaluations.write_bytes(b"".join(encode_json(score) + b"\n" for score in scores))
    found = ask("GET", f"/v1/jobs/{job_id}/evaluations").json()["evaluations"]
    assert convert(found, list[EvaluationScore]) == [scores[0], scores[2]]


def commit_up_to(services: Services, job_id: str, iteration: int) -> None:
    """As a fence has it whose last commit was of this iteration."""
    services.broker.redis.hset(services.broker.job_keys(job_id).fence, "committed", iteration)


def test_a_story_is_told_once_and_goes_on_after_what_was_seen(ask: Ask, services: Services) -> None:
    job_id = rig.submit(ask)

    def story(after: str = "", iteration: int = 0) -> JobStory:
        answer = ask("GET", f"/v1/jobs/{job_id}/story", params={"after": after, "iteration": iteration})
        assert answer.status_code == 200, answer.text
        return convert(answer.json(), JobStory)

    first = story()
    assert [told.event.state for told in first.events if isinstance(told.event, StateChanged)] == [JobState.QUEUED]
    assert (first.iterations, first.columns) == ((), {})
    folder = folder_of(services, job_id)
    folder.metrics.write_bytes(b"\n".join(rig.metrics_line(number, number / 3) for number in range(3)))
    commit_up_to(services, job_id, 1)
    metrics = replace(rig.iteration_metrics(), iteration=1)
    services.jobs.tell(job_id, IterationCommitted(at_s=1.0, metrics=metrics, weights_digest="a" * 64))
    services.jobs.tell(job_id, BatchDead(at_s=2.0, batch_id="2/train/0", reason="the scorer raised"))
    second = story(first.after)
    assert [told.event for told in second.events] == [
        BatchDead(at_s=2.0, batch_id="2/train/0", reason="the scorer raised")
    ]
    assert second.iterations == (0, 1)
    assert second.columns["reward_mean"] == (0.0, 0.333333)
    assert second.columns["reward: exact"] == (0.5, 0.5)
    assert second.columns["started_s"] == (metrics.started_s,) * 2
    assert "iteration" not in second.columns
    third = story(second.after, 2)
    assert (third.after, third.events, third.iterations) == (second.after, (), ())
    commit_up_to(services, job_id, 2)
    assert story(second.after, 2).columns["reward_mean"] == (0.666667,)
    answer = ask("GET", f"/v1/jobs/{job_id}/story?after=yesterday")
    assert (answer.status_code, answer.json()["field"]) == (422, "after")


def test_of_a_long_story_some_iterations_can_be_asked_for_first(ask: Ask, services: Services) -> None:
    job_id = rig.submit(ask)
    folder_of(services, job_id).metrics.write_bytes(b"\n".join(rig.metrics_line(number, 0.5) for number in range(26)))
    commit_up_to(services, job_id, 24)

    def story(**asked: int) -> JobStory:
        return convert(ask("GET", f"/v1/jobs/{job_id}/story", params=asked).json(), JobStory)

    first = story(most=10)
    assert (first.iterations, first.thinned) == ((0, 3, 6, 9, 12, 15, 18, 21, 24), True)
    assert first.columns["reward_mean"] == (0.5,) * 9
    assert (first.events, first.after) == ((), "0-0"), "they come with the rest"
    whole = story(most=25)
    assert (whole.iterations, whole.thinned, len(whole.events)) == (tuple(range(25)), False, 1)
    assert story(most=24).iterations == (*range(0, 24, 2), 24)
    assert story(most=10, iteration=20).iterations == (20, 21, 22, 23, 24)
    assert ask("GET", f"/v1/jobs/{job_id}/story?most=1").json()["field"] == "most"


def test_a_story_has_no_iteration_that_a_rewind_took_back(ask: Ask, services: Services) -> None:
    job_id = rig.submit(ask)
    folder = folder_of(services, job_id)
    lines = [rig.metrics_line(number, 0.25) for number in range(2000)]
    lines += [rig.metrics_line(number, 0.75) for number in range(1990, 1995)]
    folder.metrics.write_bytes(b"\n".join(lines) + b"\n")
    commit_up_to(services, job_id, 1994)

    def rewards(iteration: int) -> tuple[float | None, ...]:
        answer = ask("GET", f"/v1/jobs/{job_id}/story?iteration={iteration}")
        return convert(answer.json(), JobStory).columns.get("reward_mean", ())

    assert rewards(1988) == (0.25, 0.25, 0.75, 0.75, 0.75, 0.75, 0.75)
    assert len(rewards(0)) == len(rewards(1)) + 1 == 1995
    assert rewards(1995) == ()
    commit_up_to(services, job_id, 1991)
    assert rewards(1989) == (0.25, 0.75, 0.75)


def test_a_long_answer_is_compressed_where_the_client_takes_it_and_an_event_stream_never_is(
    ask: Ask, services: Services
) -> None:
    job_id = rig.submit(ask)
    folder = folder_of(services, job_id)
    folder.metrics.write_bytes(b"\n".join(rig.metrics_line(number, number / 7) for number in range(200)))
    path = f"/v1/jobs/{job_id}/metrics"
    plain = ask("GET", path, headers={"Accept-Encoding": "identity"})
    packed = ask("GET", path, headers={"Accept-Encoding": "gzip"})
    assert packed.json() == plain.json()
    assert (packed.headers["Content-Encoding"], packed.headers["Vary"]) == ("gzip", "Accept-Encoding")
    assert int(packed.headers["Content-Length"]) * 10 < int(plain.headers["Content-Length"])
    services.jobs.move(job_id, JobState.CANCELLED)
    stream = ask("GET", f"/v1/jobs/{job_id}/events", headers={"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in stream.headers


def test_a_page_of_a_thousand_iterations_is_less_than_four_tenths_of_a_megabyte(ask: Ask, services: Services) -> None:
    job_id, dice, metrics = rig.submit(ask), random.Random(1), rig.iteration_metrics()
    numbers = [name for name, value in asdict(metrics).items() if isinstance(value, float)]
    assert len(numbers) > 20
    lines = [replace(metrics, iteration=at, **{name: dice.random() for name in numbers}) for at in range(1000)]
    folder_of(services, job_id).metrics.write_bytes(b"\n".join(map(encode_json, lines)))
    commit_up_to(services, job_id, 999)
    assets = re.findall(r"(assets/[\w.-]+)", ask("GET", "/").text)
    assert {path.rpartition(".")[2] for path in assets} >= {"js", "css"}
    paths = ["/", *(f"/{path}" for path in assets), f"/v1/jobs/{job_id}/story?after=&iteration=0"]
    answers = [ask("GET", path, headers={"Accept-Encoding": "gzip"}) for path in paths]
    assert len(answers[-1].json()["iterations"]) == 1000
    assert sum(int(answer.headers["Content-Length"]) for answer in answers) < 400_000, [
        answer.headers["Content-Length"] for answer in answers
    ]


def test_a_log_is_read_in_parts_that_make_the_whole_of_it(ask: Ask, services: Services) -> None:
    job_id = rig.submit(ask)

    def part(**question: int) -> LogPart:
        return convert(ask("GET", f"/v1/jobs/{job_id}/log", params=question).json(), LogPart)

    assert part() == LogPart(text="", after=0, next=0, size=0)
    whole = "erste Zeile: größer\nzweite Zeile \x1b[31m🙂\nno end yet: ü"
    folder_of(services, job_id).trainer_log.write_text(whole)
    num_bytes = len(whole.encode())
    assert part() == LogPart(text=whole, after=0, next=num_bytes, size=num_bytes)
    for limit in (1, 2, 3, 7, 30):
        text, at = "", 0
        while at < num_bytes:
            one = part(after=at, limit=limit)
            assert (one.after, one.size) == (at, num_bytes)
            assert one.next > at
            text, at = text + one.text, one.next
        assert limit < 4 or text == whole
    assert part(limit=30).text == "erste Zeile: größer\n"
    assert part(after=10**9) == LogPart(text="", after=num_bytes, next=num_bytes, size=num_bytes)
    assert ask("GET", f"/v1/jobs/{job_id}/log?limit=0").json()["field"] == "limit"
    assert ask("GET", f"/v1/jobs/{job_id}/log?after=-1").json()["field"] == "after"


def test_a_log_that_is_a_link_or_a_pipe_shows_no_other_file_and_holds_no_request(
    ask: Ask, services: Services, tmp_path: Path
) -> None:
    job_id = rig.submit(ask)
    secret = tmp_path / "secret"
    secret.write_text("the key")
    log = folder_of(services, job_id).trainer_log
    log.symlink_to(secret)
    answer = ask("GET", f"/v1/jobs/{job_id}/log")
    assert (answer.status_code, answer.json()["field"]) == (503, "trainer.log")
    assert "the key" not in answer.text
    log.unlink()
    os.mkfifo(log)
    assert ask("GET", f"/v1/jobs/{job_id}/log").json()["detail"] == "cannot be read: is no plain file"


@pytest.mark.parametrize("route", ["metrics", "evaluations", "", "timeline", "timeline/perfetto", "rollouts"])
def test_a_run_file_that_is_a_link_or_a_pipe_holds_no_request_and_no_memory(
    ask: Ask, services: Services, route: str
) -> None:
    job_id = rig.submit(ask)
    folder = folder_of(services, job_id)
    files = [folder.metrics, folder.timeline, folder.evaluations]
    for file in files:
        file.symlink_to("/dev/zero")
    (folder.path / "rollouts").symlink_to("/proc/self")
    path = f"/v1/jobs/{job_id}/{route}".rstrip("/")
    expected = 503 if "rollouts" not in route and route else 200
    assert ask("GET", path).status_code == expected
    for file in files:
        file.unlink()
        os.mkfifo(file)
    assert ask("GET", path).status_code == expected


def test_generators_are_listed_with_what_they_do(ask: Ask, services: Services) -> None:
    Presence(services.broker).beat(GeneratorSeen(worker_id="g1", doing="generating 0/train/1", policy_version=3))
    (found,) = [one for one in ask("GET", "/v1/generators").json()["generators"] if one["worker_id"] == "g1"]
    assert (found["doing"], found["policy_version"], found["services"]) == ("generating 0/train/1", 3, [])
    assert found["seen_s"] < 60.0


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"junk",
        b"1 junk",
        b"9999999999999 \x80",
        b"9" * 400,
        encode({"worker_id": "g2", "seen_s": 1.0, "info": {}}),
    ],
)
def test_what_is_no_sign_of_life_is_told_and_forgotten_and_hides_no_generator(
    said: bytes, ask: Ask, services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    """What another Onbeat left in a Redis that is kept, for one."""
    Presence(services.broker).beat(GeneratorSeen(worker_id="g1"))
    board = sealed_name(GENERATORS, services.broker.seal)
    services.broker.redis.hset(board, "g2", said)
    listed = [one["worker_id"] for one in ask("GET", "/v1/generators").json()["generators"]]
    assert ("g1" in listed, "g2" in listed) == (True, False)
    assert "a heartbeat of b'g2' can't be read and is ignored: " in caplog.text
    assert not services.broker.redis.hexists(board, "g2")
