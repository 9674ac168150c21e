"""An engine that computes something else than the trainer does shows nothing, and is refused by name (I11).

Versions are trained by a real learner, loaded by the transformers engine, and judged by the fence's script.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from broker.connection.client import Broker
from contracts.settings import StackSettings
from contracts.versions import WeightManifest
from onbeat.work.proof_failure import proof_failure
from producer.engine.transformers.lean_step import LeanStep
from tests import wrong_engines as wrong
from tests.builders import job_spec, tiny_model_folder
from tests.families import family_folder
from tests.pipeline import REPOSITORY
from tests.proved import ProvedJob, WrongEngine
from tests.wrong_engines import Fault, Tensors

FIRST_BAD = 2
"""The version from which on engines are wrong: two were shown before."""
SUMS = "sums"
QWEN3 = "qwen3"
MOE = "qwen3_moe"
MISTRAL = "mistral"
BIASED = "qwen2"
LORA: dict[str, Any] = {"rank": 4, "alpha": 16.0, "publish": "adapter"}


def without_lora_scale(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Adapters are merged as B · A, without alpha / rank."""
    scaling = LORA["alpha"] / LORA["rank"]
    loaded = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return {
        name: initial[name] + (tensor - initial[name]) / scaling
        for name, tensor in loaded.items()
        if not tensor.equal(initial[name])
    }


KILLERS: list[tuple[Fault, str]] = [
    (wrong.dropped_tensor, QWEN3),
    (wrong.initial_tensor, QWEN3),
    (wrong.version_before, QWEN3),
    (wrong.version_before, MOE),
    (wrong.experts_swapped, MOE),
    (wrong.fewer_experts, MOE),
    (wrong.tied_head_left_old, QWEN3),
    (wrong.layer_scaled, QWEN3),
    (wrong.layer_scaled, MOE),
    (wrong.other_rotary_base, QWEN3),
    (wrong.cast_twice, QWEN3),
    (wrong.attention_off, QWEN3),
    (wrong.attention_off, SUMS),
    (wrong.softmax_scale, QWEN3),
    (wrong.window_ignored, MISTRAL),
    (wrong.norm_epsilon, QWEN3),
    (wrong.embedding_shifted, QWEN3),
    (wrong.cached_keys_left_old, QWEN3),
    (wrong.heads_in_another_order, QWEN3),
    (wrong.layer_left_out, QWEN3),
    (wrong.biases_dropped, BIASED),
]
LASTING = [
    (wrong.experts_swapped, MOE),
    (wrong.layer_scaled, QWEN3),
    (wrong.other_rotary_base, QWEN3),
    (wrong.cast_twice, QWEN3),
    (wrong.attention_off, QWEN3),
    (wrong.softmax_scale, QWEN3),
    (wrong.window_ignored, MISTRAL),
    (wrong.embedding_shifted, QWEN3),
    (wrong.heads_in_another_order, QWEN3),
    (wrong.layer_left_out, QWEN3),
]
"""Faults that stand from the first version on: there is no gap of an honest one to compare theirs with."""
COARSE = [
    (wrong.version_before, SUMS),
    (wrong.other_rotary_base, QWEN3),
    (wrong.embedding_shifted, QWEN3),
    (wrong.heads_in_another_order, QWEN3),
    (wrong.layer_left_out, QWEN3),
    (wrong.fewer_experts, MOE),
]
"""Faults that are larger than what bfloat16 rounds. Two experts that change places in one layer may not be, in 16 bits:
a router may do as much by a rounding."""


