"""Compares publishing, claiming and committing rollout batches through the fence with raw XADD and XREADGROUP.

    python -m benchmarks broker

One server, the same processes, the same bytes; the ways alternate round by round. A fenced round is an iteration
whose prompts are already claimed: the producers encode, hash and publish their answers; the trainer claims, decodes,
verifies the digests, commits, and opens the next one. A raw round: XADD by the producers, XREADGROUP by one reader that
looks at nothing, and at its end XACK and XDEL of everything, as a commit does. A round of records is a raw one with the
same work and no fence: producers encode their answers, the reader decodes them, and sends out the next prompts.
The target is a ratio to raw streams of at most 2.
Beside the ratio of the times stands that of the CPU seconds of all processes, the server's included: on a machine that
does other work as well, it is the steadier one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks._batches import DIGEST, manifest, prompt_batch, rollout_batch
from benchmarks._results import write_result
from broker.connection.client import Broker, connect
from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.trainer_side import IterationOpening, TrainerSide
from contracts.encoding.wire import decode, encode
from contracts.events import AuditRecord, record_digest
from contracts.rewards import ExactReward, RewardSpec
from contracts.rollouts import RolloutBatch, batch_digest
from contracts.settings import StackSettings
from contracts.spec.datasets import AdditionDataset
from contracts.spec.job import JobSpec, ModelSpec
from onbeat.stack.redis import EmbeddedRedis

EXPECTED = (
    "Before the first run: 2.0-2.5x at 45 KB, where a fenced batch is scripts instead of commands and Python's "
    "share is largest; 1.5-1.8x at 1 MB; 1.6-2.0x at 8 MB, where two BLAKE2b passes at about 0.9 GB/s and the copies "
    "through Lua count. More producers change little: the server is one thread, the machine has two cores."
)
TARGET_RATIO = 2.0
NUM_GROUPS = {"45 KB": 1, "1 MB": 22, "8 MB": 178}
NUM_BATCHES = {"45 KB": 128, "1 MB": 32, "8 MB": 16}
"""The batches of a round: a multiple of every number of producers."""
PRODUCERS = (1, 4, 16)
READ_AT_ONCE = 4
LEASE_S = 600.0


@dataclass
class Order:
    """What a producer is to do next."""

    way: str
    size: str
    source: str
    """Stream of a raw round, job id of a fenced one."""
    count: int


@dataclass
class Done:
    """What a producer answers: seconds of each publication, and of its processor."""

    publish_s: list[float]
    cpu_s: float


def produce(url: str, name: str, orders: Connection) -> None:
    """A producer process. It gets ready for each order and says so; then it answers with its publications' seconds."""
    broker = connect(StackSettings(redis_url=url))
    batches = {size: rollout_batch(num_groups) for size, num_groups in NUM_GROUPS.items()}
    while (order := orders.recv()) is not None:
        ready = WORK[order.way]
        work = ready(broker, order, replace(batches[order.size], generator_id=name))
        orders.send("ready")
        orders.recv()
        before_s = time.process_time()
        took = [publish() for publish in work]
        orders.send(Done(took, time.process_time() - before_s))


def raw_work(broker: Broker, order: Order, batch: RolloutBatch) -> list[Callable[[], float]]:
    payload = encode(batch)
    return [lambda: timed(lambda: broker.redis.xadd(order.source, {"batch": payload}))] * order.count


def record_work(broker: Broker, order: Order, batch: RolloutBatch) -> list[Callable[[], float]]:
    return [lambda: timed(lambda: broker.redis.xadd(order.source, {"batch": encode(batch)}))] * order.count


def fenced_work(broker: Broker, order: Order, batch: RolloutBatch) -> list[Callable[[], float]]:
    side = GeneratorSide(broker, order.source, batch.generator_id)
    claims = [side.claim(LEASE_S) for _ in range(order.count)]
    return [partial(publish, side, claim, batch) for claim in claims if isinstance(claim, Claim)]


WORK = {"raw": raw_work, "records": record_work, "fenced": fenced_work}


def publish(side: GeneratorSide, claim: Claim, batch: RolloutBatch) -> float:
    """Seconds from the answer as records to the fence's outcome."""
    prompts = claim.prompt_batch
    answer = replace(
        batch,
        job_id=prompts.job_id,
        batch_id=prompts.batch_id,
        iteration=prompts.iteration,
        policy_version=prompts.policy_version,
        attempt=claim.attempt,
    )
    outcomes = []
    took_s = timed(lambda: outcomes.append(side.publish(claim, answer)))
    if outcomes != [PublishOutcome.ACCEPTED]:
        raise RuntimeError(f"batch {prompts.batch_id} was refused: {outcomes[0].value}")
    return took_s


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


