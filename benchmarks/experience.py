"""What a row costs on its way through a stage: put → get → acknowledge, beside TransferQueue and raw Redis streams.

    onbeat bench experience --transfer-queue .venv-tq/bin/python      (make bench-experience has the environment)

A cycle of a client, of 1 row or of 16, one after the other, with 1 and with 4 clients:

    ours            a rollout batch is published through the fence (put), its rows are claimed by a stage under a lease
                    (get), and their column is put, which acknowledges them
    raw             XADD of each row's bytes, XREADGROUP of as many, XACK; several commands of a step in one pipeline
    TransferQueue   put of the rows, get_meta and get_data, and a put of the column beside them; it runs under the
                    interpreter of an environment of its own, with its default configuration

Ours and raw alternate, round by round, on one server that keeps an append-only file. A client has a job, a stream or a
partition of its own, and what a cycle left is cleared before the next one: an iteration is committed, entries are
deleted, a partition is cleared. That isn't timed, nor a generator's claim of its prompts. Memory is the proportional
set size of all processes, with 4 clients: server or actors, Ray's own, and the clients.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from benchmarks._batches import DIGEST, manifest, one_group, prompt_batch
from benchmarks._results import write_result
from broker.connection.client import Broker, connect
from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.openings import IterationOpening
from broker.stage_side import PutOutcome, StageSide
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import encode
from contracts.events import AuditRecord, record_digest
from contracts.experience.columns import Column
from contracts.jobs import JobState
from contracts.rewards import ExactReward, RewardSpec
from contracts.rollouts import RolloutBatch, batch_digest
from contracts.settings import StackSettings
from contracts.spec.datasets import AdditionDataset
from contracts.spec.job import JobSpec, ModelSpec
from contracts.spec.limits import LimitSpec
from contracts.spec.stages import ExternalStage
from onbeat.stack.redis import EmbeddedRedis

EXPECTED = (
    "Before the first run: ours 1,000-1,500 rows/s at 45 KB one by one with one client, three round trips of about "
    "0.25 ms each, 6,000-10,000 in batches of 16, 80-200 at 1 MB; ratios to raw of 1.5-2.2 one by one, below 1.5 in "
    "batches and at 1 MB, where bytes count; TransferQueue 10-20x slower one by one, 8-12x in batches; memory of ours "
    "below 0.3 GB with 4 clients, of TransferQueue about 2 GB; 0.5 s to start against 20 s or more. "
    "Before the first in which a batch crosses the file once, rows are put in bulk and cycles are cleared: one by one "
    "1,300-1,600 rows/s at 45 KB with one client, in batches of 16 4,000-5,500, 200-300 of 1 MB; ratios to raw of "
    "1.4-1.9 everywhere; 13-16 times TransferQueue one by one, 4-5.5 times in batches, about half of it in batches of "
    "16 MB; memory of ours 0.5-0.6 GB. Before the first in which a server keeps the memory of large payloads: 1 MB 4-6 "
    "times TransferQueue one by one, 0.9-1.2 times in batches."
)
AIMS = {"to_transfer_queue_one_by_one": 20.0, "to_transfer_queue_in_batches": 5.0, "memory_share": 0.1, "to_raw": 2.0}
ROW_BYTES = {"45 KB": 45 * 1024, "1 MB": 1024**2}
CYCLES = {("45 KB", 1): 200, ("45 KB", 16): 40, ("1 MB", 1): 60, ("1 MB", 16): 8}
"""How many each client does in a round."""
CLIENTS = (1, 4)
STAGE = "score"
LEASE_S = 3600.0
SCRIPT = Path(__file__).parent / "_transfer_queue.py"
VALUE = {"score": [b"\0\0\0\0"]}


@dataclass
class Order:
    """What a client is to do next."""

    way: str
    size: str
    rows: int
    cycles: int


@dataclass
class Way:
    """The rounds of one way of a case."""

    rows_per_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def numbers(self) -> dict[str, float]:
        cuts = statistics.quantiles(self.took_s, n=100, method="inclusive")
        return {
            "rows_per_s": round(statistics.median(self.rows_per_s), 1),
            "p50_ms": round(1000 * cuts[49], 3),
            "p99_ms": round(1000 * cuts[98], 3),
        }


def batch_of(size: str, rows: int) -> RolloutBatch:
    """One group whose rollouts have the bytes of the size, half of them token ids and half log-probs."""
    return one_group(prompt_tokens=16, response_lengths=[ROW_BYTES[size] // 8] * rows)


def client(url: str, name: str, orders: Connection) -> None:
    """A client process. It gets ready for each order and says so; then it answers with its cycles' seconds."""
    broker = connect(StackSettings(redis_url=url))
    while (order := orders.recv()) is not None:
        work = (RawClient if order.way == "raw" else OurClient)(broker, order, name)
        orders.send("ready")
        orders.recv()
        took = []
        for _ in range(order.cycles):
            work.prepare()
            took.append(timed(work.cycle))
        work.close()
        orders.send(took)


