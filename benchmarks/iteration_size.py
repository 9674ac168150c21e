"""What grows with the number of batches of an iteration, and with their bytes: each a hundred times larger.

    onbeat bench iteration-size

For each shape of an iteration, on a server of its own: how long it takes to open, the longest PING of another client
meanwhile, and what a call of a waiting process costs the server: the trainer's reconciliation, and an idle generator's
look for something to copy while another one holds all batches. Last comes the memory that a trainer's start takes to
read its audit chain. Server times are its processor's, which other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._batches import DIGEST, manifest, prompt_batch
from benchmarks._results import write_result
from broker.connection.client import Broker, connect
from broker.generator_side import GeneratorSide
from broker.job_store import JobStore
from broker.trainer_side import IterationOpening, TrainerSide
from contracts.encoding.wire import encode
from contracts.events import AuditRecord, record_digest
from contracts.rewards import ExactReward, RewardSpec
from contracts.rollouts import PromptBatch
from contracts.settings import StackSettings
from contracts.spec.datasets import AdditionDataset
from contracts.spec.job import JobSpec, ModelSpec
from onbeat.stack.redis import EmbeddedRedis

EXPECTED = (
    "Before the first run: opening takes time in proportion to bytes, as it did, but the longest PING stays below "
    "100 ms at every shape, where it was 1.9 s at 5,000 batches of 66 KB; one reconciliation and one look for a copy "
    "cost the server less than 0.1 ms at 100 batches and at 10,000, where the look took 18 ms; a chain of 30 records "
    "of 10,000 batches is read in less than a third of the memory."
)
SHAPES = ((100, 1), (10_000, 1), (100, 100), (5_000, 100))
"""(batches, prompts of each): 0.8 KB and 60 KB a batch."""
NUM_LOOKS = 50
NUM_RECORDS = 30
LEASE_S = 600.0


def batches_of(job_id: str, number: int, num_prompts: int) -> tuple[PromptBatch, ...]:
    return tuple(prompt_batch(job_id, 0, index, num_prompts) for index in range(number))


class Pings:
    """Another client, while something else goes on; a context manager."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest_s = 0.0

    def __enter__(self) -> Pings:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(0.001):
            began_s = time.perf_counter()
            self._broker.ping()
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s)


def new_job(broker: Broker) -> tuple[str, TrainerSide]:
    spec = JobSpec(
        name="size",
        model=ModelSpec(path="m"),
        dataset=AdditionDataset(),
        reward=RewardSpec(components=(ExactReward(),)),
        iterations=1,
    )
    job_id, _ = JobStore(broker).create(spec)
    trainer = TrainerSide(broker, job_id, owner="t", lease_s=LEASE_S)
    trainer.acquire()
    trainer.publish_weights(manifest(0), oldest_kept=0)
    return job_id, trainer


def server_s(broker: Broker, call: Callable[[], object]) -> float:
    """Seconds of the server's commands for each of NUM_LOOKS calls."""
    redis: Any = broker.redis
    redis.config_resetstat()
    for _ in range(NUM_LOOKS):
        call()
    return sum(row["usec"] for name, row in redis.info("commandstats").items() if "evalsha" in name) / 1e6 / NUM_LOOKS


def measure(url: str, number: int, num_prompts: int) -> dict[str, Any]:
    settings = StackSettings(redis_url=url)
    broker = connect(settings, patience_s=120.0)
    job_id, trainer = new_job(broker)
    batches = batches_of(job_id, number, num_prompts)
    opening = IterationOpening(iteration=0, oldest_version=0, newest_version=0, batches=batches)
    broker.redis.config_set("slowlog-log-slower-than", 1000)
    with Pings(connect(settings, patience_s=120.0)) as pings:
        began_s = time.perf_counter()
        trainer.open_iteration(opening, {0: DIGEST})
        opened_s = time.perf_counter() - began_s
    slow: Any = broker.redis.slowlog_get(1000)
    broker.redis.hset(broker.job_keys(job_id).progress, "recent_ms", encode([600_000]))
    busy, idle = GeneratorSide(broker, job_id, "busy"), GeneratorSide(broker, job_id, "idle")
    while busy.claim(LEASE_S):
        pass
    return {
        "batches": number,
        "payload_bytes": len(encode(batches[0])),
        "open_s": round(opened_s, 3),
        "longest_ping_ms": round(1000 * pings.longest_s, 1),
        "longest_command_ms": round(max((one["duration"] for one in slow), default=0) / 1000, 1),
        "reconcile_server_ms": round(1000 * server_s(broker, lambda: trainer.reconcile(0, batches)), 3),
        "look_for_a_copy_server_ms": round(1000 * server_s(broker, lambda: idle.claim(LEASE_S, hedge=True)), 3),
    }


def chain(url: str, number: int) -> dict[str, Any]:
    """Peak memory of reading a chain of records of so many batches."""
    broker = connect(StackSettings(redis_url=url), patience_s=120.0)
    job_id, _ = new_job(broker)
    record = AuditRecord(
        kind="commit",
        iteration=0,
        policy_version=0,
        weights_digest=DIGEST,
        next_weights_digest=DIGEST,
        trainer_epoch=1,
        batches={f"0/train/{index}": DIGEST for index in range(number)},
        abandoned={},
        previous="",
    )
    for _ in range(NUM_RECORDS):
        broker.redis.xadd(broker.job_keys(job_id).audit, {"record": encode(record), "digest": record_digest(record)})
    jobs = JobStore(broker)
    tracemalloc.start()
    getattr(jobs, "audit_outline", jobs.audit)(job_id)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"records": NUM_RECORDS, "batches": number, "peak_mb": round(peak / 1e6, 1)}


def main() -> None:
    argparse.ArgumentParser(prog="onbeat bench iteration-size", description=__doc__).parse_args()
    rows = []
    for number, num_prompts in SHAPES:
        with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
            rows.append(measure(server.url, number, num_prompts))
            sys.stderr.write(f"{rows[-1]}\n")
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
        chains = [chain(server.url, number) for number in (100, 10_000)]
    sys.stderr.write(f"{chains}\n")
    path = write_result("iteration-size", {"expected": EXPECTED, "rows": rows, "chain": chains})
    sys.stderr.write(f"{path}\n")


if __name__ == "__main__":
    main()
