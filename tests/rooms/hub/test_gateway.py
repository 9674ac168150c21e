"""A gateway that meets names of the hub: which jobs it takes, what it fetches for whom, and what their records say."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import encode_json
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from gateway.app import create_app
from gateway.hub_fetches import HubFetches
from gateway.services import Services
from onbeat.data.datasets.loading import job_examples
from onbeat.data.named_files import digest_of_file
from onbeat.hub.fetching import fetch
from onbeat.hub.spec_names import hub_requests
from tests.builders import job_spec
from tests.rooms.hub.conftest import MODEL, MODEL_NAME, SUMS, lines, model_files, rows_files
from tests.rooms.hub.hub_server import HubHandler, HubServer, hang
from tests.served import asked, services_over

JSON = {"Content-Type": "application/json"}
TOKEN = "hf_a-token-that-nobody-may-see"
KEY = "alices-key"
COLUMNS = {"prompt": "question", "reference": "answer", "reference_after": "####"}


def spec_of(**changes: Any) -> JobSpec:
    dataset = {
        "type": "huggingface",
        "path": f"hub:{SUMS}",
        "config": "main",
        "evaluation_split": "test",
        "columns": COLUMNS,
    }
    return job_spec(model__path=f"hub:{MODEL_NAME}", dataset=dataset, **changes)


@pytest.fixture
def stack(settings: StackSettings, host: StackSettings, tmp_path: Path) -> StackSettings:
    """Settings of a gateway that fetches for the operator, with the key of another person."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice submit {hashlib.sha256(KEY.encode()).hexdigest()}\n")
    return replace(
        settings,
        hub_root=host.hub_root,
        keys_file=str(keys),
        run_root=str(tmp_path / "runs"),
        model_root=str(tmp_path),
        hub_fetch="operator",
    )


@pytest.fixture
def gateway(hub: HubServer, stack: StackSettings) -> Iterator[Services]:
    with services_over(stack) as services:
        yield services
        services.hub.close()


def ask(services: Services, path: str, *, key: str = "test-key", content: bytes = b"") -> httpx.Response:
    return asked(create_app(services), "POST", path, key=key, content=content, headers=dict(JSON) if content else {})


def submitted(services: Services, spec: JobSpec, *, key: str = "test-key") -> httpx.Response:
    return ask(services, "/v1/jobs", key=key, content=encode_json(spec))


def accepted(services: Services, spec: JobSpec) -> tuple[str, JobSpec]:
    """The job and its record, once the gateway has fetched what it needs."""
    until_s = time.monotonic() + 120.0
    while (answer := submitted(services, spec)).status_code == 503 and time.monotonic() < until_s:
        assert answer.json()["field"] == "hub"
        assert answer.headers["Retry-After"] == "1"
    assert answer.status_code == 201, answer.text
    job_id = answer.json()["job_id"]
    return job_id, services.jobs.spec(job_id)


def test_the_record_of_a_job_has_the_commits_and_the_digests_of_all_files(gateway: Services, hub: HubServer) -> None:
    _, record = accepted(gateway, spec_of())
    commit, of_rows = hub.models[MODEL_NAME].refs["main"], hub.datasets[SUMS].refs["main"]
    assert record.model.path == f"hub:{MODEL_NAME}@{commit}"
    assert record.dataset.path == f"hub:{SUMS}@{of_rows}"  # pyright: ignore[reportAttributeAccessIssue]
    digests = record.file_digests
    assert digests[f"hub:{MODEL_NAME}@{commit}/model.safetensors"] == digest_of_file(MODEL / "model.safetensors")
    folder = f"hub:datasets/{SUMS}@{of_rows}/main"
    assert {name for name in digests if name.startswith(folder)} == {
        f"{folder}/train/00000-train-00000-of-00002.jsonl",
        f"{folder}/train/00001-train-00001-of-00002.jsonl",
        f"{folder}/train/state.json",
        f"{folder}/test/00000-test-00000-of-00001.jsonl",
        f"{folder}/test/state.json",
    }
    assert digests[f"{folder}/test/00000-test-00000-of-00001.jsonl"] == content_digest(lines(70, 16))


def test_a_trainer_reads_the_rows_in_their_order_and_holds_out_the_other_split(
    gateway: Services, stack: StackSettings
) -> None:
    _, record = accepted(gateway, spec_of())
    examples = job_examples(record, stack.spec_root)
    assert [example.question for example in examples.train] == [f"{number}+11=" for number in range(10, 70)]
    assert examples.train[0].reference == "12"
    assert [example.question for example in examples.evaluation] == [f"{number}+11=" for number in range(70, 78)]


