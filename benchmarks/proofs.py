"""Measures how far engines are from the trainer's log-probs of a version's probe, and what a proof costs.

    .venv-vllm/bin/python -m benchmarks proofs gaps [--versions 25] [--engines transformers vllm] [--families llama …]
    .venv-vllm/bin/python -m benchmarks proofs cost --model 8m|135m|FOLDER [--dtype float32] [--pairs 20]
    python -m benchmarks proofs demo [--pairs 12] [--iterations 50]

`gaps`: honest versions of tiny random models of many families, in float32 and bfloat16, or of a folder. Each version is
the model with every weight moved, whose probe the trainer's own forward measures; the engine loads it and shows its
log-probs to a real fence. The result has, by engine, family and dtype, the largest scaled gap, the largest K3, and what
the fence said of each version.

`cost`: loads of versions into an engine in turn with the proof of each; a prefill, which samples a token behind each of
the probe's rows; the trainer's pass over the probe; and a batch of 32 completions of 32 tokens, which is less than an
iteration samples. Numbers are of the clock, and of the processor time of this process and its descendants, which other
work on the machine disturbs less. Proof and prefill come first in turn: what comes first after a load finds nothing
in the caches. Each ratio is of neighbours.

`demo`: jobs as the demo with and without probes in turn, in one stack. A job's number is the processor time of an
iteration, of all processes of the stack but the gateway, whose time follows the wall clock; the first iterations aren't
counted. Each ratio is of neighbours.

`--device cuda` puts the trainer's model and the transformers engine on the GPU. vLLM takes the device of its build.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import truediv
from pathlib import Path
from typing import Any

import psutil
import torch
from msgspec.structs import replace

from benchmarks._random_models import make_8m, make_135m
from benchmarks._results import REPOSITORY, write_result
from broker.connection.client import connect
from contracts.encoding.arrays import ITEM_BYTES
from contracts.engines import Engine, TransformersOptions, VllmOptions
from contracts.errors import OnbeatError, first_line
from contracts.jobs import JobState
from contracts.rollouts import Prompt
from contracts.run_folder import RunFolder
from contracts.sampling import SamplingParams
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec, ModelSpec
from contracts.versions import WeightManifest
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.stack.options import StackOptions
from onbeat.stack.redis import EmbeddedRedis
from onbeat.stack.stack import EmbeddedStack
from producer.engine.base import GenerationEngine
from producer.engine.factory import engine_class
from tests.builders import engine_setup, prompt_batch
from tests.contract.engine_rigs import vllm_folder
from tests.rooms.engines.probed_job import PROMPTS, ProbedJob
from tests.vllm_families import FAMILIES, vllm_family_folder

DENSE = ("llama", "qwen3")
WITHOUT_TORCHVISION = tuple(family for family in FAMILIES if family not in ("qwen3_5", "qwen3_vl"))
DTYPES = ("float32", "bfloat16")
OPTIONS: dict[str, Engine] = {
    "transformers": TransformersOptions(),
    "vllm": VllmOptions(kv_cache_mb=64, timeout_s=300.0),
}
STEP = 0.002
"""Standard deviation of what each weight is moved by: the models' own is 0.1."""
RANDOM_MODELS: dict[str, Callable[[Path], None]] = {"8m": make_8m, "135m": make_135m}
CONTEXT_TOKENS = 128
SAMPLING = SamplingParams(max_new_tokens=32)
DEMO = REPOSITORY / "configs/demo.toml"
MEASURED = ("load", "proof", "prefill", "trainer_probe", "sample")
"""What `cost` measures."""
WARM_UP = 5
"""Iterations of a job of `demo` that aren't counted."""
POLL_S = 0.02
JOB_DEADLINE_S = 600.0
COUNTED = ("consumer", "generator-1", "reward_service", "redis")
"""Services whose processor time is counted, with their children."""


