"""What waiting generators cost Redis: the server's time for an opening, a claim, a heartbeat and a publication.

    onbeat bench control-plane

N generators wait for prompts as idle ones do, each with a presence; beside them one claims and publishes the 128
batches of 45 KB of each iteration. The server's processor milliseconds are taken around each of the steps, medians of
the rounds: of a claim, heartbeat and publication; of a whole opening, with the trainer's reading and commit before it,
which wakes all N; and of an empty claim of each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks._batches import rollout_batch
from benchmarks._results import REPOSITORY, write_result
from benchmarks.broker import LEASE_S, NUM_BATCHES, FencedTrainer, publish
from broker.connection.client import Broker, connect
from broker.generator_side import Claim, GeneratorSide
from broker.presence import Presence
from contracts.errors import OnbeatError
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis

EXPECTED = (
    "Before the first run: claim, heartbeat and publication at 1,000 within 1.2 of those at 1; an opening 0.07 ms a "
    "waiting generator more (one wake-up and one empty claim)."
)
SIZE = "45 KB"
WAITING = (1, 10, 100, 1000)
SETTLE_S = 1.0


class Waiting:
    """N generators that wait for prompts, a thread each. Woken, one claims once it may: by then all is claimed."""

    def __init__(self, broker: Broker, job_id: str, count: int) -> None:
        self._broker = broker
        self._may_look = threading.Event()
        self._looked = threading.Semaphore(0)
        self.count = count
        presence = Presence(broker)
        for number in range(count):
            presence.beat(f"waiting-{number}", {"engine": "transformers"})
        self._threads = [
            threading.Thread(target=self._wait, args=(job_id, f"waiting-{number}"), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def look(self) -> None:
        """Returns when each of them has claimed, and got nothing."""
        self._may_look.set()
        for _ in range(self.count):
            self._looked.acquire()
        self._may_look.clear()

    def end(self) -> None:
        self._broker.break_off()
        self._may_look.set()
        for thread in self._threads:
            thread.join()

    def _wait(self, job_id: str, name: str) -> None:
        side = GeneratorSide(self._broker, job_id, name)
        with contextlib.suppress(OnbeatError):
            while True:
                self._may_look.wait()
                if side.claim(LEASE_S) is not None:
                    raise AssertionError("a batch was left for one that waits")
                self._looked.release()
                while self._may_look.is_set():
                    time.sleep(0.001)
                side.wait_for_prompts(600.0)


class Server:
    """Processor seconds of the server."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def cpu_ms(self, work: Callable[[], object], *, settle_s: float = 0.0) -> float:
        """Milliseconds that the work takes it; settle_s: how long what the work wakes may go on."""
        before = self._seconds()
        work()
        time.sleep(settle_s)
        return 1000 * (self._seconds() - before)

    def _seconds(self) -> float:
        info: Any = self._broker.redis.info("cpu")
        return info["used_cpu_sys"] + info["used_cpu_user"]


def measure(url: str, count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the server; the first round warms up."""
    num_batches = NUM_BATCHES[SIZE]
    with contextlib.closing(connect(StackSettings(redis_url=url), patience_s=60.0)) as broker:
        trainer, server = FencedTrainer(broker, SIZE), Server(broker)
        side = GeneratorSide(broker, trainer.source, "at work")
        claims: list[Claim] = []
        claim_each(side, claims)
        waiting = Waiting(connect(StackSettings(redis_url=url), patience_s=60.0), trainer.source, count)
        waiting.look()
        time.sleep(SETTLE_S)
        batch = replace(rollout_batch(1), generator_id="at work")
        found: dict[str, list[float]] = {
            what: [] for what in ("opening", "claim", "looks of those that wait", "heartbeat", "publication")
        }
        for _ in range(rounds + 1):
            found["heartbeat"].append(server.cpu_ms(partial(renew_each, side, claims)) / num_batches)
            found["publication"].append(server.cpu_ms(partial(publish_each, side, claims, batch)) / num_batches)
            trainer.prepare()
            found["opening"].append(server.cpu_ms(partial(trainer.take, num_batches), settle_s=SETTLE_S))
            claims.clear()
            found["claim"].append(server.cpu_ms(partial(claim_each, side, claims)) / num_batches)
            found["looks of those that wait"].append(server.cpu_ms(waiting.look))
            time.sleep(SETTLE_S)
        waiting.end()
    return {what: round(statistics.median(values[1:]), 4) for what, values in found.items()}


def claim_each(side: GeneratorSide, claims: list[Claim]) -> None:
    while (claim := side.claim(LEASE_S)) is not None:
        claims.append(claim)


def renew_each(side: GeneratorSide, claims: list[Claim]) -> None:
    for claim in claims:
        side.renew([claim])


def publish_each(side: GeneratorSide, claims: list[Claim], batch: RolloutBatch) -> None:
    for claim in claims:
        publish(side, claim, batch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench control-plane", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as server:
        for count in WAITING:
            rows[str(count)] = measure(server.url, count, arguments.rounds)
            print(count, rows[str(count)], flush=True)
    path = write_result("control-plane", {"expected": EXPECTED, "size": SIZE, "server_ms": rows})
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
