"""An engine of vLLM that computes wrongly is refused at the first version where it does, and an honest one never is.

The trainer's own forward measures each version's probe, a fence on a real server judges, and the fault is put between
the loader's digest and the model, by a worker extension of these tests (tampering_loader.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace

from broker.connection.client import Broker
from contracts.encoding.arrays import unpack_int32
from contracts.engines import OpenaiOptions
from contracts.errors import WeightsRejected
from contracts.probes import ProofVerdict
from contracts.spec.job import ModelSpec
from onbeat.stack.ports import free_port
from producer.engine.base import GenerationEngine
from producer.engine.batching import SCORED_MARK
from producer.engine.http import openai
from producer.engine.vllm import extension
from tests.builders import engine_setup
from tests.contract.engine_rigs import VLLM_OPTIONS, engine_of, need_vllm, start_vllm_server, vllm_folder
from tests.rooms.engines.probed_job import ProbedJob
from tests.rooms.engines.tampering_loader import CLASS as TAMPERING_LOADER
from tests.vllm_families import FAMILIES, vllm_family_folder

T = TypeVar("T")
STEP = 0.001
"""Standard deviation of a step, a hundredth of the weights' own: what few optimizer's steps move in one iteration."""
LARGE_STEP = 0.02
DENSE_FAULTS = (
    "a matrix dropped",
    "a norm dropped",
    "embedding dropped",
    "the version before",
    "the first version",
    "gate and up swapped",
    "keys and values swapped",
    "two layers swapped",
    "a layer scaled",
    "adapters without their scale",
    "cast twice",
    "not finite",
    "another rotary base",
    "buffers forgotten",
)
EXPERT_FAULTS = ("two experts swapped", "an expert dropped", "a router dropped", "experts not packed again")
CASES = [
    *(("llama", fault) for fault in DENSE_FAULTS),
    *(("qwen3_moe", fault) for fault in (*EXPERT_FAULTS, "the version before", "cast twice")),
    ("qwen3", "tied head left old"),
    ("qwen3", "a layer scaled"),
]
GROSS_FAULTS = (
    "the version before",
    "embedding dropped",
    "gate and up swapped",
    "keys and values swapped",
    "two layers swapped",
    "adapters without their scale",
    "cast twice",
    "not finite",
    "another rotary base",
    "buffers forgotten",
)
"""Faults that are larger than what bfloat16 rounds."""

ROUTED_FAULTS = (
    "experts not packed again",
    "the version before",
    "gate and up swapped",
    "keys and values swapped",
    "two layers swapped",
    "not finite",
    "buffers forgotten",
)
"""Faults that are larger than what a router's choice makes of bfloat16's rounding."""


@dataclass
class Tampered:
    """An engine whose workers may be told to compute wrongly, and the folder of its model and its versions."""

    engine: GenerationEngine
    folder: Path
    dtype: str
    runner: asyncio.Runner
    version: int = 0
    """The number of the next version; an engine is shared by jobs."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def tamper(self, fault: str, *, place: str = "") -> None:
        engine: Any = self.engine
        call = getattr(engine, "_on_each_worker", None) or engine._call
        self.run(call("tamper", fault, place))

    def job(self, broker: Broker) -> ProbedJob:
        """A job whose version 0 the engine has shown."""
        job = ProbedJob(broker, self.folder, self.folder.parent / "runs", dtype=self.dtype)
        self.tamper("")
        assert job.verdict(self.runner, self.engine, job.publish(0)).outcome == "proved"
        return job

    def next_verdict(self, job: ProbedJob, number: int, *, step: float) -> ProofVerdict:
        job.step(number, step)
        return job.verdict(self.runner, self.engine, job.publish(number))


Start = Callable[..., Tampered]


