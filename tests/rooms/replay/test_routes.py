"""The rollout browser's data: what a gateway answers of the records in a run folder, whatever stands there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32
from contracts.encoding.wire import encode_json
from contracts.rollouts import batch_digest
from contracts.run_folder import RunFolder
from gateway.api import rollouts as routes
from gateway.services import Services
from gateway.views.batch_view import place_of
from onbeat.recording.files import INDEX, RecordedFiles
from tests.builders import batch_of, job_spec, rollout, stub_model
from tests.integration.test_gateway import ask, services, submit  # noqa: F401
from tests.recorded import HOSTILE, record_of, recorded

Ask = Callable[..., httpx.Response]


def test_a_recorded_batch_is_shown_token_by_token_with_what_the_trainer_made_of_it(
    ask: Ask,  # noqa: F811
    services: Services,  # noqa: F811
) -> None:
    job_id = submit(ask, recording={})
    record = record_of(job_id, "3/train/1", text=HOSTILE)
    recorded(services, job_id, record, deviation=0.5)
    view = ask("GET", f"/v1/jobs/{job_id}/rollouts/3/train/1").json()
    first, second = view["groups"][0]["completions"]
    assert (view["batch_digest"], view["can_sample_again"], view["why_not"]) == (record.batch_digest, True, "")
    assert view["groups"][0]["prompt_text"] == f"12+34={HOSTILE}"
    assert (first["text"], first["pieces"], first["sampled"]) == (HOSTILE, ["4", HOSTILE], [True, True])
    assert (first["generator_logprobs"], first["trainer_logprobs"]) == ([-1.0, -1.0], [-0.5, -0.25])
    assert (first["advantage"], first["turns"], first["stop"]) == (1.0, None, None)
    assert (second["pieces"], second["trainer_logprobs"], second["advantage"]) == (["[6]"], [None], -1.0)


def test_a_row_has_its_columns_but_those_of_several_numbers_a_token(
    ask: Ask,  # noqa: F811
    services: Services,  # noqa: F811
) -> None:
    algorithm = {"advantage": "none", "distillation_coefficient": 1.0, "distillation_beta": 0.5}
    stub_model(Path(services.settings.model_root) / "teacher")
    stages = [{"type": "teacher", "model": "teacher", "top_k": 1}]
    job_id = submit(ask, recording={}, algorithm=algorithm, stages=stages)
    record = record_of(job_id, "0/train/0")
    columns = {
        "teacher_logprobs": tuple(pack_float32([-2.0] * rows) for rows in (2, 1)),
        "teacher_top": tuple(pack_float32([5.0, -1.0, -0.5] * rows) for rows in (2, 1)),
    }
    recorded(services, job_id, replace(record, batch=replace(record.batch, columns=columns)))
    view = ask("GET", f"/v1/jobs/{job_id}/rollouts/0/train/0").json()
    assert view["groups"][0]["completions"][0]["columns"] == {"teacher_logprobs": [-2.0, -2.0]}


def test_iterations_are_listed_newest_first_and_page_by_page(ask: Ask, services: Services) -> None:  # noqa: F811
    job_id = submit(ask, recording={"share": 0.5})
    files = recorded(services, job_id, *(record_of(job_id, f"{number}/train/0") for number in (1, 2, 10)))
    first = ask("GET", f"/v1/jobs/{job_id}/rollouts?limit=2").json()
    assert [one["iteration"] for one in first["iterations"]] == [10, 2]
    assert first["recording"]["share"] == 0.5
    assert first["bytes"] == sum(path.stat().st_size for path in files.path.glob("*/*"))
    rest = ask("GET", f"/v1/jobs/{job_id}/rollouts?limit=2&before=2").json()
    assert [one["iteration"] for one in rest["iterations"]] == [1]


@pytest.mark.parametrize("says", [None, {"share": 0, "evaluations": False}])
def test_a_job_that_records_nothing_says_so(ask: Ask, says: object) -> None:  # noqa: F811
    job_id = submit(ask, recording=says)
    answer = ask("GET", f"/v1/jobs/{job_id}/rollouts")
    assert answer.json() == {"recording": None, "bytes": 0, "iterations": [], "damaged": []}
    assert ask("GET", f"/v1/jobs/{job_id}/rollouts/0/train/0").status_code == 404


def test_a_folder_that_cant_be_read_is_said_so(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def refused(_files: RecordedFiles) -> list[int]:
        raise PermissionError(errno.EACCES, "Permission denied")

    job_id = submit(ask, recording={})
    monkeypatch.setattr(RecordedFiles, "iterations", refused)
    for path in ("rollouts", "rollouts/search?text=x"):
        answer = ask("GET", f"/v1/jobs/{job_id}/{path}")
        assert answer.status_code == 503
        assert "Permission denied" in answer.text


def test_damaged_and_foreign_files_are_named_and_hide_nothing_else(
    ask: Ask,  # noqa: F811
    services: Services,  # noqa: F811
    tmp_path: Path,
) -> None:
    job_id = submit(ask, recording={})
    files = recorded(services, job_id, *(record_of(job_id, f"{number}/train/0") for number in range(5)))
    (files.folder_of(4) / INDEX).write_bytes(b"\x93garbage")
    files.path_of("3/train/0").write_bytes(files.path_of("2/train/0").read_bytes())
    files.path_of("2/train/0").unlink()
    files.path_of("2/train/0").symlink_to(tmp_path / "elsewhere")
    files.path_of("1/train/0").unlink()
    os.mkfifo(files.path_of("1/train/0"))
    files.path_of("0/train/1").mkdir()
    listed = ask("GET", f"/v1/jobs/{job_id}/rollouts").json()
    assert [one["iteration"] for one in listed["iterations"]] == [3, 2, 1, 0]
    assert [line.partition(":")[0] for line in listed["damaged"]] == ["rollouts/i000004/iteration.msgpack"]
    for name in ("3/train/0", "2/train/0", "1/train/0", "0/train/1"):
        answer = ask("GET", f"/v1/jobs/{job_id}/rollouts/{name}")
        assert answer.status_code == 502, name
        assert answer.json()["field"].startswith(f"rollouts/i00000{name[0]}/train-00000")
    assert ask("GET", f"/v1/jobs/{job_id}/rollouts/0/train/0").status_code == 200


@pytest.mark.parametrize("path", ["0/train/-1", "0/other/0", "0/train/1e3", "99999999999/train/0", "..%2f/train/0"])
def test_what_is_no_batchs_address_is_refused(ask: Ask, path: str) -> None:  # noqa: F811
    assert ask("GET", f"/v1/jobs/{submit(ask)}/rollouts/{path}").status_code in (404, 422)


def test_a_search_finds_prompts_and_completions_newest_first_and_keeps_its_limit(
    ask: Ask,  # noqa: F811
    services: Services,  # noqa: F811
) -> None:
    job_id = submit(ask, recording={})
    records = [record_of(job_id, f"{number}/train/0", text=f"the Answer is {number}") for number in range(3)]
    files = recorded(services, job_id, *records)
    files.path_of("1/train/0").write_bytes(b"torn")
    found = ask("GET", f"/v1/jobs/{job_id}/rollouts/search", params={"text": "answer IS"}).json()
    assert [(one["batch_id"], one["sample"]) for one in found["texts"]] == [("2/train/0", 0), ("0/train/0", 0)]
    assert (found["searched_iterations"], found["is_complete"]) == (3, True)
    one = ask("GET", f"/v1/jobs/{job_id}/rollouts/search", params={"text": "onerror", "limit": 1}).json()
    assert (len(one["texts"]), one["texts"][0]["sample"], one["is_complete"]) == (1, -1, False)
    assert HOSTILE in one["texts"][0]["excerpt"]
    assert ask("GET", f"/v1/jobs/{job_id}/rollouts/search").status_code == 422


def test_an_excerpt_has_what_was_found_where_folding_makes_a_text_longer(
    ask: Ask,  # noqa: F811
    services: Services,  # noqa: F811
) -> None:
    job_id = submit(ask, recording={})
    recorded(
        services, job_id, record_of(job_id, "1/train/0", text="\N{LATIN SMALL LETTER SHARP S}" * 500 + " Needle end")
    )
    found = ask("GET", f"/v1/jobs/{job_id}/rollouts/search", params={"text": "needle"}).json()
    (one,) = [one for one in found["texts"] if one["sample"] == 0]
    assert one["excerpt"].endswith(" Needle end")
    assert [place_of("ss", "xSs"), place_of("e", "\N{LATIN SMALL LETTER SHARP S}e"), place_of("q", "e")] == [1, 1, -1]


def test_searches_are_few_at_a_time_and_a_record_too_large_to_show_is_not_read(
    ask: Ask,  # noqa: F811
    services: Services,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = submit(ask, recording={})
    recorded(services, job_id, record_of(job_id, "1/train/0"))
    path = f"/v1/jobs/{job_id}/rollouts"
    for _ in range(routes.MAX_SEARCHES):
        assert routes.SEARCHES.acquire(blocking=False)
    assert ask("GET", f"{path}/search", params={"text": "46"}).status_code == 503
    routes.SEARCHES.release(routes.MAX_SEARCHES)
    assert len(ask("GET", f"{path}/search", params={"text": "46"}).json()["texts"]) == 1
    monkeypatch.setattr(routes, "MAX_SHOWN_BYTES", 100)
    answer = ask("GET", f"{path}/1/train/0")
    assert (answer.status_code, answer.json()["detail"]) == (502, "cannot be read: is over 100 bytes")
    assert ask("GET", f"{path}/search", params={"text": "46"}).json()["texts"] == []


def test_what_cant_be_sampled_again_says_why(ask: Ask, services: Services) -> None:  # noqa: F811
    job_id = submit(ask, recording={})
    recorded(services, job_id, record_of(job_id, "3/train/1"))
    (RunFolder(services.settings.run_root_path, job_id).weights_of(0) / "weights.safetensors").unlink()
    view = ask("GET", f"/v1/jobs/{job_id}/rollouts/3/train/1").json()
    assert not view["can_sample_again"]
    assert view["why_not"].startswith("version 0 is not kept")
    uncommitted = submit(ask, recording={})
    files = recorded(services, uncommitted, record_of(uncommitted, "3/train/1"))
    (files.folder_of(3) / INDEX).unlink()
    assert "isn't committed yet" in ask("GET", f"/v1/jobs/{uncommitted}/rollouts/3/train/1").json()["why_not"]
    loose = submit(ask, recording={}, deterministic=False)
    recorded(services, loose, record_of(loose, "3/train/1"))
    assert "not deterministic" in ask("GET", f"/v1/jobs/{loose}/rollouts/3/train/1").json()["why_not"]


def test_a_spec_without_recording_has_the_bytes_that_it_always_had() -> None:
    assert b"recording" not in encode_json(job_spec())
    assert b"recording" in encode_json(job_spec(recording={}))


def test_a_piece_that_comes_a_million_times_is_not_made_into_gigabytes_of_text(
    ask: Ask,  # noqa: F811
    services: Services,  # noqa: F811
) -> None:
    job_id = submit(ask, recording={})
    tokens = [4] * 100_000
    long = replace(rollout(tokens, 1.0), text="x")
    batch = batch_of([([3], [long, replace(long, text="y")])], job_id=job_id, batch_id="4/train/0", iteration=4)
    bomb = replace(
        record_of(job_id, "4/train/0"),
        batch=batch,
        batch_digest=batch_digest(batch),
        trainer_logprobs=(None, None),
        pieces=("z" * 10_000, "5"),
    )
    recorded(services, job_id, bomb)
    answer = ask("GET", f"/v1/jobs/{job_id}/rollouts/4/train/0")
    assert answer.status_code == 502
    assert "its text has 2,000,000,000 characters, of which at most 33,554,432 are shown" in answer.json()["detail"]
    found = ask("GET", f"/v1/jobs/{job_id}/rollouts/search?text=zzz").json()
    assert found["texts"] == []


def test_a_list_reads_a_bounded_part_of_the_indexes_and_goes_on_before_it(
    ask: Ask,  # noqa: F811
    services: Services,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = submit(ask, recording={})
    for number in range(4):
        recorded(services, job_id, record_of(job_id, f"{number}/train/0"))
    size = RecordedFiles(RunFolder(services.settings.run_root_path, job_id)).index_bytes(3)
    monkeypatch.setattr(routes, "MAX_LISTED_BYTES", 2 * size)
    listed = ask("GET", f"/v1/jobs/{job_id}/rollouts").json()
    assert [one["iteration"] for one in listed["iterations"]] == [3, 2]
    monkeypatch.setattr(routes, "MAX_LISTED_BYTES", 1)
    listed = ask("GET", f"/v1/jobs/{job_id}/rollouts?before=2").json()
    assert [one["iteration"] for one in listed["iterations"]] == [1]
