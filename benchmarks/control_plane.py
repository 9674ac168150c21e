"""Measures what waiting generators cost Redis: its time for an opening, a claim, a heartbeat and a publication.

    python -m benchmarks control-plane

N generators have claimed in vain and wait for a wake, each by a connection of its own and beside a presence; another
one claims and publishes the 128 batches of 45 KB of each iteration. The server's processor milliseconds are taken
around each step, medians of the rounds: of a claim, a heartbeat (presence and lease) and a publication; of a whole
opening, with the trainer's reading and commit before it, which wakes as many as there are batches; and of a claim in
vain, as each that was woken beyond them would make. Each N has a server of its own, and they take turns round by round;
beside the milliseconds stand the medians of their ratios to those with one that waits, round by round. Before an
opening each server has had as many claims in vain as the most that wait make: they alone put what it reads next out of
the processor's caches.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec.structs import replace

from benchmarks._batches import rollout_batch
from benchmarks._results import shown_path, write_result
from benchmarks.broker import LEASE_S, NUM_BATCHES, FencedTrainer, publish
from broker.connection.client import Broker, connect
from broker.generator_side import Claim, GeneratorSide
from broker.keys import wake_channel
from broker.presence import Presence
from contracts.monitor import GeneratorSeen
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis

EXPECTED = (
    "Before the first run with messages in place of streams: a wake 0.005 to 0.007 ms, not 0.015, and an opening "
    "at 1,000 within 1.2 of that at 1, by a little; claim, heartbeat and publication as before."
)
SIZE = "45 KB"
WAITING = (1, 10, 100, 1000)
DEADLINE_S = 60.0


class Waiting:
    """N generators whose claims found nothing, each with a connection that listens to the channel that wakes it."""

    def __init__(self, broker: Broker, url: str, job_id: str, count: int) -> None:
        parts = urlsplit(url)
        hello = command("AUTH", parts.username or "default", unquote(parts.password or ""))
        presence = Presence(broker)
        self._sides: list[GeneratorSide] = []
        self._sockets: list[socket.socket] = []
        self._poller = select.poll()
        for name in (f"waiting-{number}" for number in range(count)):
            presence.beat(GeneratorSeen(worker_id=name, engine="transformers"))
            self._sides.append(GeneratorSide(broker, job_id, name))
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(DEADLINE_S)
            connection.connect(unquote(parts.path))
            connection.sendall(hello)
            if not connection.recv(64).startswith(b"+OK"):
                raise RuntimeError("the server refuses a waiting connection")
            connection.sendall(command("SUBSCRIBE", wake_channel(name)))
            if b"subscribe" not in connection.recv(1 << 16):
                raise RuntimeError("the server refuses a channel")
            self._sockets.append(connection)
            self._poller.register(connection, select.POLLIN)
        self._left = set[int]()
        """Those that were woken."""

    def wait(self) -> None:
        """Each of them claims in vain, and waits for what goes out from then on."""
        for number in range(max(WAITING)):
            if self._sides[number % len(self._sides)].claim(LEASE_S) is not None:
                raise RuntimeError("a batch was left")
        self._left.clear()

    def woken(self, count: int) -> None:
        """Returns when the server has answered so many of them, and raises RuntimeError where it answers more."""
        deadline_s = time.monotonic() + DEADLINE_S
        by_number = {connection.fileno(): number for number, connection in enumerate(self._sockets)}
        while len(self._left) < count:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(self._left)} connections were woken, not {count}")
            self._read(by_number, wait_ms=1000)
        self._read(by_number, wait_ms=0)
        if len(self._left) > count:
            raise RuntimeError(f"{len(self._left)} connections were woken for {count} batches")

    def _read(self, by_number: dict[int, int], *, wait_ms: int) -> None:
        for number, _ in self._poller.poll(wait_ms):
            self._sockets[by_number[number]].recv(1 << 16)
            self._left.add(by_number[number])

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()


def command(*words: str) -> bytes:
    """The words as Redis' protocol has them."""
    data = [word.encode() for word in words]
    return b"*%d\r\n" % len(data) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in data)


