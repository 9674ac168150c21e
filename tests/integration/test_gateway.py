"""The gateway over a real server: a real uvicorn for what streams, the app itself for the rest."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from broker import keys
from broker.connection.client import connect
from broker.generator_side import GeneratorSide, PublishOutcome
from broker.openings import IterationOpening
from broker.presence import Presence
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import convert, encode_json
from contracts.errors import SpecRefused
from contracts.events import AuditRecord, TrainerStarted, record_digest
from contracts.jobs import EvaluationScore, JobState, JobStatus
from contracts.monitor import GeneratorSeen
from contracts.rollouts import PromptBatch
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from gateway import submission
from gateway.app import create_app
from gateway.services import Services
from onbeat.client.gateway import problem_of
from onbeat.stack.redis import EmbeddedRedis
from tests import served
from tests.builders import commit_record, job_spec, manifest, prompt_batch, rollout_batch, stub_model
from tests.contract.golden_files import iteration_metrics
from tests.served import asked, services_over

KEY = "test-key"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def services(settings: StackSettings, tmp_path: Path) -> Iterator[Services]:
    """Settings over a model root that holds the model of `job_spec`."""
    model = tmp_path / "models" / "qwen3"
    stub_model(model)
    settings = msgspec.structs.replace(settings, model_root=str(model.parent))
    with services_over(settings, max_body_bytes=20_000, keep_alive_s=0.0) as made:
        yield made


@pytest.fixture
def ask(services: Services) -> Callable[..., httpx.Response]:
    """One request to the app, with the right key unless `headers` says otherwise."""
    return partial(asked, create_app(services), key=KEY)


@contextmanager
def serving(services: Services) -> Iterator[str]:
    """A real uvicorn on a port of its own; its URL."""
    with served.serving(create_app(services)) as url:
        try:
            yield url
        finally:
            services.closing.set()


def submit(ask: Callable[..., httpx.Response], **changes: object) -> str:
    answer = ask("POST", "/v1/jobs", content=encode_json(job_spec(**changes)), headers=JSON)
    assert answer.status_code == 201, answer.text
    return answer.json()["job_id"]


def test_a_job_that_names_no_library_for_its_products_has_one_in_its_spec(ask: Callable[..., httpx.Response]) -> None:
    job_id = submit(ask)
    assert ask("GET", f"/v1/jobs/{job_id}/spec").json()["model"]["matmul"] == "torch", "by the setting of these tests"


def test_a_submitted_job_is_queued_and_a_message_for_the_consumers_is_sent(
    ask: Callable[..., httpx.Response], services: Services
) -> None:
    answer = ask("POST", "/v1/jobs", content=encode_json(job_spec(name="first")), headers=JSON)
    status = convert(answer.json(), JobStatus)
    assert answer.headers["Location"] == f"/v1/jobs/{status.job_id}"
    assert (status.name, status.state, status.reason) == ("first", JobState.QUEUED, "waits for a trainer")
    assert ask("GET", f"/v1/jobs/{status.job_id}").json() == answer.json()
    listed = convert(ask("GET", "/v1/jobs").json()["jobs"], list[JobStatus])
    assert listed[0] == status


def test_a_job_whose_spec_cannot_be_read_does_not_hide_the_others(
    ask: Callable[..., httpx.Response], services: Services
) -> None:
    job_id, old_id = submit(ask), submit(ask)
    services.broker.redis.set(
        services.broker.job_keys(old_id).spec, msgspec.msgpack.encode({"schedule": "of an older Onbeat"})
    )
    listed = [job["job_id"] for job in ask("GET", "/v1/jobs").json()["jobs"]]
    assert job_id in listed
    assert old_id not in listed
    services.broker.redis.srem(keys.ACTIVE, old_id)


def test_a_job_whose_record_a_server_lost_does_not_hide_the_others(
    ask: Callable[..., httpx.Response], services: Services
) -> None:
    job_id, lost_id = submit(ask), submit(ask)
    services.broker.redis.delete(services.broker.job_keys(lost_id).job)
    services.broker.redis.srem(keys.ACTIVE, lost_id)
    listed = [job["job_id"] for job in ask("GET", "/v1/jobs").json()["jobs"]]
    assert job_id in listed
    assert lost_id not in listed
    assert ask("GET", f"/v1/jobs/{lost_id}").status_code == 404


def test_the_same_idempotency_key_answers_the_same_job_once_and_refuses_another_spec(
    ask: Callable[..., httpx.Response],
) -> None:
    headers = JSON | {"Idempotency-Key": uuid.uuid4().hex}
    first = ask("POST", "/v1/jobs", content=encode_json(job_spec()), headers=headers)
    again = ask("POST", "/v1/jobs", content=encode_json(job_spec()), headers=headers)
    other = ask("POST", "/v1/jobs", content=encode_json(job_spec(seed=1)), headers=headers)
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 409)
    assert again.json()["job_id"] == first.json()["job_id"]
    assert other.json()["field"] == "Idempotency-Key"


def multiplied_by(matmul: Any, spec: JobSpec, _settings: StackSettings) -> JobSpec:
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, matmul=matmul))


def test_a_submission_that_is_sent_again_is_answered_though_what_the_gateway_adds_is_another(
    ask: Callable[..., httpx.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the reward service was away at first, and named no package; or a file has moved since."""
    headers = JSON | {"Idempotency-Key": uuid.uuid4().hex}
    answers: list[httpx.Response] = []
    for matmul in ("torch", "onednn"):
        monkeypatch.setattr(submission, "with_matmul", partial(multiplied_by, matmul))
        answers.append(ask("POST", "/v1/jobs", content=encode_json(job_spec()), headers=headers))
    assert [answer.status_code for answer in answers] == [201, 200]
    assert answers[0].json()["job_id"] == answers[1].json()["job_id"]