def model_folder(root: Path, model: str) -> Path:
    return vllm_family_folder(root, model) if model in FAMILIES else vllm_folder(root, model)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts an engine of each model and dtype at its first use, since that takes long."""
    need_vllm()
    tampered: dict[tuple[str, str], Tampered] = {}

    def engine_for(model: str, dtype: str = "float32") -> Tampered:
        if (model, dtype) not in tampered:
            root = tmp_path_factory.mktemp("vllm")
            folder = model_folder(root, model)
            setup = engine_setup(root, root / "runs", model=ModelSpec(path=folder.name, dtype=dtype))  # type: ignore[arg-type]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(extension, "CLASS", TAMPERING_LOADER)
                engine = engine_of(VLLM_OPTIONS, setup)
            tampered[model, dtype] = Tampered(engine, folder, dtype, asyncio.Runner())
        return tampered[model, dtype]

    yield engine_for
    for each in tampered.values():
        each.run(each.engine.aclose())
        each.runner.close()


def assert_refused_at_once(tampered: Tampered, job: ProbedJob, fault: str, *, step: float, place: str = "") -> None:
    """The version with the fault is refused, and an honest one behind it is proved."""
    tampered.tamper(fault, place=place)
    verdict = tampered.next_verdict(job, 1, step=step)
    assert verdict.outcome in ("far", "stale", "not_finite"), verdict
    if fault == "not finite":
        assert verdict.outcome == "not_finite"
    assert job.generator.claim(10.0) is None, "no iteration is open"
    tampered.tamper("")
    verdict = tampered.next_verdict(job, 2, step=step)
    assert verdict.outcome == "proved", verdict


@pytest.mark.parametrize(("model", "fault"), CASES)
def test_an_engine_that_computes_wrongly_in_float32_is_refused_at_the_first_version(
    start: Start, broker: Broker, model: str, fault: str
) -> None:
    tampered = start(model)
    assert_refused_at_once(tampered, tampered.job(broker), fault, step=STEP)


@pytest.mark.parametrize("fault", GROSS_FAULTS)
def test_an_engine_that_computes_wrongly_in_bfloat16_is_refused_where_it_is_further_off_than_what_that_rounds(
    start: Start, broker: Broker, fault: str
) -> None:
    tampered = start("llama", "bfloat16")
    assert_refused_at_once(tampered, tampered.job(broker), fault, step=LARGE_STEP)


@pytest.mark.parametrize("fault", ROUTED_FAULTS)
def test_a_mixture_of_experts_in_bfloat16_is_refused_where_it_is_further_off_than_tokens_of_other_experts_are(
    start: Start, broker: Broker, fault: str
) -> None:
    tampered = start("qwen3_moe", "bfloat16")
    assert_refused_at_once(tampered, tampered.job(broker), fault, step=LARGE_STEP)


def test_an_engine_that_stays_at_the_version_before_is_refused_as_stale_where_rounding_hides_how_far_it_is(
    start: Start, broker: Broker
) -> None:
    tampered = start("llama", "bfloat16")
    job = tampered.job(broker)
    tampered.tamper("the version before")
    verdict = tampered.next_verdict(job, 1, step=STEP)
    assert (verdict.outcome, verdict.can_tell) == ("stale", True)
    assert verdict.share < 0.2


def test_what_a_wrapper_renames_is_refused_before_there_is_anything_to_prove(start: Start, broker: Broker) -> None:
    tampered = start("llama")
    job = tampered.job(broker)
    tampered.tamper("renamed by a wrapper")
    job.step(1, STEP)
    manifest = job.publish(1)
    with pytest.raises(WeightsRejected, match="version 1: vLLM's model can't take it"):
        tampered.run(tampered.engine.load_weights(manifest))
    assert tampered.engine.policy_version is None


def test_what_a_sleep_has_lost_is_refused_as_the_same_version_is_shown_again(start: Start, broker: Broker) -> None:
    tampered = start("llama")
    job = tampered.job(broker)
    job.step(1, STEP)
    manifest = job.publish(1)
    assert job.verdict(tampered.runner, tampered.engine, manifest).outcome == "proved"
    engine: Any = tampered.engine
    tampered.run(engine._on_each_worker("forget"))
    assert job.proved(tampered.runner, tampered.engine, manifest).outcome == "far"
    tampered.tamper("buffers forgotten")
    tampered.tamper("")
    assert job.proved(tampered.runner, tampered.engine, manifest).outcome == "proved"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_honest_versions_of_small_steps_are_each_proved(start: Start, broker: Broker, dtype: str) -> None:
    tampered = start("qwen3_moe", dtype)
    job = tampered.job(broker)
    for number in range(1, 51):
        verdict = tampered.next_verdict(job, number, step=1e-4)
        assert verdict.outcome == "proved", (number, verdict)


def test_of_a_marked_row_the_last_tokens_alone_are_scored_with_the_log_probs_that_vllm_has_of_whole_rows(
    start: Start, broker: Broker
) -> None:
    tampered = start("llama")
    job = tampered.job(broker)
    manifest = job.publish(1)
    tampered.run(tampered.engine.load_weights(manifest))
    assert manifest.probe
    for row in manifest.probe.rows[:2]:
        tokens = list(unpack_int32(row.prompt + row.scored))
        whole = tampered.run(prompt_logprobs(tampered.engine, tokens, {}))
        marked = tampered.run(prompt_logprobs(tampered.engine, tokens, {SCORED_MARK: 3}))
        assert 0.0 not in whole
        assert marked[:-3] == [0.0] * (len(tokens) - 4), "the head has computed nothing for them"
        assert marked[-3:] == pytest.approx(whole[-3:], abs=1e-5)


async def prompt_logprobs(engine: Any, tokens: list[int], marks: dict[str, int]) -> list[float]:
    """Returns vLLM's own answer for all tokens of a prompt but the first."""
    params = engine._vllm.SamplingParams(
        max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False, extra_args=marks
    )
    final: Any = None
    async for output in engine._llm.generate({"prompt_token_ids": tokens}, params, request_id=f"test {marks}"):
        final = output
    return [of_token[token].logprob for token, of_token in zip(tokens[1:], final.prompt_logprobs[1:], strict=True)]