class RawClient:
    """The rows of a client on a stream of its own."""

    def __init__(self, broker: Broker, order: Order, name: str) -> None:
        self._redis: Any = broker.redis
        self._name, self._rows = name, order.rows
        self._stream = f"onbeat:bench:{name}"
        self._redis.xgroup_create(self._stream, "readers", id="0", mkstream=True)
        self._payload = encode(batch_of(order.size, 1))

    def prepare(self) -> None:
        self._redis.xtrim(self._stream, maxlen=0)

    def cycle(self) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for _ in range(self._rows):
                pipe.xadd(self._stream, {"batch": self._payload})
            pipe.execute()
        read: list[bytes] = []
        while len(read) < self._rows:
            left = self._rows - len(read)
            found = self._redis.xreadgroup("readers", self._name, {self._stream: ">"}, count=left, block=1000)
            read += [entry for entry, _ in found[0][1]] if found else []
        self._redis.xack(self._stream, "readers", *read)

    def close(self) -> None:
        self._redis.delete(self._stream)


class OurClient:
    """The generator, the stage worker and the trainer of a job whose iterations have one batch."""

    def __init__(self, broker: Broker, order: Order, name: str) -> None:
        self._jobs = JobStore(broker)
        self._rows = order.rows
        self._job_id, _ = self._jobs.create(job_spec())
        self._generator = GeneratorSide(broker, self._job_id, name)
        self._stage = StageSide(broker, self._job_id, name)
        self._stage.plan  # noqa: B018 - read before the time counts, as a worker does once
        self._trainer = TrainerSide(broker, self._job_id, owner=name, lease_s=LEASE_S)
        self._trainer.acquire()
        self._trainer.publish_weights(manifest(0), oldest_kept=0)
        self._trainer.open_iteration(self._opening(0), {0: DIGEST})
        self._sampled = replace(batch_of(order.size, order.rows), job_id=self._job_id, generator_id=name)
        self._claim: Claim | None = None
        self._batch = self._sampled
        self._last_link = ""

    def prepare(self) -> None:
        """Commits what the cycle before has made, which opens the next iteration, and claims its batch."""
        if self._claim is not None:
            self._commit(self._batch.iteration)
        self._claim = claim = self._generator.claim(LEASE_S)
        if claim is None:
            raise RuntimeError("there is no batch to sample")
        asked = claim.prompt_batch
        self._batch = replace(
            self._sampled,
            batch_id=asked.batch_id,
            iteration=asked.iteration,
            policy_version=asked.policy_version,
            attempt=claim.attempt,
        )

    def cycle(self) -> None:
        if self._claim is None or self._generator.publish(self._claim, self._batch) is not PublishOutcome.ACCEPTED:
            raise RuntimeError(f"batch {self._batch.batch_id} was refused")
        items = self._stage.claim(STAGE, self._rows)
        if len(items) != self._rows:
            raise RuntimeError(f"{len(items)} rows were claimed instead of {self._rows}")
        if set(self._stage.put([(item, VALUE) for item in items])) != {PutOutcome.ACCEPTED}:
            raise RuntimeError("a put was refused")

    def close(self) -> None:
        self._jobs.move(self._job_id, JobState.FAILED)
        self._jobs.remove(self._job_id)

    def _opening(self, iteration: int) -> IterationOpening:
        prompts = replace(prompt_batch(self._job_id, iteration, 0, 1), group_size=self._rows)
        return IterationOpening(
            iteration=iteration, oldest_version=iteration, newest_version=iteration, batches=(prompts,)
        )

    def _commit(self, iteration: int) -> None:
        trained = {self._batch.batch_id: batch_digest(self._batch)}
        record = AuditRecord(
            kind="commit",
            iteration=iteration,
            policy_version=iteration,
            weights_digest=DIGEST,
            next_weights_digest=DIGEST,
            trainer_epoch=self._trainer.trainer_epoch,
            batches=trained,
            abandoned={},
            previous=self._last_link,
        )
        following = self._opening(iteration + 1)
        self._trainer.publish_weights(manifest(iteration + 1), oldest_kept=iteration)
        self._trainer.commit(record, trained, event=None, opening=following, made=(iteration + 1, DIGEST))
        self._last_link = record_digest(record)


