"""Where the primary is, by the sentinels that watch it.

It is asked for at each new connection, and once a second while an answer is waited for: a primary that hangs answers
nothing, and its connections stay open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

LOOK_S = 1.0
ANSWER_S = 0.5
"""A sentinel that needs longer is passed over for the next one."""

Place = tuple[str, int]
"""Host and port."""


class Primary:
    """Shared by all connections to one address. Thread-safe."""

    def __init__(self, name: str, sentinels: Sequence[Place], options: Mapping[str, Any]) -> None:
        """name: what the sentinels call the server; options: of a connection to a sentinel (TLS, its password)."""
        self._name = name
        self._hosts = ", ".join(f"{host}:{port}" for host, port in sentinels)
        self._lock = threading.Lock()
        patience = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S}
        self._sentinels = Sentinel(sentinels, sentinel_kwargs={**options, **patience, "retry": Retry(NoBackoff(), 0)})
        self._place: Place | None = None
        self._looked_s = -LOOK_S

    def find(self) -> Place:
        """Raises redis-py's ConnectionError while no sentinel names one."""
        with self._lock:
            return self._ask()

    def has_left(self, place: Place) -> bool:
        """Whether another server is the primary by now, as far as a sentinel that answers knows."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_S:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    self._ask()
                self._looked_s = time.monotonic()
            return self._place not in (None, place)

    def _ask(self) -> Place:
        try:
            self._place = self._sentinels.discover_master(self._name)
        except MasterNotFoundError:  # its text is pages of settings
            raise ConnectionError(f"no sentinel at {self._hosts} tells where the primary `{self._name}` is") from None
        return self._place


def at_primary(connection_class: type[Any], primary: Primary) -> type[Any]:
    """The connection class, plain or TLS, that connects to wherever the primary is at the time."""

    class AtPrimary(connection_class):
        def _connect(self) -> Any:
            self.host, self.port = primary.find()
            return super()._connect()

        def is_left(self) -> bool:
            return primary.has_left((self.host, self.port))

    return AtPrimary
