"""Where the primary is, by the sentinels that watch it.

It is asked for at each new connection, and twice a second while an answer is waited for: a primary that hangs answers
nothing, and its connections stay open. A connection to a server that isn't the primary any more is given up before
the next command, since what it reads there may be old.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, TimeoutError
from redis.retry import Retry

LOOK_S = 0.5
SHARED_S = 0.25
"""So long what one connection was told, or not told, counts for all."""
AFTER_FAILURE_S = 4.0
"""A wait that found no sentinel in as many looks as there are looks so much later: a look keeps it from reading."""
ANSWER_S = 0.5
"""A sentinel that needs longer is passed over; of a primary that takes no connection the next one is asked anew."""
CONNECTS_EVERY_MS = 1000
"""How often a sentinel tries to connect: one that waits no longer may take for dead whom it has just promoted."""

log = logging.getLogger(__name__)
Place = tuple[str, int]
"""Host and port."""


class Primary:
    """The primary that some sentinels watch. Thread-safe.

    `read_address` creates it, once for each address, and all connections to the address share it: what one of them
    hears from a sentinel counts for all.
    """

    def __init__(self, name: str, sentinels: Sequence[Place], options: Mapping[str, Any]) -> None:
        """Makes the clients of the sentinels, which connect when they are asked first.

        Args:
            name: The name by which the sentinels know the server.
            sentinels: Their places.
            options: Of a connection to a sentinel: TLS, its user and password.
        """
        self._name = name
        self._lock = threading.Lock()
        patience = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S, "retry": Retry(NoBackoff(), 0)}
        each = [(f"{host}:{port}", Redis(host, port, **options, **patience)) for host, port in sentinels]
        # Many processes have the same address: they don't all ask the same one.
        self._sentinels = deque(random.SystemRandom().sample(each, len(each)))
        self.place: Place | None = None
        """The last that was told; None before."""
        self._epoch = -1
        """The failover that made it the primary: a sentinel that was cut off may know of an older one."""
        self._problem = ""
        self._num_failed = 0
        """Looks in a row that found no sentinel."""
        self._looked_s = self._due_s = 0.0

    def find(self, *, within_s: float) -> Place:
        """Returns the primary's place. Raises redis-py's ConnectionError, with what each sentinel says, while none
        names one."""
        ends_s = time.monotonic() + within_s
        if not self._lock.acquire(timeout=max(0.0, within_s)):
            raise ConnectionError("the sentinels don't answer in time")
        try:
            if time.monotonic() - self._looked_s >= SHARED_S:
                self._look(ends_s)
            if self._problem or self.place is None:
                raise ConnectionError(f"no sentinel reports where the primary `{self._name}` is: {self._problem}")
            return self.place
        finally:
            self._lock.release()

    def has_left(self, place: Place) -> bool:
        """Returns True where another server is the primary by now, as far as a sentinel that answers knows.

        Waits for one look at most, and for no other thread's.
        """
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() >= self._due_s:
                    self._look(time.monotonic() + ANSWER_S)
            finally:
                self._lock.release()
        return self.is_elsewhere(place)

    def is_elsewhere(self, place: Place) -> bool:
        """Returns True where another server is the primary, by what the sentinels said last."""
        return self.place not in (None, place)

    def _look(self, ends_s: float) -> None:
        """Asks until a sentinel hears no older primary than was known before. An older one counts where all know it."""
        problems: list[str] = []
        answers: list[tuple[int, bool, Place]] = []
        for _ in range(len(self._sentinels)):
            if time.monotonic() >= ends_s:
                problems.append("no time was left for the others")
                break
            host, sentinel = self._sentinels[0]
            # The next look asks another: they learn of a failover one after the other, who leads it comes last.
            self._sentinels.rotate(-1)
            answer = self._state_of(sentinel)
            if isinstance(answer, tuple):
                answers.append(answer)
                if answer[0] >= self._epoch and answer[1]:
                    break
            else:
                problems.append(f"{host} {answer}")
        self._looked_s = time.monotonic()
        if answers:
            self._problem = ""
            self._num_failed = 0
        else:
            self._problem = "; ".join(problems)
            self._num_failed += 1
        has_none = self._num_failed >= len(self._sentinels)
        self._due_s = self._looked_s + (AFTER_FAILURE_S if has_none else LOOK_S)
        if answers and (max(answers)[0] >= self._epoch or len(answers) == len(self._sentinels)):
            self._epoch, _, self.place = max(answers)

    def _state_of(self, sentinel: Redis) -> tuple[int, bool, Place] | str:
        """Returns (the failover's number, whether this sentinel hears the server, its place), or why there is none."""
        try:
            state: Any = sentinel.sentinel_master(self._name)
        except AuthenticationError:
            return "refuses the password"
        except (ConnectionError, TimeoutError, OSError):
            return "does not answer"
        except RedisError as error:
            return f"says: {error}"
        if self.place is None and int(state["down-after-milliseconds"]) <= CONNECTS_EVERY_MS:
            log.warning("`%s`: set down-after-milliseconds to 1500 or more, or failovers follow each other", self._name)
        return int(state["config-epoch"]), not state["is_sdown"], (str(state["ip"]), int(state["port"]))


def at_primary(connection_class: type[Any], primary: Primary) -> type[Any]:
    """Derives the connection class, plain or TLS, that connects to wherever the primary is at the time."""

    class AtPrimary(connection_class):
        def _connect(self) -> Any:
            self.host, self.port = primary.find(within_s=self.socket_connect_timeout or ANSWER_S)
            self.socket_connect_timeout = ANSWER_S
            return super()._connect()

        def is_left(self) -> bool:
            return primary.has_left((self.host, self.port))

        def is_elsewhere(self) -> bool:
            return primary.is_elsewhere((self.host, self.port))

    return AtPrimary