def job_spec() -> JobSpec:
    score = Column(name=STAGE, type="float32")
    stage = ExternalStage(name=STAGE, inputs=("completion_ids", "generator_logprobs"), outputs=(score,))
    return JobSpec(
        name="bench experience",
        iterations=1000,
        model=ModelSpec(path="none"),
        dataset=AdditionDataset(),
        reward=RewardSpec(components=(ExactReward(),)),
        limits=LimitSpec(max_batch_bytes=2**26),
        stages=(stage,),
    )


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def run_round(order: Order, pipes: Sequence[Connection], into: Way) -> None:
    """One round of one way."""
    for pipe in pipes:
        pipe.send(order)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    took: list[list[float]] = [pipe.recv() for pipe in pipes]
    into.rows_per_s.append(len(pipes) * order.cycles * order.rows / max(map(sum, took)))
    into.took_s += [seconds for one in took for seconds in one]


def memory_mb(processes: Iterable[psutil.Process]) -> float:
    """Proportional set size: pages that several processes share count once."""
    return round(sum(process.memory_full_info().pss for process in processes) / 1e6, 1)


def measure(num_rounds: int, sizes: list[str]) -> dict[str, Any]:
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
        connect(StackSettings(redis_url=server.url)).ping()
        start_s = time.perf_counter() - started_s
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for index in range(max(CLIENTS)):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=client, args=(server.url, f"c{index}", theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        rows = []
        for size in sizes:
            for num_rows in (1, 16):
                for clients in CLIENTS:
                    ways = {"raw": Way(), "ours": Way()}
                    for number in range(num_rounds + 1):
                        for name, way in ways.items():
                            order = Order(name, size, num_rows, CYCLES[size, num_rows])
                            run_round(order, pipes[:clients], way if number else Way())
                    numbers = {name: way.numbers() for name, way in ways.items()}
                    rows.append({"size": size, "rows": num_rows, "clients": clients, **numbers})
                    sys.stderr.write(f"{rows[-1]}\n")
        pids = [server.child.pid, *(process.pid for process in processes)]
        memory = memory_mb(psutil.Process(pid) for pid in pids if pid)
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()
    return {"start_s": round(start_s, 2), "memory_mb": memory, "rows": rows}


def measure_transfer_queue(python: str, sizes: list[str]) -> dict[str, Any]:
    cases = [
        (size, ROW_BYTES[size], num_rows, clients, max(4, CYCLES[size, num_rows] // 4))
        for size in sizes
        for num_rows in (1, 16)
        for clients in CLIENTS
    ]
    command = [python, str(SCRIPT), json.dumps(cases)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answers: list[dict[str, Any]] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("both are pipes")
        for line in process.stdout:
            answers.append(json.loads(line))
            if "done" in answers[-1]:
                break
        else:
            raise RuntimeError(f"TransferQueue ended with exit code {process.wait()}")
        root = psutil.Process(process.pid)
        memory = memory_mb([root, *root.children(recursive=True)])
        process.stdin.write("end\n")
        process.stdin.close()
    of_cases = [one for one in answers if "took_s" in one]
    rows = []
    for case, one in zip(cases, of_cases, strict=True):
        rate = case[2] * case[3] * case[4] / one["elapsed_s"]
        numbers = Way(rows_per_s=[rate], took_s=one["took_s"]).numbers()
        rows.append({"size": case[0], "rows": case[2], "clients": case[3], "transfer_queue": numbers})
        sys.stderr.write(f"{rows[-1]}\n")
    return {"start_s": round(answers[0]["start_s"], 2), "memory_mb": memory, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench experience", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of ours and raw for each case")
    parser.add_argument("--sizes", nargs="+", choices=ROW_BYTES, default=list(ROW_BYTES))
    parser.add_argument("--transfer-queue", metavar="PYTHON", help="interpreter that has TransferQueue")
    arguments = parser.parse_args()
    ours = measure(arguments.rounds, arguments.sizes)
    result: dict[str, Any] = {"expected": EXPECTED, "aims": AIMS, "rounds": arguments.rounds, "ours": ours}
    for row in ours["rows"]:
        row["to_raw"] = round(row["raw"]["rows_per_s"] / row["ours"]["rows_per_s"], 2)
    if arguments.transfer_queue:
        theirs = measure_transfer_queue(arguments.transfer_queue, arguments.sizes)
        for row, other in zip(ours["rows"], theirs["rows"], strict=True):
            rates = row["ours"]["rows_per_s"], other["transfer_queue"]["rows_per_s"]
            row["to_transfer_queue"] = round(rates[0] / rates[1], 1)
        result |= {"transfer_queue": theirs, "memory_share": round(ours["memory_mb"] / theirs["memory_mb"], 3)}
    sys.stdout.write(f"{write_result('experience', result)}\n")


if __name__ == "__main__":
    main()
