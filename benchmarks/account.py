"""Where each core-second of an iteration goes, beside what this machine's products and memory would take for it.

    onbeat bench account --py-spy .venv-account/bin/py-spy      (make bench-account has it)

    demo    configs/demo.toml, 0.41 M parameters, 1,024 completions of up to 5 tokens
    8m      benchmarks/trl.toml, 8.3 M parameters, 8 prompts x 8 completions of up to 57 tokens
    135m    SmolLM2-135M's shape with random weights, 4 prompts x 8 completions of up to 32 tokens

A job runs by `onbeat demo` as it is. After its first iterations the system's clocks say what each process takes. Then
py-spy looks at each of its Python processes, 100 times a second from outside, and counts the threads that compute. What
a stack is put down to is the innermost function that RULES knows; a process' samples are scaled to the processor time
that it had before: py-spy stops a process while it looks, so a job beside it waits more than it does alone.

A limit is the least time for the same arithmetic on one core of this machine: operations of the products over those of
one large product, and bytes that must be read or written over those of one large copy. Both are measured in the same
run. `idle` is what both cores had left, by what the timeline says that processes waited for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks._demo_runs import DemoRun, run_demo
from benchmarks._processor_time import Looked, ProcessTimes, role_of
from benchmarks._random_models import make_8m
from benchmarks._results import REPOSITORY, write_result
from benchmarks.trainer import save_model
from benchmarks.trl import BY_ONEDNN
from contracts.spec.job import JobSpec
from onbeat.base.machine_kernels import measured
from onbeat.base.process.waiting import Waiting
from onbeat.client.spec_file import load_spec
from onbeat.weights.model_folder import empty_model

EXPECTED = (
    "Before the first run. demo: sampling a third (of it products a third, draws a quarter, the rest Python), passes "
    "and exact sums a half, Redis and serialisation 5 %, idle 10 to 20 %. 8m: products two thirds of sampling. 135m: "
    "products four fifths of all; nothing outside of sampling and passes above 3 %. Before the first in which 8m and "
    "135m have two generators by themselves: idle 25 % of the demo, 15 to 20 % of 8m, 25 % of 135m; 8m-delayed 5 %. "
    "Before the first that takes times while py-spy does not look, and has products by oneDNN everywhere, from the "
    "clocks of some processes by hand (22, 6 and 4 %): idle 20 to 22 % of the demo, 4 to 6 % of 8m, 3 to 4 % of "
    "8m-delayed; 135m 15 to 25 %."
)
DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Case:
    spec: Path
    settings: tuple[str, ...]
    warm_up: int
    looked_s: int
    """So long clocks are read, and then stacks are looked at; the job lasts longer."""
    make: Callable[[Path], None] | None = None


def make_135m(folder: Path) -> None:
    save_model("smollm2-135m", folder, dtype=torch.float32, device=torch.device("cpu"))


TRL_SPEC = REPOSITORY / "benchmarks/trl.toml"
CASES = {
    "demo": Case(spec=REPOSITORY / "configs/demo.toml", settings=("iterations=320",), warm_up=10, looked_s=20),
    "8m": Case(spec=TRL_SPEC, settings=("iterations=48", BY_ONEDNN), warm_up=2, looked_s=20, make=make_8m),
    "8m-delayed": Case(
        spec=TRL_SPEC,
        settings=("iterations=48", BY_ONEDNN, "schedule=delayed", "max_policy_lag=1", "algorithm.correction=tis"),
        warm_up=2,
        looked_s=20,
        make=make_8m,
    ),
    "135m": Case(
        spec=TRL_SPEC,
        settings=(
            "iterations=20",
            BY_ONEDNN,
            "rollout.batches_per_iteration=2",
            "rollout.prompts_per_batch=2",
            "rollout.sampling.max_new_tokens=32",
        ),
        warm_up=1,
        looked_s=40,
        make=make_135m,
    ),
}


def account(case: Case, scratch: Path, py_spy: str) -> dict[str, Any]:
    """Core-seconds of an iteration by place, and the limits."""
    settings = [*case.settings, "evaluation.num_prompts=0"]
    if case.make is not None:
        case.make(scratch / "model")
        settings.append(f"model.path={scratch / 'model'}")
    spec = load_spec(case.spec, settings)
    looks = scratch / "looks"
    looks.mkdir()
    flags = [flag for setting in settings for flag in ("--set", setting)]
    with ThreadPoolExecutor(1) as pool, ProcessTimes() as times:
        run = pool.submit(run_demo, case.spec, scratch / "run", *flags, models=scratch)
        until_iteration(scratch / "run", case.warm_up, run.done)
        from_s = time.time()
        time.sleep(case.looked_s)
        to_s = time.time()
        looked = Looked(py_spy, looks, case.looked_s)
        done = run.result(DEADLINE_S)
    counted = [one for one in done.metrics if from_s <= one.started_s + one.wall_s <= to_s]
    wall_s = sum(one.wall_s for one in counted) / len(counted)
    number = (to_s - from_s) / wall_s
    samples, unknown = looked.samples()
    places: defaultdict[str, float] = defaultdict(float)
    for (pid, command), spent_s in times.between(from_s, to_s).items():
        of_process = samples.get(pid, Counter())
        if not of_process:
            places[role_of(command)] += spent_s
        for place, count in of_process.items():
            places[place] += spent_s * count / of_process.total()
    of_iteration = {place: spent / number for place, spent in places.items() if spent / number > 1e-6}
    cores = os.cpu_count() or 1
    idle_s = cores * wall_s - sum(of_iteration.values())
    limits = limits_of(spec, case, scratch, sum(one.num_tokens for one in counted) / len(counted))
    return {
        "iteration_s": wall_s,
        "core_s": {place: round(spent, 5) for place, spent in sorted(of_iteration.items(), key=lambda item: -item[1])},
        "idle_core_s": round(idle_s, 5),
        "busy_share": round(1 - idle_s / (cores * wall_s), 3),
        "waits_s": waits(done, from_s, to_s, number),
        "limit_s": {place: round(least, 5) for place, least in limits.items()},
        "largest_unknown": [
            f"{count} {stack.replace(f'{REPOSITORY}/', '').replace(f'{sys.base_prefix}/', '')[-200:]}"
            for stack, count in unknown.most_common(4)
        ],
    }


def until_iteration(run_root: Path, number: int, is_over: Callable[[], bool]) -> None:
    waiting = Waiting(f"iteration {number}", deadline_s=DEADLINE_S)
    while not is_over() and not any(
        len(path.read_bytes().splitlines()) > number for path in run_root.glob("*/metrics.jsonl")
    ):
        waiting.poke()
        time.sleep(0.1)


def waits(done: DemoRun, from_s: float, to_s: float, number: float) -> dict[str, float]:
    """Process and reason → seconds of an iteration in which its timeline has it wait for that."""
    spent: defaultdict[str, float] = defaultdict(float)
    for span in done.spans:
        inside_s = min(to_s, span.ended_s) - max(from_s, span.started_s)
        if inside_s > 0 and span.what in ("wait", "score", "load", "sync", "open"):
            spent[f"{'trainer' if 'trainer' in span.who else 'generator'}: {span.what}"] += inside_s
    return {name: round(seconds / number, 5) for name, seconds in spent.items()}


def limits_of(spec: JobSpec, case: Case, scratch: Path, tokens: float) -> dict[str, float]:
    """Place → least core-seconds of an iteration. tokens: sampled in it."""
    folder = scratch / "model" if case.make else REPOSITORY / spec.model.path
    model = empty_model(folder, dtype=torch.float32, device="cpu")
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    parameters = sum(one.numel() for one in model.parameters())
    head = config.vocab_size * config.hidden_size
    # A tied head is counted once among the parameters, and multiplies once; an embedding's rows are only read.
    multiplied = parameters if config.tie_word_embeddings else parameters - head
    # One core's, by the faster of torch's library and oneDNN.
    speed = measured(1024, 20)
    flop_s = max(speed.torch_flop_s, speed.onednn_flop_s)
    byte_s = copied_byte_s()
    batches = spec.rollout.batches_per_iteration
    return {
        "sampling: products": 2 * multiplied * tokens / flop_s,
        "sampling: draws": 4 * config.vocab_size * tokens / byte_s,
        "passes: forward": 2 * multiplied * tokens / flop_s,
        "passes: backward": 4 * multiplied * tokens / flop_s,
        # A batch's gradient is read, and the sums' 8 bytes are read and written; the step reads them, and reads and
        # writes master and two moments of 4 bytes each.
        "passes: exact sums": (4 + 16) * parameters * batches / byte_s,
        "optimizer": (8 + 24) * parameters / byte_s,
        "weights: published, received": 3 * 4 * parameters / byte_s,
        "machine: product, GFLOP/s": flop_s / 1e9,
        "machine: copy, GB/s": byte_s / 1e9,
    }


def copied_byte_s(num_bytes: int = 1 << 28, rounds: int = 8) -> float:
    """Bytes a second that one core reads and writes, of memory that no cache holds."""
    source = torch.zeros(num_bytes // 4)
    target = torch.empty_like(source)
    return best(lambda: target.copy_(source), rounds, 2 * num_bytes)


def best(work: Callable[[], object], rounds: int, amount: float) -> float:
    """Amount over the processor seconds of the fastest round."""
    times: list[float] = []
    for _ in range(rounds):
        started_s = time.process_time()
        work()
        times.append(time.process_time() - started_s)
    return amount / min(times)


def table(name: str, found: Mapping[str, Any]) -> str:
    total = sum(found["core_s"].values()) + found["idle_core_s"]
    lines = [f"{name}: an iteration of {found['iteration_s']:.3f} s, cores busy for {found['busy_share']:.0%}"]
    for place, spent in [*found["core_s"].items(), ("idle", found["idle_core_s"])]:
        least = found["limit_s"].get(place)
        beside = f"{spent / least:8.1f}x its limit" if least else ""
        lines.append(f"  {place:40} {1000 * spent:10.2f} ms {spent / total:7.1%} {beside}")
    waited = ", ".join(f"{name} {1000 * one:.1f}" for name, one in found["waits_s"].items())
    return "\n".join([*lines, f"  waits, ms: {waited}"])


def draw(path: Path, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """A bar for each case: shares of the core-seconds, and marks where the limits of the parts would end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys(place for found in cases.values() for place in grouped(found["core_s"])))
    colors = dict(zip(groups, pyplot.get_cmap("tab20").colors, strict=False))  # pyright: ignore[reportAttributeAccessIssue]
    figure, axes = pyplot.subplots(figsize=(9.0, 1.2 + 0.8 * len(cases)), layout="constrained")
    named: set[str] = set()
    for row, found in enumerate(cases.values()):
        total, left = sum(found["core_s"].values()) + found["idle_core_s"], 0.0
        for place, spent in grouped(found["core_s"]).items():
            axes.barh(row, spent / total, left=left, color=colors[place], label="" if place in named else place)
            named.add(place)
            left += spent / total
        axes.barh(row, found["idle_core_s"] / total, left=left, color="#eeeeee", label="idle" if row == 0 else "")
    axes.set(yticks=range(len(cases)), yticklabels=list(cases), xlim=(0, 1), xlabel="share of both cores")
    axes.invert_yaxis()
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def grouped(core_s: Mapping[str, float], least: float = 0.02) -> dict[str, float]:
    """Parts below a share of it are one."""
    total = sum(core_s.values())
    kept = {place: spent for place, spent in core_s.items() if spent >= least * total}
    return kept | {"the rest": total - sum(kept.values())}


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench account", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--picture", type=Path, help="shares of the core-seconds, as .png")
    parser.add_argument("--py-spy", default="py-spy", help="its command; it may look at other processes, as root")
    arguments = parser.parse_args()
    if shutil.which(arguments.py_spy) is None:
        raise SystemExit(f"--py-spy: no command {arguments.py_spy}; `make bench-account` makes its environment")
    found: dict[str, Any] = {}
    for name in arguments.cases:
        with tempfile.TemporaryDirectory(prefix="account-") as folder:
            found[name] = account(CASES[name], Path(folder), arguments.py_spy)
        print(table(name, found[name]), flush=True)
    if arguments.picture:
        draw(arguments.picture, found)
    path = write_result("account", {"expected": EXPECTED, "cases": found})
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