def changed(path: str, value: object) -> bytes:
    spec = msgspec.to_builtins(job_spec())
    *parents, leaf = path.split(".")
    section = spec
    for parent in parents:
        section = section[parent]
    section[leaf] = value
    return json.dumps(spec).encode()


BAD_BODIES = {
    "unknown key": (changed("model.pth", "x"), 422, "model.pth"),
    "unknown key at the top": (changed("bogus", 1), 422, "bogus"),
    "missing key": (b'{"name": "x"}', 422, "iterations"),
    "wrong type": (changed("seed", "one"), 422, "seed"),
    "out of range": (changed("rollout.group_size", 0), 422, "rollout.group_size"),
    "unknown reward": (changed("reward.components", [{"type": "bogus"}]), 422, "reward.components[0].type"),
    "a lag of no schedule": (changed("max_policy_lag", 1), 422, "max_policy_lag"),
    "a correction by an old name": (changed("algorithm.correction", "decoupled"), 422, "algorithm.correction"),
    "no model folder": (changed("model.path", "nowhere"), 422, "model.path"),
    "unknown task": (changed("dataset", {"type": "reasoning_gym", "task": "chain_summ"}), 422, "dataset.task"),
    "unscored task": (changed("reward.components", [{"type": "reasoning_gym"}]), 422, "reward.components[0].type"),
    "no data file": (changed("dataset", {"type": "jsonl", "train_path": "x.jsonl"}), 422, "dataset.train_path"),
    "no JSON": (b"{", 400, None),
    "not UTF-8": (b"\xff\xfe", 400, None),
    "too long": (b" " * 20_001, 413, "body"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_refused_by_a_problem_that_names_the_field_also_where_it_is_only_checked(
    name: str, ask: Callable[..., httpx.Response], services: Services
) -> None:
    body, status, field = BAD_BODIES[name]
    before = services.jobs.job_ids()
    answer = ask("POST", "/v1/jobs", content=body, headers=JSON)
    problem = answer.json()
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert (answer.status_code, problem["status"], problem["field"]) == (status, status, field)
    assert problem["detail"]
    checked = ask("POST", "/v1/jobs/check", content=body, headers=JSON)
    assert (checked.status_code, checked.json()) == (status, problem)
    assert services.jobs.job_ids() == before


def test_all_refusals_of_a_spec_come_in_one_answer_those_of_the_stack_with_those_of_the_judge(
    ask: Callable[..., httpx.Response],
) -> None:
    body = json.loads(changed("model.path", "nowhere"))
    body |= {"max_policy_lag": 1, "trainer": {"kl_alarm": 0.1}}
    answer = ask("POST", "/v1/jobs/check", content=json.dumps(body).encode(), headers=JSON)
    problem = answer.json()
    assert answer.status_code == 422
    assert [refusal["field"] for refusal in problem["refusals"]] == ["max_policy_lag", "trainer.kl_alarm", "model.path"]
    first = problem["refusals"][0]
    assert (problem["field"], problem["detail"], problem["cure"]) == (first["field"], first["problem"], first["cure"])
    error = problem_of(answer)
    assert isinstance(error, SpecRefused)
    assert [*msgspec.to_builtins(error.refusals)] == problem["refusals"]


def test_keys_of_another_type_come_in_one_answer(ask: Callable[..., httpx.Response]) -> None:
    body = json.loads(changed("name", 1)) | {"seed": -1, "iteratons": 3}
    answer = ask("POST", "/v1/jobs", content=json.dumps(body).encode(), headers=JSON)
    fields = {refusal["field"] for refusal in answer.json()["refusals"]}
    assert (answer.status_code, fields) == (422, {"name", "seed", "iteratons"})


def test_a_body_of_undeclared_length_is_cut_off_at_the_limit(ask: Callable[..., httpx.Response]) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 1000

    assert ask("POST", "/v1/jobs", content=endless(), headers=JSON).status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "request_", "status", "field"),
    [
        ("GET", "/v1/jobs", {"headers": {"Authorization": "Bearer wrong"}}, 401, "Authorization"),
        ("GET", "/v1/jobs", {"headers": {"Authorization": ""}}, 401, "Authorization"),
        ("GET", "/v1/jobs", {"headers": {"Authorization": "Bearer schlüssel".encode("latin-1")}}, 401, "Authorization"),
        ("GET", "/v1/jobs/job-none", {}, 404, "job_id"),
        ("GET", "/v1/jobs/a}:b{", {}, 404, "job_id"),
        ("GET", "/v1/jobs/job-none/events", {}, 404, "job_id"),
        ("POST", "/v1/jobs/job-none/cancel", {}, 404, "job_id"),
        ("POST", "/v1/jobs/job-none/resume", {}, 404, "job_id"),
        ("GET", "/v1/jobs?limit=0", {}, 422, "limit"),
        ("POST", "/v1/jobs", {"content": b"x", "headers": {"Content-Type": "text/plain"}}, 415, "Content-Type"),
        ("POST", "/v1/jobs", {"headers": JSON | {"Idempotency-Key": "a b"}}, 422, "Idempotency-Key"),
        ("POST", "/v1/jobs", {"headers": JSON | {"Idempotency-Key": ""}}, 422, "Idempotency-Key"),
        ("GET", "/v1/nothing", {}, 404, None),
        ("DELETE", "/v1/jobs", {}, 405, None),
    ],
)
def test_a_bad_request_is_refused_by_a_problem(
    method: str, path: str, request_: dict[str, Any], status: int, field: str | None, ask: Callable[..., httpx.Response]
) -> None:
    answer = ask(method, path, **request_)
    assert (answer.status_code, answer.json()["field"]) == (status, field)
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert KEY not in answer.text


