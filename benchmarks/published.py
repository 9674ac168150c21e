"""Plans on paper for 8 to 4,096 GPUs, from stage times that others published, beside their published step times.

    onbeat bench published
    onbeat bench published --row "verl 7B, 64"

A row starts from an on-policy run whose stages have all GPUs in turn. Its stages are given to the shares of GPUs that
the asynchronous run had, as if each took GPU-seconds that can be divided at will, and completions of equal length:
nothing is fitted. Where only the sum of the stages is known, generation and training get half of it each, which is the
best case of an asynchronous run. Two rows take the stages as the asynchronous run itself had them. What is not
published is said in each row's note.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from benchmarks._results import REPOSITORY, write_result
from contracts.encoding.wire import convert
from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from onbeat.planning.pipeline.costs import BatchCost, Costs, Machines, Round, StepCost, Waits
from onbeat.planning.predictions import Prediction, predict

NEMO = "NVIDIA-NeMo/RL docs/about/performance-summary.md at 7ea279a, NeMo RL v0.6"
FULLY_ASYNC = "volcengine/verl docs/advance/fully_async.md at ca44f95"
ONE_STEP = "volcengine/verl docs/advance/one_step_off.md at e55d143"
WAVES = 8
"""Batches of a generator in an iteration."""
SCORE_S, ROUND_TRIP_S = 0.05, 0.005
EXPECTED = (
    "ratios above 1 where published stages don't scale with the GPUs, as those of small models and long tails don't; "
    "near 1 where the on-policy run has as many GPUs for each stage as the asynchronous one"
)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds of a step, stage by stage."""

    generate_s: float
    train_s: float
    """Passes of training, and of old log-probs where the asynchronous run makes them too."""
    other_s: float
    """The rest of the step: weights, rewards, waits."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison; seconds are those of a step."""

    source: str
    gpus: int
    on_policy_gpus: int
    """All of them have each stage of the on-policy run."""
    stages: Stages
    gpus_of_generators: int
    gpus_of_one: int
    """GPUs of one generator."""
    tokens: float
    """Sampled ones of a step; 0.0 where they are not published."""
    on_policy_s: float | None
    """Published, on as many GPUs; None where it is not."""
    asynchronous_s: float | None
    lag: int = 1
    is_own: bool = False
    """Whether the stages are those of the asynchronous run itself, on the GPUs that it gave them."""
    note: str


def halves(total_s: float) -> Stages:
    """Stages of which only the sum is published."""
    return Stages(generate_s=total_s / 2, train_s=total_s / 2, other_s=0.0)


