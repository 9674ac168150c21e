"""A run folder is data: what it says of a batch is checked before anything is started, and the answer says why not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.wire import decode_json, encode_json
from contracts.engines import TransformersOptions, VllmOptions
from contracts.errors import Conflict, ContractViolation, NotFound
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.recording.files import INDEX
from onbeat.recording.records import RecordedBatch
from onbeat.replay.__main__ import answer
from onbeat.replay.recorded import Replay, read_from
from producer import wiring
from tests.builders import job_spec
from tests.recorded import record_of, recorded

JOB, BATCH = "job-0123456789ab", "3/train/1"
SPEC = job_spec(recording={}, seed=0, rollout__group_size=2, rollout__prompts_per_batch=1)


def of_spec(**changes: Any) -> RecordedBatch:
    record = record_of(JOB, BATCH)
    sampling = SPEC.rollout.sampling
    asked = replace(record.prompt_batch, seed=SPEC.seed, group_size=SPEC.rollout.group_size, sampling=sampling)
    return replace(record, prompt_batch=replace(asked, **changes))


def folder_of(tmp_path: Path, record: RecordedBatch) -> RunFolder:
    folder = RunFolder(tmp_path, JOB)
    recorded(SimpleNamespace(settings=StackSettings(run_root=str(tmp_path))), JOB, record)  # type: ignore[arg-type]
    folder.spec.write_bytes(encode_json(SPEC))
    return folder


def test_what_is_recorded_is_read_with_its_spec(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, of_spec())
    assert read_from(folder, BATCH) == (SPEC, of_spec())
    with pytest.raises(NotFound, match="is not recorded"):
        read_from(folder, "3/train/2")
    with pytest.raises(NotFound, match="no batch's id"):
        read_from(folder, "../train/2")
    with pytest.raises(NotFound, match="give the stack"):
        read_from(RunFolder(tmp_path, "job-ffffffffffff"), BATCH)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"reserves": (of_spec().prompt_batch.prompts,)},
        {"sampling": replace(SPEC.rollout.sampling, max_new_tokens=SPEC.rollout.sampling.max_new_tokens + 1)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_record_that_asks_for_more_than_its_spec_does_is_not_put_into_an_engine(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path, of_spec(**changes))
    with pytest.raises(ContractViolation, match="of another spec"):
        read_from(folder, BATCH)


def test_a_record_with_larger_groups_than_its_spec_has_is_not_put_into_an_engine(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, of_spec())
    folder.spec.write_bytes(encode_json(replace(SPEC, rollout=replace(SPEC.rollout, group_size=3))))
    with pytest.raises(ContractViolation, match="of another spec"):
        read_from(folder, BATCH)


def test_what_cant_be_sampled_again_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, of_spec())
    index = folder.path / "rollouts" / "i000003" / INDEX
    listed = index.read_bytes()
    index.unlink()
    with pytest.raises(Conflict, match="is not recorded"):
        read_from(folder, BATCH)
    index.write_bytes(listed)
    (folder.weights_of(0) / "weights.safetensors").unlink()
    with pytest.raises(Conflict, match="version 0 is not kept"):
        read_from(folder, BATCH)
    folder.spec.write_bytes(encode_json(replace(SPEC, deterministic=False)))
    with pytest.raises(Conflict, match="not deterministic"):
        read_from(folder, BATCH)


def test_another_kind_of_engine_says_so_instead_of_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "fingerprint_for", lambda *_, **__: "kind a")
    record = replace(of_spec(), engine="kind b")
    for engine, word in ((TransformersOptions(), "kind b"), (VllmOptions(), "vllm serves no deterministic job")):
        asyncio.run(answer(StackSettings(), engine, SPEC, record, tmp_path / "answer"))
        told = decode_json((tmp_path / "answer").read_bytes(), Replay)
        assert (told.recorded_digest, told.digest, told.equal) == (record.batch_digest, "", None)
        assert word in told.reason
        assert "--threads that the job was sampled with" in told.reason
