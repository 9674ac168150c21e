"""Is Redis's memory flat over a long job? A job of 300 small iterations, sampled every ten.

    onbeat bench memory
    onbeat bench memory --name memory-lagging --set schedule=delayed --set max_policy_lag=2 \\
        --set algorithm.correction=tis

The audit chain and the events grow by design; their bytes are reported an iteration, and taken off the server's
`used_memory`. What is left holds the open iterations: prompts, rollouts, ledger, manifests, and the server itself.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._results import REPOSITORY, write_result
from broker.connection.client import Broker, connect
from broker.fence import read_fence
from broker.job_store import JobStore
from contracts.jobs import JobState
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.stack.plan import StackPlan
from onbeat.stack.stack import EmbeddedStack

SPEC = REPOSITORY / "configs/chaos.toml"
SETTINGS = (
    "rollout.batches_per_iteration=2",
    "rollout.prompts_per_batch=2",
    "rollout.group_size=4",
    "evaluation.num_prompts=0",
    "trainer.checkpoint_every_iterations=100",
)
EVERY = 10
WARM_UP = 1
"""First samples: processes are connecting, and each script is loaded at its first call."""
ITERATION_DEADLINE_S = 120.0
GROWING = ("audit", "events")
KEPT = ("dead", *GROWING)
STREAMS = ("prompts", "rollouts", *KEPT)


def sample(broker: Broker, job_id: str, num_open: int) -> dict[str, int]:
    """One moment of the server, all of it in one transaction; what each slot has is summed."""
    keys = broker.job_keys(job_id, num_open)
    pipe: Any = broker.redis.pipeline(transaction=True)
    pipe.info("memory").dbsize().hlen(keys.weights)
    for name in KEPT:
        pipe.xlen(getattr(keys, name)).memory_usage(getattr(keys, name), samples=0)
    for slot in keys.slots:
        pipe.hlen(slot.ledger).xlen(slot.prompts).xlen(slot.rollouts)
    memory, num_keys, weights, *rest = pipe.execute()
    kept, of_slots = rest[: 2 * len(KEPT)], rest[2 * len(KEPT) :]
    entries = dict(zip(KEPT, kept[0::2], strict=True))
    entries |= {"prompts": sum(of_slots[1::3]), "rollouts": sum(of_slots[2::3])}
    num_bytes = {name: used or 0 for name, used in zip(KEPT, kept[1::2], strict=True)}
    return {
        "committed": read_fence(broker, keys).committed + 1,
        "used_memory": memory["used_memory"],
        **{f"{name}_bytes": num_bytes[name] for name in GROWING},
        "rest_bytes": memory["used_memory"] - sum(num_bytes[name] for name in GROWING),
        "keys": num_keys,
        "ledger_entries": sum(of_slots[0::3]),
        "manifests": weights,
        **{f"{name}_entries": entries[name] for name in STREAMS},
    }


def watch(stack: EmbeddedStack, broker: Broker, job_id: str, spec: JobSpec) -> list[dict[str, int]]:
    """A sample every EVERY iterations. Raises RuntimeError where the job ends otherwise than it should."""
    jobs = JobStore(broker)
    samples: list[dict[str, int]] = []
    for due in range(EVERY, spec.iterations + 1, EVERY):
        waiting = Waiting(f"iteration {due} to be committed", deadline_s=EVERY * ITERATION_DEADLINE_S)
        while read_fence(broker, broker.job_keys(job_id)).committed + 1 < due:
            stack.tick()
            waiting.poke()
            if jobs.state(job_id) in (JobState.FAILED, JobState.CANCELLED):
                raise RuntimeError(f"job {job_id} ended: {jobs.fields(job_id)['reason'].decode()}")
            time.sleep(0.02)
        samples.append(sample(broker, job_id, spec.num_open))
        print(", ".join(f"{name} {value}" for name, value in samples[-1].items()), flush=True)
    return samples


def growth(samples: Sequence[dict[str, int]], name: str) -> float:
    """Bytes an iteration: the slope of the least-squares line."""
    line = statistics.linear_regression([one["committed"] for one in samples], [one[name] for one in samples])
    return round(line.slope, 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench memory", description=__doc__)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in onbeat demo")
    parser.add_argument("--name", default="memory", help="of the result file")
    arguments = parser.parse_args()
    settings = [*SETTINGS, *arguments.set]
    spec = load_spec(SPEC, [f"iterations={arguments.iterations}", *settings])
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        plan = StackPlan(run_root=Path(scratch), model_root=REPOSITORY, generators=1, threads=1)
        with EmbeddedStack(plan) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
            assert stack.redis is not None
            broker = connect(StackSettings(redis_url=stack.redis.url))
            job_id = client.submit(spec, idempotency_key=uuid.uuid4().hex).job_id
            samples = watch(stack, broker, job_id, spec)
    settled = samples[WARM_UP:]
    third = len(settled) // 3
    first, last = settled[:third], settled[-third:]
    result = {
        "expected": "the rest in the last third is within 5 % of the first; so are keys; streams hold the window",
        "settings": settings,
        "growth_bytes_per_iteration": {name: growth(settled, f"{name}_bytes") for name in (*GROWING, "rest")},
        "rest_bytes_median": {
            "first_third": statistics.median(one["rest_bytes"] for one in first),
            "last_third": statistics.median(one["rest_bytes"] for one in last),
        },
        "keys": {"first_third": max(one["keys"] for one in first), "last_third": max(one["keys"] for one in last)},
        "largest_entries": {name: max(one[f"{name}_entries"] for one in samples) for name in STREAMS},
        "samples": samples,
    }
    path = write_result(arguments.name, result)
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