ROWS = {
    "on paper, 8": Row(
        source=ONE_STEP,
        gpus=8,
        on_policy_gpus=16,
        stages=Stages(generate_s=321.0, train_s=374.0, other_s=54.0),
        gpus_of_generators=4,
        gpus_of_one=1,
        tokens=0.0,
        on_policy_s=None,
        asynchronous_s=None,
        note="Qwen2.5-Math-7B on H20: the stages of 16 GPUs on 8, nothing of this size is published",
    ),
    "verl 7B, 16": Row(
        source=ONE_STEP,
        gpus=16,
        on_policy_gpus=16,
        stages=Stages(generate_s=321.0, train_s=88.0 + 286.0, other_s=54.0),
        gpus_of_generators=4,
        gpus_of_one=1,
        tokens=0.0,
        on_policy_s=749.0,
        asynchronous_s=520.0,
        note="4 GPUs sample in 458 s what 16 did in 247 to 321 s: a long tail, not GPU-seconds, is most of it",
    ),
    "verl 7B, 16, its own stages": Row(
        source=ONE_STEP,
        gpus=16,
        on_policy_gpus=16,
        stages=Stages(generate_s=458.0, train_s=108.0 + 337.0, other_s=54.0),
        gpus_of_generators=4,
        gpus_of_one=1,
        tokens=0.0,
        on_policy_s=749.0,
        asynchronous_s=520.0,
        is_own=True,
        note="FSDP2; the rest of a step is the on-policy run's",
    ),
    "verl 7B, 16, Megatron's own stages": Row(
        source=ONE_STEP,
        gpus=16,
        on_policy_gpus=16,
        stages=Stages(generate_s=501.0, train_s=120.0 + 347.0, other_s=29.0),
        gpus_of_generators=4,
        gpus_of_one=1,
        tokens=0.0,
        on_policy_s=699.0,
        asynchronous_s=566.0,
        is_own=True,
        note="its stages and its wait add up to 526 s; what the other 40 s are is not published",
    ),
    "verl 7B, 32": Row(
        source=FULLY_ASYNC,
        gpus=32,
        on_policy_gpus=32,
        stages=Stages(generate_s=357.41, train_s=269.80, other_s=55.18),
        gpus_of_generators=16,
        gpus_of_one=1,
        tokens=0.0,
        on_policy_s=790.1,
        asynchronous_s=294.77,
        note="partial rollouts, staleness up to 0.5, no old log-probs; training took 314 s on 16 GPUs, 270 s on 32",
    ),
    "verl 7B, 64": Row(
        source=FULLY_ASYNC,
        gpus=64,
        on_policy_gpus=64,
        stages=Stages(generate_s=150.72, train_s=133.41, other_s=10.89),
        gpus_of_generators=32,
        gpus_of_one=1,
        tokens=0.0,
        on_policy_s=365.28,
        asynchronous_s=189.26,
        note="as above; training took 157 s on 32 GPUs, 133 s on 64",
    ),
    "verl 30B-A3B, 128": Row(
        source=FULLY_ASYNC,
        gpus=128,
        on_policy_gpus=128,
        stages=Stages(generate_s=348.05, train_s=20.86 + 86.27, other_s=13.98),
        gpus_of_generators=96,
        gpus_of_one=4,
        tokens=0.0,
        on_policy_s=497.89,
        asynchronous_s=282.75,
        note="96:32; training took 257 s on 32 GPUs, 107 s on 128",
    ),
    "NeMo-RL 30B-A3B, 32": Row(
        source=NEMO,
        gpus=32,
        on_policy_gpus=32,
        stages=halves(192.0),
        gpus_of_generators=16,
        gpus_of_one=2,
        tokens=2048 * 3201.0,
        on_policy_s=192.0,
        asynchronous_s=152.0,
        note="the sum alone is published, and on all 32 GPUs: half of them need less than twice the time",
    ),
    "NeMo-RL Qwen3-235B, 256": Row(
        source=NEMO,
        gpus=256,
        on_policy_gpus=128,
        stages=halves(395.0),
        gpus_of_generators=128,
        gpus_of_one=8,
        tokens=512 * 5721.0,
        on_policy_s=312.0,
        asynchronous_s=231.0,
        note="the sum on 128 GPUs is published, not its split: 231 s is exact where one stage has 58 % of it",
    ),
    "NeMo-RL DeepSeek-V3, 512": Row(
        source=NEMO,
        gpus=512,
        on_policy_gpus=256,
        stages=halves(134.0),
        gpus_of_generators=256,
        gpus_of_one=32,
        tokens=512 * 710.0,
        on_policy_s=111.0,
        asynchronous_s=64.1,
        note="the sum on 256 GPUs is published, not its split",
    ),
    "NeMo-RL DeepSeek-V3, 256 GB200": Row(
        source=NEMO,
        gpus=256,
        on_policy_gpus=128,
        stages=halves(108.0),
        gpus_of_generators=128,
        gpus_of_one=16,
        tokens=512 * 708.0,
        on_policy_s=98.7,
        asynchronous_s=61.7,
        note="the sum on 128 GPUs is published, not its split",
    ),
    "NeMo-RL Qwen3-235B, 128 GB200": Row(
        source=NEMO,
        gpus=128,
        on_policy_gpus=64,
        stages=halves(286.0),
        gpus_of_generators=64,
        gpus_of_one=8,
        tokens=512 * 5705.0,
        on_policy_s=345.0,
        asynchronous_s=278.0,
        note="its on-policy run is slower on 128 GPUs than on 64, so more than stages that divide is at work",
    ),
    "on paper, 4,096": Row(
        source=NEMO,
        gpus=4096,
        on_policy_gpus=2048,
        stages=halves(134.0),
        gpus_of_generators=2048,
        gpus_of_one=32,
        tokens=8 * 512 * 710.0,
        on_policy_s=None,
        asynchronous_s=None,
        note="DeepSeek-V3's 512 GPUs eight times, with eight times the completions; nothing so large is published",
    ),
}