class Server:
    """Processor milliseconds of the server."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def cpu_ms(self, *work: Callable[[], object]) -> float:
        """What the work takes it."""
        before_ms = self._ms()
        for one in work:
            one()
        return self._ms() - before_ms

    def _ms(self) -> float:
        info: Any = self._broker.redis.info("cpu")
        return 1000 * (info["used_cpu_sys"] + info["used_cpu_user"])


class Row:
    """One server with N waiting generators, and the milliseconds that its steps took."""

    def __init__(self, count: int, resources: contextlib.ExitStack) -> None:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory())) / "redis"
        url = resources.enter_context(EmbeddedRedis(folder)).url
        broker = resources.enter_context(contextlib.closing(connect(StackSettings(redis_url=url), patience_s=60.0)))
        self._trainer, self._server, self._presence = FencedTrainer(broker, SIZE), Server(broker), Presence(broker)
        self._side = GeneratorSide(broker, self._trainer.source, "at work")
        self._batch = replace(rollout_batch(1), generator_id="at work")
        self._count = count
        self._waiting = resources.enter_context(contextlib.closing(Waiting(broker, url, self._trainer.source, count)))
        self._claims: list[Claim] = []
        self._found: dict[str, list[float]] = {}
        claim_each(self._side, self._claims)

    def round(self) -> None:
        """One iteration."""
        num_batches = NUM_BATCHES[SIZE]
        self._note("heartbeat", num_batches, partial(beat_each, self._side, self._presence, self._claims))
        self._note("publication", num_batches, partial(publish_each, self._side, self._claims, self._batch))
        self._trainer.prepare()
        self._waiting.wait()
        woken = partial(self._waiting.woken, min(self._count, num_batches))
        self._note("opening", 1, partial(self._trainer.take, num_batches), woken)
        self._claims.clear()
        self._note("claim", num_batches, partial(claim_each, self._side, self._claims))
        self._note("claim in vain", num_batches, partial(claim_in_vain, self._side))

    def _note(self, what: str, count: int, *work: Callable[[], object]) -> None:
        self._found.setdefault(what, []).append(self._server.cpu_ms(*work) / count)

    def medians(self) -> dict[str, float]:
        """Milliseconds; the first round warms up."""
        return {what: round(statistics.median(values[1:]), 4) for what, values in self._found.items()}

    def times(self, other: Row) -> dict[str, float]:
        """Medians of the ratios to the other one's steps in the same round."""
        return {
            what: round(statistics.median(map(truediv, values[1:], other._found[what][1:])), 3)
            for what, values in self._found.items()
        }


def claim_each(side: GeneratorSide, claims: list[Claim]) -> None:
    for _ in range(NUM_BATCHES[SIZE]):
        claim = side.claim(LEASE_S)
        if not isinstance(claim, Claim):
            raise RuntimeError("a batch is missing")
        claims.append(claim)


def claim_in_vain(side: GeneratorSide) -> None:
    for _ in range(NUM_BATCHES[SIZE]):
        if side.claim(LEASE_S) is not None:
            raise RuntimeError("a batch was left")


def beat_each(side: GeneratorSide, presence: Presence, claims: list[Claim]) -> None:
    for claim in claims:
        presence.beat(GeneratorSeen(worker_id="at work", engine="transformers"))
        side.renew([claim])


def publish_each(side: GeneratorSide, claims: list[Claim], batch: RolloutBatch) -> None:
    for claim in claims:
        publish(side, claim, batch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks control-plane", description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as resources:
        rows = [Row(count, resources) for count in WAITING]
        for number in range(arguments.rounds + 1):
            for row in rows[:: -1 if number % 2 else 1]:
                row.round()
        server_ms = {str(count): row.medians() for count, row in zip(WAITING, rows, strict=True)}
        of_first = {str(count): row.times(rows[0]) for count, row in zip(WAITING[1:], rows[1:], strict=True)}
    for count, medians in server_ms.items():
        print(count, medians, of_first.get(count, ""), flush=True)
    result = {"expected": EXPECTED, "size": SIZE, "server_ms": server_ms, "times_the_first_by_round": of_first}
    path = write_result("control-plane", result)
    print(f"written to {shown_path(path)}")


if __name__ == "__main__":
    main()