@contextmanager
def measured(
    folder: Path, root: Path, engine: str, dtype: str, device: str, **changes: Any
) -> Iterator[tuple[ProbedJob, Any, asyncio.Runner]]:
    """Starts an engine and a fence for a job of a model. changes: of the job's spec."""
    made: Any = engine_class(type(OPTIONS[engine]))
    model_spec = ModelSpec(path=folder.name, dtype=dtype)  # type: ignore[arg-type]
    setup = engine_setup(folder.parent, root / "runs", model=model_spec, context_tokens=CONTEXT_TOKENS, device=device)
    with EmbeddedRedis(root / "redis") as redis, asyncio.Runner() as runner:
        broker = connect(StackSettings(redis_url=redis.url, run_root=str(root)))
        model: GenerationEngine = made(setup, OPTIONS[engine])
        try:
            yield ProbedJob(broker, folder, root / "runs", dtype=dtype, device=device, **changes), model, runner
        finally:
            runner.run(model.aclose())
            broker.close()


def gaps_of(
    folder: Path, engine: str, dtype: str, *, num_versions: int, step: float = STEP, device: str = "cpu"
) -> dict[str, Any]:
    """Proves versions of a model; returns the largest numbers of the verdicts, and how many there are of each."""
    gaps: list[float] = []
    k3: list[float] = []
    outcomes: dict[str, int] = {}
    num_untold = 0
    with (
        tempfile.TemporaryDirectory() as name,
        measured(folder, Path(name), engine, dtype, device) as (job, model, runner),
    ):
        start = job.weights
        for version in range(num_versions):
            if version:
                job.give(start)
                job.step(version, step)
            verdict = job.verdict(runner, model, job.publish(version))
            gaps.append(verdict.gap)
            k3.append(verdict.k3)
            outcomes[verdict.outcome] = outcomes.get(verdict.outcome, 0) + 1
            num_untold += bool(version) and not verdict.can_tell
    return {
        "engine": engine,
        "model": folder.name,
        "dtype": dtype,
        "versions": num_versions,
        "outcomes": outcomes,
        "cant_tell": num_untold,
        "first_gap": gaps[0],
        "median_gap": statistics.median(gaps),
        "largest_gap": max(gaps),
        "largest_k3": max(k3),
    }