class RawReader:
    """XREADGROUP, then XACK and XDEL."""

    name = "raw"

    def __init__(self, broker: Broker, size: str) -> None:
        self._redis: Any = broker.redis
        self.source = f"onbeat:bench:{self.name}:{size.replace(' ', '')}"
        self._redis.xgroup_create(self.source, "readers", id="0", mkstream=True)

    def prepare(self) -> None:
        """Does nothing: a raw round needs no preparation."""

    def take(self, count: int) -> None:
        """Reads all entries of the round, then acknowledges and deletes them."""
        entries: list[bytes] = []
        while len(entries) < count:
            answer = self._redis.xreadgroup("readers", "r", {self.source: ">"}, count=READ_AT_ONCE, block=1000)
            for entry, fields in answer[0][1] if answer else []:
                entries.append(entry)
                self.look(fields[b"batch"])
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.xack(self.source, "readers", *entries)
            pipe.xdel(self.source, *entries)
            self.send(pipe)
            pipe.execute()

    def look(self, payload: bytes) -> None:
        """Does nothing with a batch."""

    def send(self, pipe: Any) -> None:
        """Sends no prompts."""


class RecordReader(RawReader):
    """The same, which decodes what it reads, and sends the next prompts."""

    name = "records"

    def __init__(self, broker: Broker, size: str) -> None:
        super().__init__(broker, size)
        self._prompts = [prompt_batch("bench", 0, index, NUM_GROUPS[size]) for index in range(NUM_BATCHES[size])]

    def look(self, payload: bytes) -> None:
        decode(payload, RolloutBatch)

    def send(self, pipe: Any) -> None:
        for batch in self._prompts:
            pipe.xadd(f"{self.source}:prompts", {"batch": encode(batch)}, maxlen=len(self._prompts), approximate=False)


class FencedTrainer:
    """The trainer's side of one job whose iterations are the rounds."""

    def __init__(self, broker: Broker, size: str) -> None:
        spec = JobSpec(
            name=f"bench {size}",
            iterations=1000,
            model=ModelSpec(path="none"),
            dataset=AdditionDataset(),
            reward=RewardSpec(components=(ExactReward(),)),
        )
        self.source, _ = JobStore(broker).create(spec)
        self._size = size
        self._side = TrainerSide(broker, self.source, owner="bench", lease_s=LEASE_S)
        self._side.acquire()
        self._iteration = 0
        self._last_link = ""
        self._side.publish_weights(manifest(0), oldest_kept=0)
        self._side.open_iteration(self._opening(0), {0: DIGEST})
        self._following = self._opening(1)

    def prepare(self) -> None:
        """Makes the next iteration's prompts beforehand: making them is the trainer's work, not the broker's."""
        self._following = self._opening(self._iteration + 1)

    def take(self, count: int) -> None:
        """Trains all batches of the iteration, then commits it, which opens the next one."""
        trained: dict[str, str] = {}
        while len(trained) < count:
            self._side.wait_for_rollouts(self._iteration, 1.0)
            arrived, _ = self._side.claim_rollouts(self._iteration, max_batches=READ_AT_ONCE)
            trained |= {arrival.batch.batch_id: arrival.digest for arrival in arrived}
        done, self._iteration = self._iteration, self._iteration + 1
        self._side.publish_weights(manifest(self._iteration), oldest_kept=done)
        record = self._record(done, trained)
        version = (self._iteration, DIGEST)
        self._side.commit(record, trained, event=None, opening=self._following, next_version=version)
        self._last_link = record_digest(record)

    def _opening(self, iteration: int) -> IterationOpening:
        batches = tuple(
            prompt_batch(self.source, iteration, index, NUM_GROUPS[self._size])
            for index in range(NUM_BATCHES[self._size])
        )
        return IterationOpening(
            iteration=iteration, oldest_version=iteration, newest_version=iteration, batches=batches
        )

    def _record(self, iteration: int, trained: dict[str, str]) -> AuditRecord:
        return AuditRecord(
            kind="commit",
            iteration=iteration,
            policy_version=iteration,
            weights_digest=DIGEST,
            next_weights_digest=DIGEST,
            trainer_epoch=self._side.trainer_epoch,
            batches=trained,
            abandoned={},
            previous=self._last_link,
        )


READERS = {"raw": RawReader, "records": RecordReader, "fenced": FencedTrainer}


@dataclass
class Way:
    """The rounds of one way for one size and number of producers."""

    rounds_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"producers": [], "reader": [], "server": []})

    def cpu_ms(self, num_batches: int) -> dict[str, float]:
        """Median milliseconds of a batch, by the process that spent them."""
        return {who: round(1000 * statistics.median(rounds) / num_batches, 3) for who, rounds in self.cpu_s.items()}

    def numbers(self, num_batches: int, num_bytes: int) -> dict[str, Any]:
        round_s = statistics.median(self.rounds_s)
        cuts = statistics.quantiles(self.publish_s, n=100, method="inclusive")
        return {
            "batches_per_s": round(num_batches / round_s, 1),
            "mb_per_s": round(num_batches * num_bytes / round_s / 1e6, 1),
            "cpu_ms_per_batch": self.cpu_ms(num_batches),
            "publish_p50_ms": round(1000 * cuts[49], 3),
            "publish_p99_ms": round(1000 * cuts[98], 3),
        }


