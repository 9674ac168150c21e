"""The gateway answers whether a run holds, by a process of its own that has bounds."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from broker.trainer_side import TrainerSide
from contracts.answers import AuditVerdict
from contracts.encoding.wire import convert
from contracts.events import record_digest
from gateway.services import Services
from onbeat.loop.chain import rewind_record
from onbeat_extras.looking import verification
from tests.builders import job_spec
from tests.integration import test_gateway as rig
from tests.integration.test_gateway_reads import Ask, folder_of
from tests.until import until

services = rig.services
ask = rig.ask


def rewound(services: Services, job_id: str) -> None:
    """Gives the job an audit chain of one record, whose version has no step that made it."""
    trainer = TrainerSide(services.broker, job_id, owner="t", lease_s=60.0)
    epoch = trainer.acquire()
    trainer.publish_weights(rig.manifest(0), oldest_kept=0)
    trainer.rewind(rewind_record("", rig.manifest(0), trainer_epoch=epoch))


def test_a_verification_answers_the_verdict_of_the_command(ask: Ask, services: Services) -> None:
    job_id = rig.submit(ask)
    empty = ask("POST", f"/v1/jobs/{job_id}/verify")
    assert (empty.status_code, empty.json()["field"]) == (409, "state")
    rewound(services, job_id)
    away = ask("POST", f"/v1/jobs/{job_id}/verify")
    assert (away.status_code, away.json()["field"]) == (404, "job_id")
    assert "its weights can't be hashed again" in away.json()["detail"]
    folder = folder_of(services, job_id)
    verdict = convert(ask("POST", f"/v1/jobs/{job_id}/verify").json(), AuditVerdict)
    (record,) = services.jobs.audit(job_id)
    assert record_digest(record)
    assert (verdict.verified, verdict.records, verdict.rewinds, verdict.gaps) == (True, 1, 1, ())
    version = folder.weights_of(0)
    version.mkdir(parents=True)
    (version / "weights-00001-of-00001.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    verdict = convert(ask("POST", f"/v1/jobs/{job_id}/verify").json(), AuditVerdict)
    assert (verdict.verified, verdict.digests_recomputed) == (False, 1)
    assert verdict.gaps[0].startswith(f"{job_id}/weights/v000000: the files have digest")
    (version / "weights-00001-of-00001.safetensors").write_bytes(b"\xff" * 20)
    damaged = ask("POST", f"/v1/jobs/{job_id}/verify")
    assert damaged.status_code == 502
    assert damaged.json()["detail"] == "cannot be read: Error while deserializing header: header too large"


def test_a_verification_says_which_weights_it_does_not_see(ask: Ask, services: Services, tmp_path: Path) -> None:
    services.settings = msgspec.structs.replace(services.settings, weight_root=str(tmp_path / "elsewhere"))
    job_id = rig.submit(ask)
    rewound(services, job_id)
    folder_of(services, job_id)
    (note,) = convert(ask("POST", f"/v1/jobs/{job_id}/verify").json(), AuditVerdict).notes
    assert str(tmp_path / "elsewhere") in note


def test_verifications_are_bounded_in_number_and_time(
    ask: Ask, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = rig.submit(ask)
    monkeypatch.setattr(verification, "RUNNING", {*range(verification.MAX_AT_ONCE)})
    busy = ask("POST", f"/v1/jobs/{job_id}/verify")
    assert (busy.status_code, busy.json()["field"], busy.headers["Retry-After"]) == (503, "verify", "2")
    monkeypatch.undo()
    services.settings = msgspec.structs.replace(services.settings, verify_timeout_s=0.01)
    late = ask("POST", f"/v1/jobs/{job_id}/verify")
    assert (late.status_code, late.json()["field"]) == (504, "verify")
    assert set() == verification.RUNNING


def test_a_check_that_the_kernel_ends_is_answered_with_the_cure(
    ask: Ask, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "COMMAND", ("bash", "-c", "kill -9 $$"))
    answer = ask("POST", f"/v1/jobs/{rig.submit(ask)}/verify")
    assert (answer.status_code, answer.json()["detail"]) == (503, "the process of the check was killed by signal 9")
    assert "memory" in answer.json()["cure"]
    monkeypatch.setattr(verification, "COMMAND", ("bash", "-c", "exit 1"))
    assert ask("POST", f"/v1/jobs/{rig.submit(ask)}/verify").status_code == 503


def test_a_check_ends_with_the_client_that_asked_for_it(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "pid"
    script = f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 600"
    monkeypatch.setattr(verification, "COMMAND", ("bash", "-c", script))
    job_id, _ = services.jobs.create(job_spec())
    head = f"Host: localhost\r\nAuthorization: Bearer {rig.KEY}\r\n"
    with rig.serving(services) as url:
        request = f"POST /v1/jobs/{job_id}/verify HTTP/1.1\r\n{head}\r\n"
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as client:
            client.sendall(request.encode())
            until(started.exists, "the check")
            assert len(verification.RUNNING) == 1
        until(lambda: not psutil.pid_exists(int(started.read_text())), "its end")
        until(lambda: not verification.RUNNING, "room for another")


def test_verifications_run_beside_each_other_on_a_real_server(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    rewound(services, job_id)
    folder_of(services, job_id)
    key = {"Authorization": f"Bearer {rig.KEY}"}
    with rig.serving(services) as url, httpx.Client(base_url=url, headers=key) as http, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: http.post(f"/v1/jobs/{job_id}/verify", timeout=300), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