def test_a_queued_job_is_cancelled_at_once_and_stays_so(ask: Callable[..., httpx.Response]) -> None:
    job_id = submit(ask)
    for _ in range(2):
        answer = ask("POST", f"/v1/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")


def test_at_the_most_jobs_a_submission_is_refused_by_the_way_out(
    ask: Callable[..., httpx.Response], services: Services
) -> None:
    submit(ask)
    services.settings = msgspec.structs.replace(services.settings, max_jobs=1)
    answer = ask("POST", "/v1/jobs", content=encode_json(job_spec()), headers=JSON)
    assert (answer.status_code, answer.json()["cure"]) == (409, "delete ended ones with `onbeat delete JOB`")


def test_a_running_job_is_cancelling_until_its_trainer_has_saved_and_an_ended_one_cannot_be_cancelled(
    ask: Callable[..., httpx.Response], services: Services
) -> None:
    job_id = submit(ask)
    services.jobs.move(job_id, JobState.RUNNING)
    assert ask("POST", f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelling"
    services.jobs.move(job_id, JobState.SUCCEEDED)
    refused = ask("POST", f"/v1/jobs/{job_id}/cancel")
    assert (refused.status_code, refused.json()["detail"]) == (409, "a succeeded job cannot be cancelled")
    assert ask("GET", f"/v1/jobs/{job_id}").json()["state"] == "succeeded"


def test_a_cancelled_job_is_queued_again_by_a_resume_which_may_change_its_iterations(
    ask: Callable[..., httpx.Response],
) -> None:
    job_id = submit(ask)
    assert ask("POST", f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    assert ask("POST", f"/v1/jobs/{job_id}/resume").json()["state"] == "queued"
    ask("POST", f"/v1/jobs/{job_id}/cancel")
    answer = ask("POST", f"/v1/jobs/{job_id}/resume", content=b'{"iterations": 7}', headers=JSON)
    status = convert(answer.json(), JobStatus)
    assert (status.state, status.iterations, status.ended_s) == (JobState.QUEUED, 7, 0.0)


@pytest.mark.parametrize(
    ("body", "headers", "status", "field"),
    [
        (b'{"iterations": 0}', JSON, 422, "iterations"),
        (b'{"iteration": 5}', JSON, 422, "iteration"),
        (b'{"schedule": "delayed"}', JSON, 422, "schedule"),
        (b'{"max_policy_lag": 1}', JSON, 422, "max_policy_lag"),
        (b'{"algorithm": {"correction": "none"}}', JSON, 422, "algorithm"),
        (b"{", JSON, 400, None),
        (b"{}", {"Content-Type": "text/plain"}, 415, "Content-Type"),
        (b"", {}, 409, "state"),
    ],
)
def test_a_bad_resume_is_refused_and_so_is_that_of_a_running_job(
    body: bytes,
    headers: dict[str, str],
    status: int,
    field: str | None,
    ask: Callable[..., httpx.Response],
    services: Services,
) -> None:
    job_id = submit(ask)
    services.jobs.move(job_id, JobState.RUNNING)
    answer = ask("POST", f"/v1/jobs/{job_id}/resume", content=body, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (status, field)
    assert services.jobs.state(job_id) is JobState.RUNNING


def test_an_unreachable_broker_is_a_503_that_says_so(services: Services, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "gone") as server:
        services.settings = msgspec.structs.replace(services.settings, redis_url=server.url)
        services.broker = connect(services.settings, patience_s=0.0)
    app = create_app(services)
    ready, jobs, health = (asked(app, "GET", path, key=KEY) for path in ("/readyz", "/v1/jobs", "/healthz"))
    assert (ready.status_code, jobs.status_code, health.status_code) == (503, 503, 200)
    assert "Redis does not answer" in jobs.json()["detail"]


def test_a_full_broker_is_a_507_and_leaves_no_job(services: Services, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "full") as server:
        services.settings = msgspec.structs.replace(services.settings, redis_url=server.url)
        services.broker = connect(services.settings)
        services.broker.redis.config_set("maxmemory", 1)
        app = create_app(services)
        answer = asked(app, "POST", "/v1/jobs", key=KEY, content=encode_json(job_spec()), headers=JSON)
        assert (answer.status_code, answer.json()["detail"]) == (507, "Redis is at maxmemory and refuses writes")
        assert services.jobs.job_ids() == []


def events_of(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(id, event, data) of each event."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields["id"], fields["event"], json.loads(fields["data"])
            fields = {}


def test_events_stream_live_to_the_final_state_and_resume_after_the_last_one_seen(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    with serving(services) as url, httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=30.0) as http:
        events_url = f"{url}/v1/jobs/{job_id}/events"
        with http.stream("GET", events_url) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            events = events_of(lines)
            first_id, kind, data = next(events)
            assert (kind, data["state"]) == ("state_changed", "queued")
            while next(lines) != ": keep-alive":
                pass
            services.jobs.move(job_id, JobState.RUNNING)
            services.jobs.tell(job_id, TrainerStarted(at_s=1.0, trainer_epoch=7, next_iteration=0, resumed=False))
            assert [event[2].get("trainer_epoch") for event in (next(events), next(events))] == [None, 7]
            services.jobs.move(job_id, JobState.SUCCEEDED)
            last_id, _, data = next(events)
            assert data["state"] == "succeeded"
            assert list(events) == []
        with http.stream("GET", events_url, headers={"Last-Event-ID": first_id}) as answer:
            kinds = [kind for _, kind, _ in events_of(answer.iter_lines())]
        assert kinds == ["state_changed", "trainer_started", "state_changed"]
        with http.stream("GET", events_url, headers={"Last-Event-ID": last_id}) as answer:
            assert list(events_of(answer.iter_lines())) == []
        for hostile in (
            "yesterday",
            "1-2-3",
            "9" * 20,
            f"{2**64 - 1}-{2**64 - 1}",
            "0-99999999999999999999",
            "\u0663".encode(),
        ):
            refused = http.get(events_url, headers={"Last-Event-ID": hostile})
            assert (refused.status_code, refused.json()["field"]) == (422, "Last-Event-ID")
        for late in (str(2**64 - 1), f"{2**64 - 1}-0"):
            with http.stream("GET", events_url, headers={"Last-Event-ID": late}) as answer:
                assert list(events_of(answer.iter_lines())) == []


def test_event_streams_are_bounded_and_one_that_ends_makes_room(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    services.max_event_streams = 1
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving(services) as url, httpx.Client(headers=headers, timeout=30.0) as http:
        events_url = f"{url}/v1/jobs/{job_id}/events"
        with http.stream("GET", events_url) as answer:
            events = events_of(answer.iter_lines())
            next(events)
            refused = http.get(events_url)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
        services.jobs.move(job_id, JobState.CANCELLED)
        while True:  # the server sees a little later that the first one has left
            with http.stream("GET", events_url) as answer:
                if answer.status_code == 200:
                    assert [data["state"] for _, _, data in events_of(answer.iter_lines())][-1] == "cancelled"
                    return
                assert answer.status_code == 503


def test_a_gateway_that_ends_does_not_wait_for_its_event_streams(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        serving(services) as url,
        httpx.stream("GET", f"{url}/v1/jobs/{job_id}/events", headers=headers, timeout=30.0) as answer,
    ):
        events = events_of(answer.iter_lines())
        next(events)
        services.closing.set()
        assert list(events) == []


def metrics_line(iteration: int, reward: float) -> bytes:
    return encode_json(msgspec.structs.replace(iteration_metrics(), iteration=iteration, reward_mean=reward))


def test_metrics_are_the_last_line_of_each_iteration_and_a_torn_line_is_left_out(
    ask: Callable[..., httpx.Response], services: Services
) -> None:
    job_id = submit(ask)
    assert ask("GET", f"/v1/jobs/{job_id}/metrics").json() == {"iterations": []}
    folder = RunFolder(services.settings.run_root_path, job_id)
    folder.path.mkdir()
    lines = [metrics_line(0, 0.25), metrics_line(1, 0.5), metrics_line(1, 0.75), metrics_line(2, 1.0)[:40]]
    folder.metrics.write_bytes(b"\n".join(lines))
    found = ask("GET", f"/v1/jobs/{job_id}/metrics").json()["iterations"]
    assert [(line["iteration"], line["reward_mean"]) for line in found] == [(0, 0.25), (1, 0.75)]


DIGEST, NEXT_DIGEST = "a" * 64, "b" * 64


def test_status_and_audit_show_what_the_fence_holds(ask: Callable[..., httpx.Response], services: Services) -> None:
    job_id = submit(ask)
    trainer = TrainerSide(services.broker, job_id, owner="t", lease_s=60.0)
    generator_id = f"generator-{uuid.uuid4().hex[:6]}"
    Presence(services.broker).beat(GeneratorSeen(worker_id=generator_id, engine="fake"))
    epoch = trainer.acquire()
    services.jobs.move(job_id, JobState.RUNNING)
    services.jobs.record_evaluation(job_id, EvaluationScore(iteration=0, policy_version=0, sampled=0.5, num_prompts=2))
    batches = [training_batch(job_id, index) for index in range(2)]
    for version in (0, 1):
        trainer.publish_weights(manifest(version, (DIGEST, NEXT_DIGEST)[version]), oldest_kept=0)
    trainer.open_iteration(
        IterationOpening(iteration=0, oldest_version=0, newest_version=0, batches=tuple(batches)), {0: DIGEST}
    )
    generator = GeneratorSide(services.broker, job_id, generator_id)
    claims = [generator.claim(60.0), generator.claim(60.0)]
    assert claims[0] is not None
    rollouts = rollouts_of(batches[0], generator_id)
    assert generator.publish(claims[0], rollouts) is PublishOutcome.ACCEPTED
    stale = msgspec.structs.replace(rollouts, generator_id="somebody else")
    assert generator.publish(claims[0], stale) is PublishOutcome.DUPLICATE

    status = convert(ask("GET", f"/v1/jobs/{job_id}").json(), JobStatus)
    assert (status.trainer_epoch, status.batches_rejected) == (epoch, {"duplicate": 1})
    assert (status.batches_expected, status.batches_published, status.batches_accepted) == (2, 1, 1)
    assert (status.policy_version, status.weights_digest, status.iterations_committed) == (0, DIGEST, 0)
    assert status.evaluation_before is not None
    assert status.live_generators >= 1

    assert claims[1] is not None
    assert generator.publish(claims[1], rollouts_of(batches[1], generator_id)) is PublishOutcome.ACCEPTED
    arrived, _ = trainer.claim_rollouts(0, max_batches=2)
    trained = {item.batch.batch_id: item.digest for item in arrived}
    trainer.commit(audit_record(trained), trained, event=None, opening=None, next_version=None)
    status = convert(ask("GET", f"/v1/jobs/{job_id}").json(), JobStatus)
    assert (status.policy_version, status.weights_digest, status.iterations_committed) == (1, NEXT_DIGEST, 1)
    (record,) = ask("GET", f"/v1/jobs/{job_id}/audit").json()["records"]
    assert record.pop("digest") == record_digest(audit_record(trained))
    assert convert(record, AuditRecord) == audit_record(trained)


def training_batch(job_id: str, index: int) -> PromptBatch:
    return prompt_batch([[1, 2], [3]], job_id=job_id, batch_id=f"0/train/{index}", weights_digest=DIGEST)


def rollouts_of(batch: PromptBatch, generator_id: str) -> Any:
    return rollout_batch(
        job_id=batch.job_id, batch_id=batch.batch_id, weights_digest=DIGEST, group_size=2, generator_id=generator_id
    )


def audit_record(batches: dict[str, str]) -> AuditRecord:
    return commit_record(0, batches, weights_digest=DIGEST, next_weights_digest=NEXT_DIGEST)


def test_the_document_of_the_api_refers_only_to_schemas_that_it_holds(ask: Callable[..., httpx.Response]) -> None:
    document = ask("GET", "/openapi.json").json()
    held = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    referred = set(json.dumps(document).split('"$ref": "')[1:])
    assert {reference.partition('"')[0] for reference in referred} <= held
    assert "/v1/jobs/{job_id}/events" in document["paths"]


def test_the_document_says_who_needs_the_key_what_metrics_are_and_where_a_job_leads(
    ask: Callable[..., httpx.Response],
) -> None:
    document = ask("GET", "/openapi.json").json()
    operations = {one["operationId"]: one for path in document["paths"].values() for one in path.values()}
    assert document["security"] == [{"key": []}]
    assert {name for name, one in operations.items() if one.get("security") == []} == {"healthz", "readyz"}
    assert list(operations["prometheus"]["responses"]["200"]["content"]) == ["text/plain"]
    assert ask("GET", "/metrics").headers["Content-Type"].startswith("text/plain")
    with_id = {
        name
        for name, one in operations.items()
        if any((p["name"], p["in"]) == ("job_id", "path") for p in one.get("parameters", []))
    }
    for operation, status in (("submit", "201"), ("submit", "200"), ("get_job", "200"), ("list_jobs", "200")):
        links = operations[operation]["responses"][status]["links"]
        assert {link["operationId"] for link in links.values()} == with_id
    body = operations["submit"]["requestBody"]["content"]["application/json"]
    assert convert(body["examples"]["the demo's model"]["value"], JobSpec).name == "addition"


def test_a_wrong_method_is_told_every_right_one_of_its_path(ask: Callable[..., httpx.Response]) -> None:
    assert ask("PUT", "/v1/jobs").headers["Allow"] == "GET, POST"
    assert ask("PUT", "/v1/jobs/check").headers["Allow"] == "POST"
    assert ask("PUT", "/v1/jobs/job-none").headers["Allow"] == "DELETE, GET"
    assert ask("PUT", "/v1/jobs/job-none/cancel").headers["Allow"] == "POST"


def test_prometheus_reads_requests_by_route_and_no_job_id(ask: Callable[..., httpx.Response]) -> None:
    job_id = submit(ask)
    ask("GET", f"/v1/jobs/{job_id}")
    text = "\n".join(line for line in ask("GET", "/metrics").text.splitlines() if "onbeat_gateway_" in line)
    assert 'onbeat_gateway_requests_total{method="GET",route="/v1/jobs/{job_id}",status="200"} 1.0' in text
    assert job_id not in text


def test_invented_methods_paths_and_keys_make_no_new_metrics(ask: Callable[..., httpx.Response]) -> None:
    def labels() -> set[str]:
        return {line.rpartition(" ")[0] for line in ask("GET", "/metrics").text.splitlines() if "_requests_" in line}

    ask("BREW", "/v1/jobs")
    ask("BREW", "/nothing")
    before = labels() | labels()
    for number in range(20):
        assert ask(f"BREW{number}", "/v1/jobs").status_code == 405
        assert ask(f"BREW{number}", f"/nothing/{number}").status_code == 404
    assert {line.split("}")[0] for line in labels()} == {line.split("}")[0] for line in before}


def test_event_streams_that_are_asked_for_at_once_are_bounded_too(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    services.max_event_streams = 2
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving(services) as url, httpx.Client(headers=headers, timeout=30.0) as http, ExitStack() as open_streams:

        def ask(_: int) -> httpx.Response:
            request = http.build_request("GET", f"{url}/v1/jobs/{job_id}/events")
            return http.send(request, stream=True)

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(ask, range(20)))
        for answer in answers:
            open_streams.callback(answer.close)
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [503] * 18
        services.closing.set()