class Round:
    """Times one round of one way, processors included."""

    def __init__(self, broker: Broker, pipes: list[Connection]) -> None:
        self._broker = broker
        self._pipes = pipes

    def run(self, order: Order, reader: RawReader | FencedTrainer, way: Way) -> None:
        """Adds the round's numbers to `way`."""
        reader.prepare()
        for pipe in self._pipes:
            pipe.send(order)
        for pipe in self._pipes:
            pipe.recv()
        reader_s, server_s = time.process_time(), self._server_cpu_s()
        for pipe in self._pipes:
            pipe.send("go")
        way.rounds_s.append(timed(lambda: reader.take(order.count * len(self._pipes))))
        done: list[Done] = [pipe.recv() for pipe in self._pipes]
        way.publish_s += [seconds for producer in done for seconds in producer.publish_s]
        way.cpu_s["producers"].append(sum(producer.cpu_s for producer in done))
        way.cpu_s["reader"].append(time.process_time() - reader_s)
        way.cpu_s["server"].append(self._server_cpu_s() - server_s)

    def _server_cpu_s(self) -> float:
        info: Any = self._broker.redis.info("cpu")
        return info["used_cpu_sys"] + info["used_cpu_user"]


def measure(
    size: str, round_: Round, *, readers: dict[str, RawReader | FencedTrainer], num: int, rounds: int
) -> dict[str, Any]:
    """One row of the table for `num` producers; the first pair of rounds warms up and does not count."""
    num_batches = NUM_BATCHES[size]
    ways = {name: Way() for name in readers}
    for number in range(rounds + 1):
        for name, way in ways.items():
            order = Order(name, size, readers[name].source, num_batches // num)
            round_.run(order, readers[name], way if number else Way())
    num_bytes = len(encode(rollout_batch(NUM_GROUPS[size])))
    raw, records, fenced = (ways[name] for name in WORK)
    cpu_ms = {name: sum(way.cpu_ms(num_batches).values()) for name, way in ways.items()}
    pairs = [f / r for f, r in zip(fenced.rounds_s, raw.rounds_s, strict=True)]
    return {
        "size": size,
        "bytes": num_bytes,
        "producers": num,
        "ratio": round(statistics.median(pairs), 2),
        "ratio_range": [round(min(pairs), 2), round(max(pairs), 2)],
        "cpu_ratio": round(cpu_ms["fenced"] / cpu_ms["raw"], 2),
        "cpu_ratio_to_records": round(cpu_ms["fenced"] / cpu_ms["records"], 2),
        "raw": raw.numbers(num_batches, num_bytes),
        "records": records.numbers(num_batches, num_bytes),
        "fenced": fenced.numbers(num_batches, num_bytes),
    }


def client_work(size: str) -> dict[str, float]:
    """Least milliseconds of Python that only a fenced batch costs; the digest is made on both sides."""
    batch = rollout_batch(NUM_GROUPS[size])
    payload = encode(batch)
    parts: dict[str, Callable[[], object]] = {
        "encode_ms": lambda: encode(batch),
        "digest_ms": lambda: batch_digest(batch),
        "decode_ms": lambda: decode(payload, RolloutBatch),
    }
    return {name: round(1000 * min(timed(part) for _ in range(15)), 3) for name, part in parts.items()}


def run(url: str, sizes: list[str], num_rounds: int) -> list[dict[str, Any]]:
    broker = connect(StackSettings(redis_url=url))
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(max(PRODUCERS)):
        ours, theirs = context.Pipe()
        process = context.Process(target=produce, args=(url, f"g{index}", theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    rows = []
    for size in sizes:
        readers = {name: make(broker, size) for name, make in READERS.items()}
        for num in PRODUCERS:
            row = measure(size, Round(broker, pipes[:num]), readers=readers, num=num, rounds=num_rounds)
            cpu = f"CPU {row['cpu_ratio']}x, to records {row['cpu_ratio_to_records']}x"
            sys.stderr.write(f"{size} x {num} producers: {row['ratio']}x, {cpu}\n")
            rows.append(row)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks broker", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of rounds for each row")
    parser.add_argument("--sizes", nargs="+", choices=NUM_GROUPS, default=list(NUM_GROUPS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
        rows = run(server.url, arguments.sizes, arguments.rounds)
        name = f"{server.server.name} {'.'.join(map(str, server.server.version))}" if server.server else ""
    worst = max(row["ratio"] for row in rows)
    result = {
        "expected": EXPECTED,
        "target_ratio": TARGET_RATIO,
        "server": name,
        "rounds": arguments.rounds,
        "client_work": {size: client_work(size) for size in arguments.sizes},
        "rows": rows,
        "worst_ratio": worst,
    }
    path = write_result("broker", result)
    sys.stdout.write(f"worst ratio {worst}x, target {TARGET_RATIO}x; {path}\n")


if __name__ == "__main__":
    main()
