"""Which generators are alive: a heartbeat each, read with the server's clock."""

from __future__ import annotations

from broker.connection.client import Broker
from broker.keys import GENERATORS
from contracts.encoding.wire import Record, decode, encode

REJECTED_WEIGHTS = "rejected_weights"
"""In a generator's info: the folder of the version that it cannot load, "" while there is none."""
LOADING_WEIGHTS = "loading_weights"
"""In a generator's info: the folders of the version that it loads, and of those that it stands on, with spaces between
them, from its claim until it holds it; "" otherwise."""
NOT_REPRODUCIBLE = "not_reproducible"
"""In a generator's info: the name of its engine if that can't serve deterministic jobs (I7), "" if it can."""
AWAKE_FOR = "awake_for"
"""In a generator's info: the id of the colocated job whose turn to generate it has, "" while it has none."""
LIVE_S = 10.0
"""A generator without a sign of life for this long is not counted."""


class GeneratorInfo(Record, frozen=True, kw_only=True):
    """A generator's last sign of life."""

    generator_id: str
    seen_s: float
    """Unix time by the server's clock."""
    info: dict[str, str]


class Presence:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def beat(self, generator_id: str, info: dict[str, str]) -> None:
        record = GeneratorInfo(generator_id=generator_id, seen_s=self._broker.now_s(), info=info)
        self._broker.write("HSET", GENERATORS, generator_id, encode(record))

    def leave(self, generator_id: str) -> None:
        with self._broker.call():
            self._broker.redis.hdel(GENERATORS, generator_id)

    def live(self) -> list[GeneratorInfo]:
        """Generators seen within LIVE_S, by id; those not seen for ten times as long are forgotten."""
        now_s = self._broker.now_s()
        with self._broker.call():
            values: list[bytes] = self._broker.redis.hvals(GENERATORS)  # type: ignore[assignment]
        infos = [decode(value, GeneratorInfo) for value in values]
        for gone in (info for info in infos if now_s - info.seen_s > 10 * LIVE_S):
            self.leave(gone.generator_id)
        # After a clock stepped back too: a live one beats again soon, a dead one must not live as long as the step.
        return sorted((i for i in infos if abs(now_s - i.seen_s) <= LIVE_S), key=lambda info: info.generator_id)