def test_a_server_answers_the_same_log_probs_whether_it_scores_the_last_tokens_or_all(
    broker: Broker, server: Tampered, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = server.job(broker)
    manifest = job.publish(1)
    server.run(server.engine.load_weights(manifest))
    assert manifest.probe
    marked = np.frombuffer(server.run(server.engine.logprobs(manifest.probe.rows)), dtype="<f4")
    monkeypatch.setattr(openai, "SCORED_MARK", "unknown")
    whole = np.frombuffer(server.run(server.engine.logprobs(manifest.probe.rows)), dtype="<f4")
    assert marked.tolist() == pytest.approx(whole.tolist(), abs=1e-5)


@pytest.mark.parametrize("fault", ["the version before", "a layer scaled", "tied head left old"])
def test_a_server_that_computes_wrongly_is_refused_at_the_first_version(
    tmp_path: Path, broker: Broker, server: Tampered, fault: str
) -> None:
    assert_refused_at_once(server, server.job(broker), fault, step=STEP)


WORKERS = {"part": {"tensor_parallel_size": 2}, "copy": {"data_parallel_size": 2}}


@pytest.mark.parametrize("of", WORKERS)
def test_one_worker_of_two_that_computes_wrongly_is_refused_at_the_first_version(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    need_vllm()
    folder = vllm_folder(tmp_path, "llama")
    monkeypatch.setattr(extension, "CLASS", TAMPERING_LOADER)
    options = replace(VLLM_OPTIONS, timeout_s=300.0, **WORKERS[of])
    engine = engine_of(options, engine_setup(tmp_path, tmp_path / "runs", model=ModelSpec(path=folder.name)))
    tampered = Tampered(engine, folder, "float32", asyncio.Runner())
    try:
        assert_one_worker_is_refused(tampered, broker, of)
    finally:
        tampered.run(engine.aclose())
        tampered.runner.close()


def test_one_copy_of_two_behind_a_server_that_computes_wrongly_is_refused_at_the_first_version(
    tmp_path: Path, broker: Broker
) -> None:
    need_vllm()
    with served(tmp_path, num_copies=2) as tampered:
        assert_one_worker_is_refused(tampered, broker, "copy")


def assert_one_worker_is_refused(tampered: Tampered, broker: Broker, of: str) -> None:
    for number in (0, 1):
        place = f"{of} {number}"
        assert_refused_at_once(tampered, tampered.job(broker), "the version before", step=STEP, place=place)
        job = tampered.job(broker)
        tampered.tamper("a matrix dropped", place=place)
        job.step(1, STEP)
        manifest = job.publish(1)
        tampered.run(tampered.engine.load_weights(manifest))
        assert manifest.probe
        of_copies = tampered.run(tampered.engine.logprobs_of_copies(manifest.probe.rows))
        verdicts = [job.generator.prove(manifest, logprobs, kind="engine").outcome for logprobs in of_copies]
        expected = ["far"] if of == "part" else ["proved", "proved"]
        expected[number if of == "copy" else 0] = "far"
        assert verdicts == expected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tampered]:
    """A server of vLLM with the extension of these tests."""
    need_vllm()
    with served(tmp_path_factory.mktemp("server")) as tampered:
        yield tampered


@contextmanager
def served(root: Path, *, num_copies: int = 1) -> Iterator[Tampered]:
    """Starts a server, and an engine that asks it."""
    folder = vllm_folder(root, "qwen3")
    url = f"http://127.0.0.1:{free_port()}"
    process = start_vllm_server(folder, url, root / "server.log", loader=TAMPERING_LOADER, num_copies=num_copies)
    try:
        setup = engine_setup(root, root / "runs", model=ModelSpec(path=folder.name))
        tampered = Tampered(
            engine_of(OpenaiOptions(url=url, timeout_s=240.0), setup), folder, "float32", asyncio.Runner()
        )
        yield tampered
        tampered.run(tampered.engine.aclose())
        tampered.runner.close()
    finally:
        process.terminate()
        process.wait(60.0)