def _id(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", "")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model_folder(folder)
    for family in (MOE, MISTRAL, BIASED):
        family_folder(folder, family)
    shutil.copytree(REPOSITORY / "configs/models/two-digit-addition", folder / SUMS)
    return folder


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> WrongEngine:
    return WrongEngine(monkeypatch)


class Jobs:
    def __init__(self, settings: StackSettings, models: Path, broker: Broker) -> None:
        self._settings = replace(settings, model_root=str(models), threads=1)
        self._broker = broker

    @asynccontextmanager
    async def job(self, model: str = QWEN3, **fields: Any) -> AsyncIterator[ProvedJob]:
        # A reward that random models reach now and then.
        reward: dict[str, Any] = {}
        if model != SUMS:
            reward["reward__components"] = [{"type": "regex", "pattern": "[a-m]"}]
        spec = job_spec(
            model__path=model,
            iterations=20,
            optimizer__learning_rate=1e-3,
            rollout__batches_per_iteration=2,
            **(reward | fields),
        )
        job = ProvedJob(spec, self._settings, self._settings.run_root_path, self._broker)
        try:
            yield job
        finally:
            await job.aclose()


@pytest.fixture
def jobs(settings: StackSettings, models: Path, broker: Broker) -> Jobs:
    return Jobs(settings, models, broker)


async def until_first_bad(job: ProvedJob) -> WeightManifest:
    """Shows and trains the versions before FIRST_BAD, which is published and returned."""
    await job.iterate(FIRST_BAD - 1)
    assert all(verdict.is_proved for verdict in job.verdicts)
    return await job.train()


def assert_refused_by_name(job: ProvedJob, manifest: WeightManifest) -> None:
    verdict = job.verdicts[-1]
    assert verdict.outcome in ("far", "stale")
    message = str(proof_failure(verdict, manifest))
    assert f"version {manifest.policy_version} wrongly" in message
    if verdict.outcome == "far":
        assert verdict.gap > verdict.bound
        assert f"{verdict.gap:.2g} from the trainer's at row {verdict.row} of the probe" in message
    assert job.side.claim(30.0) is None  # nothing is open, and nothing was leased


@pytest.mark.parametrize(("fault", "model"), KILLERS, ids=_id)
async def test_what_an_engine_computes_wrongly_is_refused_at_the_first_version(
    jobs: Jobs, engine: WrongEngine, fault: Fault, model: str
) -> None:
    async with jobs.job(model) as job:
        manifest = await until_first_bad(job)
        engine.fault = fault
        await job.shown(manifest)
        assert_refused_by_name(job, manifest)


@pytest.mark.parametrize(("fault", "model"), LASTING, ids=_id)
async def test_what_an_engine_computes_wrongly_from_the_start_is_refused_at_version_0(
    jobs: Jobs, engine: WrongEngine, fault: Fault, model: str
) -> None:
    engine.fault = fault
    async with jobs.job(model) as job:
        manifest = job.begin()
        await job.shown(manifest)
        assert_refused_by_name(job, manifest)


@pytest.mark.parametrize(("fault", "model"), COARSE, ids=_id)
async def test_in_bfloat16_what_is_more_than_its_rounding_is_refused(
    jobs: Jobs, engine: WrongEngine, fault: Fault, model: str
) -> None:
    async with jobs.job(model, model__dtype="bfloat16") as job:
        manifest = await until_first_bad(job)
        engine.fault = fault
        await job.shown(manifest)
        assert_refused_by_name(job, manifest)


async def test_adapters_that_are_merged_without_their_scale_are_refused(jobs: Jobs, engine: WrongEngine) -> None:
    async with jobs.job(trainer__lora=LORA) as job:
        manifest = await until_first_bad(job)
        engine.fault = without_lora_scale
        await job.shown(manifest)
        assert_refused_by_name(job, manifest)


async def test_steps_that_compute_with_weights_packed_for_the_version_before_are_refused(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts go through the model, whose weights are right: only the tokens behind the first scored one are wrong."""
    async with jobs.job() as job:
        manifest = await until_first_bad(job)
        monkeypatch.setattr(LeanStep, "refresh", lambda step: None)
        await job.shown(manifest)
        assert_refused_by_name(job, manifest)


async def test_an_engine_that_loses_its_weights_while_it_sleeps_is_refused_when_it_wakes(
    jobs: Jobs, engine: WrongEngine
) -> None:
    async with jobs.job(schedule="colocated") as job:
        manifest = job.begin()
        assert (await job.shown(manifest)).is_proved
        loaded = await job.ready(manifest)
        assert job.model.has_shown(loaded, manifest)
        await job.model.sleep()
        job.disturb_sleeper()
        loaded = await job.ready(manifest)
        assert not job.model.has_shown(loaded, manifest), "what it held before it slept counts no more"
        await job.show_again(loaded, manifest)
        assert_refused_by_name(job, manifest)


async def test_an_engine_that_is_made_anew_shows_what_the_one_before_could_not(jobs: Jobs, engine: WrongEngine) -> None:
    async with jobs.job() as job:
        manifest = await until_first_bad(job)
        engine.fault = wrong.attention_off
        engine.is_once = True
        assert (await job.shown(manifest)).outcome == "far"
        await job.model.begin_anew()
        assert (await job.shown(manifest)).is_proved
        assert len(engine.models) == 1


async def test_a_version_without_a_probe_has_nothing_to_be_shown(jobs: Jobs, engine: WrongEngine) -> None:
    """`rollout.probe.rows = 0` costs nothing: no row goes through the trainer's model, none through the engine's."""
    engine.fault = wrong.layer_left_out
    async with jobs.job(rollout__probe={"rows": 0}) as job:
        manifest = job.begin()
        loaded = await job.ready(manifest)
        assert job.model.has_shown(loaded, manifest)
        assert job.ranks.num_probes == 0
