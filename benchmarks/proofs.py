"""Measures whether honest versions are proved, how far engines are from the trainer, and what a proof costs (I11).

    python -m benchmarks proofs jobs [--iterations 150] [--kinds "dense, float32" ...]
    .venv-vllm/bin/python -m benchmarks proofs gaps [--versions 25] [--engines transformers vllm] [--families llama ...]
    .venv-vllm/bin/python -m benchmarks proofs cost --model 8m|135m|FOLDER [--dtype float32] [--pairs 20]
    python -m benchmarks proofs demo [--pairs 12] [--iterations 50]

`jobs`: honest jobs of several kinds, and how many of their versions the fence refuses. Each version is trained by a
real learner on what the transformers engine has sampled, loaded by that engine, shown, and judged by the fence's
script, in one process. The job of two ranks runs as real processes, and only its counters are read: of it no gap is
known.

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

A gap is of a log-prob, divided by one plus its size. `--device cuda` puts the trainer's model and the transformers
engine on the GPU. vLLM takes the device of its build.
"""

from __future__ import annotations

import argparse

from benchmarks._demo_proofs import demo
from benchmarks._engine_proofs import DENSE, DTYPES, OPTIONS, STEP, WITHOUT_TORCHVISION, cost, gaps
from benchmarks._honest_jobs import KINDS, RANKS, jobs
from benchmarks._results import shown_path, write_result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks proofs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True)
    of_jobs = commands.add_parser("jobs")
    of_jobs.add_argument("--iterations", type=int, default=150, help="of each kind; of the ranks a third")
    of_jobs.add_argument("--kinds", nargs="+", default=[*KINDS, RANKS], help="some of: " + "; ".join([*KINDS, RANKS]))
    of_jobs.add_argument("--name", default="proof-jobs", help="the result's")
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
    measures = {"jobs": jobs, "gaps": gaps, "cost": cost, "demo": demo}
    path = write_result(arguments.name, measures[arguments.what](arguments))
    print(f"written to {shown_path(path)}")


if __name__ == "__main__":
    main()