def test_a_revision_that_moves_changes_no_job_that_was_accepted_and_none_until_it_is_fetched_again(
    gateway: Services, hub: HubServer, stack: StackSettings
) -> None:
    job_id, record = accepted(gateway, spec_of())
    hub.models[MODEL_NAME].push(model_files() | {"generation_config.json": b'{"eos_token_id": [1, 2]}'})
    hub.datasets[SUMS].push(rows_files() | {"main/train-00000-of-00002.jsonl": lines(0, 2)})
    assert accepted(gateway, spec_of())[1] == record
    gateway.jobs.request_cancel(job_id, by="test")
    assert ask(gateway, f"/v1/jobs/{job_id}/resume").status_code == 200
    assert gateway.jobs.spec(job_id) == record
    # `onbeat fetch` asks the hub again: from then on the name is the new commit, and the job stays as it is.
    for request in hub_requests(spec_of()).values():
        fetch(request, stack)
    _, after = accepted(gateway, spec_of())
    assert after.model.path == f"hub:{MODEL_NAME}@{hub.models[MODEL_NAME].refs['main']}"
    assert after.file_digests != record.file_digests
    assert gateway.jobs.spec(job_id) == record


def test_two_keys_of_one_name_have_one_commit(gateway: Services, hub: HubServer) -> None:
    held_out = {"type": "huggingface", "path": f"hub:{SUMS}", "config": "main", "split": "test", "columns": COLUMNS}
    gateway.hub = HubFetches(gateway.settings, wait_s=60.0)

    def moving(handler: HubHandler, data: bytes) -> None:
        hub.datasets[SUMS].push(rows_files() | {"NEW.md": b"moved while the first split came"})
        handler.wfile.write(data)

    before = hub.datasets[SUMS].refs["main"]
    hub.faults["main/train-00000-of-00002.jsonl"] = moving
    rows = {"type": "huggingface", "path": f"hub:{SUMS}", "config": "main", "columns": COLUMNS}
    sets = [{"name": "sums", "dataset": held_out, "num_prompts": 4}]
    _, record = accepted(gateway, job_spec(model__path=f"hub:{MODEL_NAME}", dataset=rows, evaluation__sets=sets))
    assert hub.datasets[SUMS].refs["main"] != before
    assert {str(request.name).rpartition("@")[2] for request in list(hub_requests(record).values())[1:]} == {before}