def gaps(arguments: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as name:
            if (Path(family) / "config.json").is_file():
                folder = Path(family).resolve()
            else:
                folder = (vllm_folder if family in DENSE else vllm_family_folder)(Path(name), family)
            for engine in arguments.engines:
                for dtype in arguments.dtypes:
                    try:
                        row = gaps_of(
                            folder,
                            engine,
                            dtype,
                            num_versions=arguments.versions,
                            step=arguments.step,
                            device=arguments.device,
                        )
                    except OnbeatError as error:
                        row = {"engine": engine, "model": folder.name, "dtype": dtype, "error": first_line(error)}
                    rows.append(row)
                    print(row, flush=True)
                    # A run of all families takes an hour: the rows so far stay if it ends early.
                    write_result(arguments.name, {"step": arguments.step, "rows": rows})
    return {"step": arguments.step, "rows": rows}


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of some work by the clock, and of the processors."""
    spent_s = _spent_s(os.getpid())
    started = time.perf_counter()
    work()
    return time.perf_counter() - started, _spent_s(os.getpid()) - spent_s


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures pairs of a load and the proof of what was loaded."""
    of: dict[str, list[tuple[float, float]]] = {what: [] for what in MEASURED}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if arguments.model in RANDOM_MODELS:
            folder = root / "models" / arguments.model
            RANDOM_MODELS[arguments.model](folder)
        else:
            folder = Path(arguments.model).resolve()
        changes = {} if arguments.rows is None else {"rollout__probe": {"rows": arguments.rows}}
        device = arguments.device
        with measured(folder, root, arguments.engine, arguments.dtype, device, **changes) as (job, model, runner):
            rows = tokens = 0
            for version in range(1 + arguments.pairs):
                if version:
                    job.step(version, STEP)
                trainer_probe = seconds(lambda: job.probe_now())
                manifest = job.publish(version)
                assert manifest.probe
                rows = len(manifest.probe.rows)
                tokens = len(manifest.probe.rows[0].prompt + manifest.probe.rows[0].scored) // ITEM_BYTES
                load = seconds(lambda: runner.run(model.load_weights(manifest)))  # noqa: B023
                batch = prompt_batch(
                    PROMPTS,
                    policy_version=version,
                    weights_digest=manifest.weights_digest,
                    group_size=8,
                    sampling=SAMPLING,
                )
                prefill = replace(
                    batch,
                    group_size=1,
                    sampling=SamplingParams(max_new_tokens=1),
                    prompts=_rows_as_prompts(manifest),
                )
                works: dict[str, Callable[[], object]] = {
                    "proof": lambda: job.proved(runner, model, manifest),  # noqa: B023
                    "prefill": lambda: runner.run(model.generate(prefill)),  # noqa: B023
                }
                order = list(works) if version % 2 else list(reversed(works))
                measured_s = {what: seconds(works[what]) for what in order}
                measured_s["sample"] = seconds(lambda: runner.run(model.generate(batch)))  # noqa: B023
                measured_s |= {"load": load, "trainer_probe": trainer_probe}
                if version:  # the first one warms up
                    for what in MEASURED:
                        of[what].append(measured_s[what])
            num_parameters = sum(tensor.numel() for tensor in job.weights.values())
    figures: dict[str, Any] = {}
    for number, kind in enumerate(("wall", "processor")):
        values = {what: [pair[number] for pair in pairs] for what, pairs in of.items()}
        figures[kind] = {
            "medians_s": {what: statistics.median(numbers) for what, numbers in values.items()},
            "proof_of": {
                what: statistics.median(map(truediv, values["proof"], values[what]))
                for what in ("load", "prefill", "sample")
            },
            "seconds": values,
        }
    return {
        "engine": arguments.engine,
        "model": folder.name,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "parameters": num_parameters,
        "threads": torch.get_num_threads(),
        "pairs": arguments.pairs,
        "rows": rows,
        "tokens": tokens,
        **figures,
    }


def demo(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures pairs of jobs that differ in their probes alone."""
    settings = [f"iterations={arguments.iterations}", "evaluation.num_prompts=0", *arguments.set]
    sides = {"with": settings, "without": [*settings, "rollout.probe={rows=0}"]}
    of: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    digests: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="proofs-") as scratch:
        options = StackOptions(run_root=Path(scratch), model_root=REPOSITORY, threads=1)
        with EmbeddedStack(options) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
            bench = DemoBench(stack, client, num_iterations=arguments.iterations)
            for pair in range(1 + arguments.pairs):
                # Each side is first in half of the pairs.
                order = list(sides) if pair % 2 else list(reversed(sides))
                for side in order:
                    milliseconds, digest = bench.run(load_spec(DEMO, sides[side]))
                    digests.add(digest)
                    if pair:  # the first one warms up
                        of[side].append(milliseconds)
                if pair:
                    print({side: {who: round(ms, 1) for who, ms in of[side][-1].items()} for side in sides}, flush=True)
                    # A busy machine may end a run early: the pairs so far stay.
                    write_result(arguments.name, compared(of, arguments, num_digests=len(digests)))
    return compared(of, arguments, num_digests=len(digests))


def compared(
    of: Mapping[str, list[dict[str, float]]], arguments: argparse.Namespace, *, num_digests: int
) -> dict[str, Any]:
    """Returns the result of the pairs so far."""
    ratios = {
        what: [run[what] / other[what] for run, other in zip(of["with"], of["without"], strict=True)]
        for what in ("all", "wall")
    }
    return {
        "pairs": len(of["with"]),
        "iterations": arguments.iterations,
        "settings": arguments.set,
        "digests": num_digests,
        "median_ms": {
            side: {who: round(statistics.median(run[who] for run in runs), 2) for who in runs[0]}
            for side, runs in of.items()
        },
        "ratio": {what: _spread(values) for what, values in ratios.items()},
        "milliseconds": dict(of),
    }


def _spread(values: list[float]) -> dict[str, float]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {
        "median": round(statistics.median(values), 4),
        "mean": round(statistics.fmean(values), 4),
        "standard_error": round(error, 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


class DemoBench:
    """Runs jobs on a stack, and reads what its processes spend on them."""

    def __init__(self, stack: EmbeddedStack, client: GatewayClient, *, num_iterations: int) -> None:
        self._stack = stack
        self._client = client
        self._num_iterations = num_iterations

    def run(self, spec: JobSpec) -> tuple[dict[str, float], str]:
        """Runs a job.

        Returns:
            The milliseconds of an iteration by service, `all` of them together and by the `wall` clock; and the digest
            of the job's last weights.
        """
        job_id = self._client.submit(spec, idempotency_key=uuid.uuid4().hex).job_id
        metrics = RunFolder(self._stack.options.run_root.resolve(), job_id).metrics
        begun = self._spent_when(metrics, WARM_UP)
        ended = self._spent_when(metrics, self._num_iterations)
        status = self._client.job(job_id)
        waiting = Waiting(f"job {job_id}", deadline_s=JOB_DEADLINE_S)
        while not status.state.is_final:
            waiting.poke()
            self._stack.tick()
            time.sleep(0.1)
            status = self._client.job(job_id)
        if status.state is not JobState.SUCCEEDED:
            raise RuntimeError(f"job {job_id} {status.state.value}: {status.reason}")
        num_counted = self._num_iterations - WARM_UP
        spent = {who: 1000 * (ended[who] - begun[who]) / num_counted for who in ended}
        spent["all"] = sum(spent[who] for who in COUNTED)
        return spent, status.weights_digest

    def _spent_when(self, metrics: Path, num_iterations: int) -> Mapping[str, float]:
        """Returns what was spent when so many iterations have ended."""
        waiting = Waiting(f"iteration {num_iterations}", deadline_s=JOB_DEADLINE_S)
        while not metrics.is_file() or metrics.read_bytes().count(b"\n") < num_iterations:
            waiting.poke()
            self._stack.tick()
            time.sleep(POLL_S)
        pids = self._stack.pids
        return {"wall": time.perf_counter()} | {who: _spent_s(pids[who]) for who in COUNTED}


def _spent_s(pid: int) -> float:
    """Returns the processor time of a process and its descendants."""
    process = psutil.Process(pid)
    total_s = 0.0
    for member in (process, *process.children(recursive=True)):
        times = member.cpu_times()
        total_s += times.user + times.system
    return total_s


def _rows_as_prompts(manifest: WeightManifest) -> tuple[Prompt, ...]:
    assert manifest.probe
    return tuple(
        Prompt(prompt_id=str(number), index=number, token_ids=row.prompt + row.scored, text="", reference="")
        for number, row in enumerate(manifest.probe.rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    of_gaps = commands.add_parser("gaps")
    of_gaps.add_argument("--versions", type=int, default=25)
    of_gaps.add_argument("--engines", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    of_gaps.add_argument("--families", nargs="+", default=[*DENSE, *WITHOUT_TORCHVISION], help="or a model's folder")
    of_gaps.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    of_gaps.add_argument("--step", type=float, default=STEP)
    of_gaps.add_argument("--name", default="proof-gaps", help="the result's")
    of_cost = commands.add_parser("cost")
    of_cost.add_argument("--model", required=True)
    of_cost.add_argument("--engine", default="vllm", choices=list(OPTIONS))
    of_cost.add_argument("--dtype", default="float32", choices=list(DTYPES))
    of_cost.add_argument("--pairs", type=int, default=20)
    of_cost.add_argument("--rows", type=int, help="of the probe; as a job's by default")
    of_cost.add_argument("--name", default="proof-cost", help="the result's")
    for command in (of_gaps, of_cost):
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    of_demo = commands.add_parser("demo")
    of_demo.add_argument("--pairs", type=int, default=12)
    of_demo.add_argument("--iterations", type=int, default=50)
    of_demo.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of both jobs' spec")
    of_demo.add_argument("--name", default="proof-cost-demo", help="the result's")
    arguments = parser.parse_args()
    measures = {"gaps": gaps, "cost": cost, "demo": demo}
    print(write_result(arguments.name, measures[arguments.what](arguments)))


if __name__ == "__main__":
    main()
