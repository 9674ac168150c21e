"""Weights that are refused: they are read again, and the generator says so meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from broker.presence import RELOAD_PAUSES_S
from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.errors import BrokerUnavailable, EngineUnavailable, InvalidInput, WeightsRejected
from contracts.probes import Probe, ProbeRow, ProofVerdict, bounds_for
from contracts.spec.job import JobSpec, ModelSpec
from contracts.versions import WeightManifest, WeightShard
from producer.served_model import ServedModel
from tests.builders import job_spec
from tests.fakes import EngineShop, LoggedEngine, fake_version, spell


def load(run_root: Path, on_pause: Callable[[int, ServedModel], None], **spec: object) -> ServedModel:
    """Loads version 3 of a job from a cut file; on_pause sees each pause before the next load."""
    manifest = fake_version(run_root, "job", 3)
    path = run_root / manifest.directory / manifest.files[0].name
    path.write_bytes(path.read_bytes()[:-1])
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        on_pause(len(pauses), model)

    model = ServedModel(EngineShop(run_root).make, lambda _model: spell, wait=sleep)

    async def run() -> None:
        try:
            await model.ready_for(job_spec(**spec), manifest)
        finally:
            assert tuple(pauses[:3]) == RELOAD_PAUSES_S[: len(pauses)]

    asyncio.run(run())
    return model


def test_a_version_that_is_repaired_meanwhile_is_loaded(tmp_path: Path) -> None:
    said: list[str] = []

    def repair_at_the_second(pause: int, model: ServedModel) -> None:
        said.append(model.rejected_weights)
        if pause == 2:
            fake_version(tmp_path, "job", 3)

    model = load(tmp_path, repair_at_the_second)
    assert said == ["job/weights/v000003"] * 2
    assert model.rejected_weights == ""
    assert model.loaded is not None
    version = model.loaded.engine.policy_version
    assert version is not None
    assert version.policy_version == 3


def test_a_version_that_stays_damaged_is_refused_with_its_reason(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(WeightsRejected, match=r"v000003.* has \d+ bytes, its manifest \d+"):
        load(tmp_path, lambda _pause, model: said.append(model.rejected_weights))
    assert said == ["job/weights/v000003"] * len(RELOAD_PAUSES_S)


async def test_a_version_that_is_tried_without_a_claim_is_loaded_once_and_said_to_be_refused(tmp_path: Path) -> None:
    shop = EngineShop(tmp_path)
    model = ServedModel(shop.make, lambda model: spell, wait=lambda _: pytest.fail("it is not waited for"))
    manifest = fake_version(tmp_path, "job", 3)
    (tmp_path / manifest.directory / "weights.safetensors").unlink()
    with pytest.raises(WeightsRejected):
        await model.ready_for(job_spec(), manifest, still_needed=lambda: False)
    assert model.rejected_weights == "job/weights/v000003", "its trainer looks after it"
    assert shop.log.count("load 3") == 1
    assert model.loaded is not None
    with pytest.raises(AssertionError, match="not ready"):
        _ = model.loaded.verified


async def test_versions_are_received_for_the_job_whose_version_is_loaded_and_for_no_other(tmp_path: Path) -> None:
    shop = EngineShop(tmp_path)
    model = ServedModel(shop.make, lambda model: spell)
    first, second = (fake_version(tmp_path, "job", number) for number in range(2))
    spec = job_spec(schedule="delayed", max_policy_lag=1, algorithm__correction="none")
    announced: list[list[WeightManifest]] = [[], [fake_version(tmp_path, "other", 1)], [second]]
    assert not await model.receive(spec, [second], ())
    await model.ready_for(spec, first)
    assert [await model.receive(spec, one, ()) for one in announced] == [False, False, True]
    assert [line for line in shop.log if line.startswith("receive")] == ["receive 1"]


async def test_a_model_that_is_not_there_costs_the_one_in_memory_nothing(tmp_path: Path) -> None:
    def detokenizer(model: ModelSpec) -> Any:
        if model.path == "absent":
            raise InvalidInput("no folder", field="model.path")
        return spell

    shop = EngineShop(tmp_path)
    model = ServedModel(shop.make, detokenizer)
    await model.ready_for(job_spec(), fake_version(tmp_path, "job", 0))
    with pytest.raises(InvalidInput):
        await model.ready_for(job_spec(model__path="absent"), fake_version(tmp_path, "other", 0))
    await model.ready_for(job_spec(), fake_version(tmp_path, "job", 0))
    assert shop.log.count("open qwen3") == 1


def test_a_version_in_a_redis_that_is_away_for_a_moment_is_loaded_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_weights, outages, said = LoggedEngine.load_weights, [BrokerUnavailable("connection refused")], []

    async def away_at_first(engine: LoggedEngine, weights: WeightManifest | WeightShard) -> None:
        if outages:
            raise outages.pop()
        await load_weights(engine, weights)

    def repair(_pause: int, model: ServedModel) -> None:
        said.append(model.rejected_weights)
        fake_version(tmp_path, "job", 3)

    monkeypatch.setattr(LoggedEngine, "load_weights", away_at_first)
    model = load(tmp_path, repair)
    assert (said, outages) == ([""], []), "nothing is wrong with the version"
    assert model.loaded is not None
    assert model.loaded.engine.policy_version is not None


def test_the_version_that_it_loads_is_named_until_it_is_loaded(tmp_path: Path) -> None:
    """The trainer leaves its files alone meanwhile."""
    said: list[str] = []

    def repair(_pause: int, model: ServedModel) -> None:
        said.extend(model.loading_weights)
        fake_version(tmp_path, "job", 3)

    model = load(tmp_path, repair)
    assert said == ["job/weights/v000003"]
    assert model.loading_weights == ()


async def test_a_load_that_hangs_ends_at_the_jobs_deadline(tmp_path: Path) -> None:
    manifest = fake_version(tmp_path, "job", 3)

    async def for_ever(_seconds: float) -> None:
        await asyncio.Event().wait()

    shop = EngineShop(tmp_path)
    model = ServedModel(shop.make, lambda _model: spell, wait=for_ever)
    (tmp_path / manifest.directory / manifest.files[0].name).unlink()
    with pytest.raises(EngineUnavailable, match=r"loading job/weights/v000003 is not done after 0\.05 s"):
        await model.ready_for(job_spec(timeouts__generation_s=0.05), manifest)
    assert model.loading_weights == ()
    await model.aclose()
    assert shop.log == ["open qwen3", "load 3"], "what hangs cannot be closed"


def threads_of(spec: JobSpec) -> int | None:
    return 4 if spec.schedule == "colocated" else None


async def test_a_colocated_job_has_its_own_number_of_threads_and_the_next_job_the_process_s_again(
    tmp_path: Path,
) -> None:
    shop = EngineShop(tmp_path)
    model = ServedModel(shop.make, lambda _model: spell, threads_for=threads_of)
    colocated, other = job_spec(schedule="colocated"), job_spec()
    for spec, job_id, turn in ((other, "a", ""), (colocated, "b", "b"), (colocated, "b", "b"), (other, "a", "")):
        await model.ready_for(spec, fake_version(tmp_path, job_id, 0))
        assert model.awake_for == turn
    assert [event for event in shop.log if "wake" in event] == ["wake with 4 threads", "wake"]


def test_a_batch_of_another_number_of_threads_waits_until_the_engine_is_free(tmp_path: Path) -> None:
    model = ServedModel(EngineShop(tmp_path).make, lambda _model: spell, threads_for=threads_of)
    manifest = fake_version(tmp_path, "a", 0)
    asyncio.run(model.ready_for(job_spec(), manifest))
    assert model.holds(job_spec(), manifest)
    assert not model.holds(job_spec(schedule="colocated"), manifest)


async def test_an_engine_that_sleeps_wakes_before_it_loads_and_reads_no_version_ahead(tmp_path: Path) -> None:
    shop = EngineShop(tmp_path)
    model = ServedModel(shop.make, lambda _model: spell, threads_for=threads_of)
    spec = job_spec(schedule="colocated")
    path = "job/weights/.v000001.0123456789ab/a.safetensors"
    await model.ready_for(spec, fake_version(tmp_path, "job", 0))
    await model.sleep()
    await model.sleep()
    assert model.awake_for == ""
    await model.load_ahead(WeightShard(policy_version=1, path=path, name="a.safetensors", num_bytes=8))
    await model.ready_for(spec, fake_version(tmp_path, "job", 1))
    assert shop.log[1:] == ["wake with 4 threads", "load 0", "sleep", "wake with 4 threads", "load 1"]


async def test_an_engine_that_hangs_in_its_sleep_ends_at_the_job_s_deadline(tmp_path: Path) -> None:
    model = ServedModel(EngineShop(tmp_path).make, lambda _model: spell, threads_for=threads_of)

    async def for_ever() -> None:
        await asyncio.Event().wait()

    loaded = await model.ready_for(
        job_spec(schedule="colocated", timeouts__generation_s=0.05), fake_version(tmp_path, "job", 0)
    )
    loaded.engine.sleep = for_ever  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailable, match=r"giving memory back is not done after 0\.05 s"):
        await model.sleep()


def test_a_version_with_other_tensors_than_the_model_is_unfit_and_a_cut_file_is_not(tmp_path: Path) -> None:
    """No copy of the first would do: its trainer ends the job where the file is whole."""
    seen: list[tuple[str, str]] = []

    async def sleep(_seconds: float) -> None:
        seen.append((model.rejected_weights, model.unfit_weights))

    model = ServedModel(EngineShop(tmp_path).make, lambda _model: spell, wait=sleep)
    manifest = fake_version(tmp_path, "job", 3)
    path = tmp_path / manifest.directory / manifest.files[0].name
    honest = path.read_bytes()

    async def load(content: bytes) -> None:
        path.write_bytes(content)
        await model.ready_for(job_spec(), manifest)

    for content, why in ((honest[:-1], ""), (honest.replace(b'"scale"', b'"other"'), "version 3 lacks 1 tensors")):
        seen.clear()
        with pytest.raises(WeightsRejected):
            asyncio.run(load(content))
        assert [folder for folder, _ in seen] == ["job/weights/v000003"] * len(RELOAD_PAUSES_S)
        assert all(unfit.startswith(why) and bool(unfit) == bool(why) for _, unfit in seen)
    asyncio.run(load(honest))
    assert (model.rejected_weights, model.unfit_weights) == ("", "")


async def test_an_engine_without_room_for_a_jobs_rows_is_made_anew_for_it_and_then_serves_both(tmp_path: Path) -> None:
    shop = EngineShop(tmp_path)
    model = ServedModel(shop.make, lambda _model: spell)
    small = job_spec(rollout__max_prompt_tokens=16)
    large = job_spec(rollout__max_prompt_tokens=64)
    assert large.longest_row == small.longest_row + 48
    for spec in (small, small, large, small, large):
        await model.ready_for(spec, fake_version(tmp_path, "job", 0))
    assert [line for line in shop.log if line.startswith("open")] == ["open qwen3", "open qwen3"]
    assert shop.rows == [small.longest_row, large.longest_row]


@pytest.mark.parametrize(("wrong_copy", "num_judged"), [(None, 3), (1, 2)])
async def test_a_version_counts_once_each_copy_of_the_model_has_shown_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_copy: int | None, num_judged: int
) -> None:
    model = ServedModel(EngineShop(tmp_path).make, lambda model: spell, engine_kind="vllm")
    rows = (ProbeRow(prompt=pack_int32([5]), scored=pack_int32([6])),)
    bounds = bounds_for("float32", max_gap=UNSET, is_routed=False, is_exact=False)
    probe = Probe(rows=rows, logprobs=pack_float32([-1.0]), bounds=bounds)
    manifest = replace(fake_version(tmp_path, "job", 3), probe=probe)
    loaded = await model.ready_for(job_spec(), manifest)
    of_copies = [pack_float32([-2.0 if copy == wrong_copy else -1.0]) for copy in range(3)]
    judged: list[tuple[bytes, str]] = []

    async def logprobs_of_copies(_rows: object) -> list[bytes]:
        return of_copies

    async def prove(_manifest: WeightManifest, logprobs: bytes, *, kind: str) -> ProofVerdict:
        judged.append((logprobs, kind))
        return ProofVerdict(outcome="proved" if logprobs == probe.logprobs else "far")

    monkeypatch.setattr(loaded.engine, "logprobs_of_copies", logprobs_of_copies)
    verdict = await model.show(loaded, job_spec(), manifest, prove)
    assert judged == [(logprobs, "vllm float32") for logprobs in of_copies[:num_judged]]
    assert verdict.is_proved == model.has_shown(loaded, manifest) == (wrong_copy is None)