def job_of(row: Row) -> JobSpec:
    """As many batches as each generator has waves; only their number matters."""
    batches = WAVES * row.gpus_of_generators // row.gpus_of_one
    values = {
        "name": "published",
        "iterations": 24,
        "model": {"path": "published"},
        "dataset": {"type": "addition"},
        "reward": {"components": [{"type": "exact"}]},
        "rollout": {"batches_per_iteration": batches, "prompts_per_batch": 1, "group_size": 16},
        "trainer": {"checkpoint_every_iterations": 1000},
        "evaluation": {"num_prompts": 0},
    }
    return convert(values, JobSpec)


def costs_of(row: Row, spec: JobSpec) -> tuple[Costs, Machines]:
    """The trainer is one rank here, of all its GPUs."""
    generators = row.gpus_of_generators // row.gpus_of_one
    generate_s, train_s = row.stages.generate_s, row.stages.train_s
    if not row.is_own:
        generate_s *= row.on_policy_gpus / row.gpus_of_generators
        train_s *= row.on_policy_gpus / (row.gpus - row.gpus_of_generators)
    batches = spec.rollout.batches_per_iteration
    one = BatchCost(
        rounds=(Round(generate_s=generate_s / WAVES, score_s=SCORE_S),),
        train_s=train_s / batches,
        num_tokens=round(row.tokens / batches),
    )
    waits = Waits(
        claim_s=ROUND_TRIP_S,
        load_s=ROUND_TRIP_S,
        swap_s=ROUND_TRIP_S,
        arrival_s=ROUND_TRIP_S,
        take_s=0.0,
        open_s=ROUND_TRIP_S,
        after_s=ROUND_TRIP_S,
        checkpoint_s=0.0,
    )
    steps = (StepCost(step_s=0.0, publish_s=row.stages.other_s),)
    costs = Costs(source=row.source, training=(one,), evaluation=(one,), steps=steps, waits=waits)
    return costs, Machines(num_generators=generators)


def compared(row: Row) -> dict[str, Any]:
    """A row: what was published, and what a plan says."""
    spec = job_of(row)
    costs, machines = costs_of(row, spec)
    schedules = {"synchronous": Schedule("synchronous"), "periodic": Schedule("periodic")}
    schedules[f"delayed {row.lag}"] = Schedule("delayed", row.lag)
    found = {name: predict(spec, schedule, machines, costs, replications=1) for name, schedule in schedules.items()}
    lagging = found[f"delayed {row.lag}"]
    predicted_s = lagging.iteration_s.mean
    return {
        "gpus": row.gpus,
        "generators": machines.num_generators,
        "gpus_of_generators": row.gpus_of_generators,
        "published_on_policy_s": row.on_policy_s,
        "published_asynchronous_s": row.asynchronous_s,
        "predicted_s": {name: round(one.iteration_s.mean, 1) for name, one in found.items()},
        "predicted_over_published": round(predicted_s / row.asynchronous_s, 3) if row.asynchronous_s else None,
        "busy": {"generators": round(lagging.generators_busy, 3), "trainer": round(lagging.trainer_busy, 3)},
        "redis": _redis(lagging, row),
        "source": row.source,
        "note": row.note,
    }


def _redis(one: Prediction, row: Row) -> dict[str, float | None]:
    known = bool(row.tokens)
    return {
        "scripts_per_s": round(one.redis.scripts_per_s, 1),
        "bytes_per_s": round(one.redis.bytes_per_s) if known else None,
        "most_resident_bytes": round(one.redis.most_resident_bytes) if known else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench published", description=__doc__)
    parser.add_argument("--row", choices=list(ROWS), help="one of them alone; nothing is written then")
    arguments = parser.parse_args()
    names = [arguments.row] if arguments.row else list(ROWS)
    result = {name: compared(ROWS[name]) for name in names}
    for name, one in result.items():
        predicted = "  ".join(f"{schedule} {seconds:g}" for schedule, seconds in one["predicted_s"].items())
        published = f"{one['published_on_policy_s'] or '-'} -> {one['published_asynchronous_s'] or '-'} s"
        print(
            f"{name:34} published {published}   predicted {predicted} s   "
            f"ratio {one['predicted_over_published'] or '-'}   {one['redis']['scripts_per_s']:g} scripts/s",
            flush=True,
        )
    if not arguments.row:
        path = write_result("published", {"expected": EXPECTED, "waves": WAVES, "rows": result})
        print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