def test_what_was_removed_comes_back_at_a_resume_as_it_was(
    gateway: Services, hub: HubServer, stack: StackSettings
) -> None:
    job_id, record = accepted(gateway, spec_of())
    gateway.jobs.request_cancel(job_id, by="test")
    hub.models[MODEL_NAME].push(model_files() | {"config.json": b"{}"})
    folder = stack.spec_root.find(record.model.path, field="model.path")
    folder.rename(stack.hub_root_path / "elsewhere")
    until_s = time.monotonic() + 60.0
    while (answer := ask(gateway, f"/v1/jobs/{job_id}/resume")).status_code == 503 and time.monotonic() < until_s:
        time.sleep(0.1)
    assert answer.status_code == 200, answer.text
    assert (folder / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()


def test_a_file_that_was_edited_in_the_fetched_folder_is_refused_by_name(
    gateway: Services, stack: StackSettings
) -> None:
    job_id, record = accepted(gateway, spec_of())
    gateway.jobs.request_cancel(job_id, by="test")
    folder = stack.spec_root.find(record.model.path, field="model.path")
    (folder / "tokenizer.json").write_text("{}")
    answer = ask(gateway, f"/v1/jobs/{job_id}/resume")
    assert answer.status_code == 422
    assert f"{record.model.path}/tokenizer.json has changed since the job was accepted" in answer.json()["detail"]


def test_offline_a_fetched_name_is_found_and_another_is_refused_with_the_cure(
    hub: HubServer, stack: StackSettings
) -> None:
    for request in hub_requests(spec_of()).values():
        fetch(request, stack)
    hub.shutdown()
    with services_over(replace(stack, hub_fetch="none")) as gateway:
        _, record = accepted(gateway, spec_of())
        assert record.model.path.startswith(f"hub:{MODEL_NAME}@")
        answer = submitted(gateway, spec_of(model={"path": "hub:onbeat/other"}))
        assert answer.status_code == 422
        assert answer.json()["field"] == "model.path"
        assert (
            answer.json()["detail"] == "hub:onbeat/other isn't on the gateway's host, and this gateway fetches nothing"
        )
        assert "run `onbeat fetch hub:onbeat/other` there" in answer.json()["cure"]


@pytest.mark.parametrize(("hub_fetch", "offline"), [("none", ""), ("", "1")])
def test_a_gateway_that_fetches_nothing_asks_no_hub(
    hub: HubServer, stack: StackSettings, monkeypatch: pytest.MonkeyPatch, hub_fetch: Any, offline: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with services_over(replace(stack, hub_fetch=hub_fetch)) as gateway:
        answer = submitted(gateway, spec_of())
    assert answer.status_code == 422
    assert "this gateway fetches nothing" in answer.json()["detail"]
    assert not hub.asked


def test_the_gateway_fetches_for_the_operators_key_alone_unless_it_is_told_to(
    hub: HubServer, stack: StackSettings
) -> None:
    with services_over(stack) as gateway:
        answer = submitted(gateway, spec_of(), key=KEY)
        assert answer.status_code == 422
        assert "this gateway fetches for the operator's key alone" in answer.json()["detail"]
        assert not hub.asked
        accepted(gateway, spec_of())
        # What is there may be named by each key.
        assert submitted(gateway, spec_of(), key=KEY).status_code == 201
    other = spec_of(model={"path": f"hub:{MODEL_NAME}@v2"})
    hub.models[MODEL_NAME].push(model_files(), revision="v2")
    with services_over(replace(stack, hub_fetch="all")) as gateway:
        gateway.hub = HubFetches(gateway.settings, wait_s=60.0)
        assert submitted(gateway, other, key=KEY).status_code == 201


def test_a_check_fetches_nothing(gateway: Services, hub: HubServer) -> None:
    answer = ask(gateway, "/v1/jobs/check", content=encode_json(spec_of()))
    assert answer.json() == {"valid": True}
    assert not hub.asked
    accepted(gateway, spec_of())
    assert ask(gateway, "/v1/jobs/check", content=encode_json(spec_of())).json() == {"valid": True}


def test_a_spec_that_the_judge_refuses_fetches_nothing(gateway: Services, hub: HubServer) -> None:
    answer = submitted(gateway, spec_of(tags=["a", "a"]))
    assert [refusal["field"] for refusal in answer.json()["refusals"]] == ["tags"]
    assert not hub.asked


def test_while_a_fetch_goes_on_a_client_is_told_how_far_it_is_and_asks_again(
    gateway: Services, hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.hub = HubFetches(gateway.settings, wait_s=0.2)
    hub.faults["model.safetensors"] = hang
    with caplog.at_level(logging.INFO):
        answers = [submitted(gateway, spec_of()) for _ in range(3)]
    lines = [record.getMessage() for record in caplog.records if MODEL_NAME in record.getMessage()]
    assert lines == [f"hub:{MODEL_NAME} is being fetched"], "one line for the fetch, and none for each request"
    answer = answers[-1]
    assert {answer.status_code for answer in answers} == {503}
    assert answer.json()["field"] == "hub"
    assert answer.json()["detail"].startswith(f"hub:{MODEL_NAME} is being fetched: ")
    assert "with the same Idempotency-Key" in answer.json()["cure"]


def test_a_name_that_does_not_exist_is_refused_by_its_key_and_may_be_tried_again(
    gateway: Services, hub: HubServer
) -> None:
    gateway.hub = HubFetches(gateway.settings, wait_s=60.0)
    dataset = {"type": "huggingface", "path": f"hub:{SUMS}", "config": "other"}
    answer = submitted(gateway, job_spec(model__path=f"hub:{MODEL_NAME}", dataset=dataset))
    assert (answer.status_code, answer.json()["field"]) == (422, "dataset.path")
    assert "has no configuration `other`" in answer.json()["detail"]
    answer = submitted(gateway, spec_of(model={"path": "hub:onbeat/later"}))
    assert (answer.status_code, answer.json()["field"]) == (422, "model.path")
    hub.models["onbeat/later"] = hub.models[MODEL_NAME]
    assert submitted(gateway, spec_of(model={"path": "hub:onbeat/later"})).status_code == 201


def test_no_log_no_answer_and_no_record_has_the_token(
    hub: HubServer, stack: StackSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.models[MODEL_NAME].token = TOKEN
    with services_over(replace(stack, hub_token="hf_no-access")) as gateway:
        gateway.hub = HubFetches(gateway.settings, wait_s=60.0)
        answer = submitted(gateway, spec_of())
        assert (answer.status_code, answer.json()["field"]) == (422, "model.path")
        assert "is gated, and the token has no access to it" in answer.json()["detail"]
        assert "hf_no-access" not in answer.text
    with services_over(replace(stack, hub_token=TOKEN)) as gateway:
        _, record = accepted(gateway, spec_of())
        assert TOKEN.encode() not in encode_json(record)
    assert TOKEN not in caplog.text
    assert "hf_no-access" not in caplog.text


def test_fetches_end_with_the_gateway(gateway: Services, hub: HubServer) -> None:
    is_gone: list[bool] = []

    def until_closed(handler: HubHandler, data: bytes) -> None:
        handler.connection.settimeout(30.0)
        # The end of the stream comes when the process of the fetch is gone.
        is_gone.append(handler.connection.recv(1) == b"")

    gateway.hub = HubFetches(gateway.settings, wait_s=0.2)
    hub.faults["model.safetensors"] = until_closed
    assert submitted(gateway, spec_of()).status_code == 503
    until_s = time.monotonic() + 60.0
    while not hub.asked["GET model.safetensors"] and time.monotonic() < until_s:
        time.sleep(0.05)
    gateway.hub.close()
    while not is_gone and time.monotonic() < until_s:
        time.sleep(0.05)
    assert is_gone == [True]
