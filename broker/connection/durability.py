"""Writes that outlive the server, or the primary: those that are on its disk, and on replicas.

persisted    a commit, a job                on disk here and on R replicas   WAITAOF 1 R, up to a second
replicated   a trainer's lease, a version   in memory of R replicas          WAIT R, a round trip

R is ONBEAT_REDIS_REPLICAS. A primary that is cut off from the others goes on answering for a while; with R = 0 what it
accepts then is lost with it, also where it was called persisted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis import exceptions

from broker.connection.deadlines import SLICE_S
from broker.connection.script_texts import function_name
from broker.connection.server_errors import UNKNOWN_FUNCTION
from contracts.encoding.wire import encode
from contracts.errors import BrokerUnavailable, InvalidInput

if TYPE_CHECKING:
    from broker.connection.client import Broker

LOOK_S = 0.8
"""The length of one look at the disk: a server that syncs every second has done so within two."""
QUIET_LOOKS = 3
"""In a row, with nothing on its way to the disk: this server never syncs. One that was paused looks so once."""
ASK_AGAIN_S = 60.0
"""So long a server that never syncs is not waited for."""
PERSISTED = "persisted"
"""The name of the key that is written, since a server waits for the writes of the asking connection only."""
REPLICATED = frozenset({"acquire_trainer", "publish_weights", "renew_trainer"})
"""Functions whose answer holds once the replicas have what they wrote: a lease, under which files are removed, and a
version."""
NO_FILE = ("appendonly is disabled", "unknown command")

log = logging.getLogger(__name__)


class Durability:
    """Confirms that writes are on disk, or on replicas.

    Each Broker creates its own; the job store and the sides of a job ask it before they answer. Thread-safe.
    """

    def __init__(self, broker: Broker, *, num_replicas: int = 0) -> None:
        self._broker = broker
        self._num_replicas = num_replicas
        self._asks_at_s = 0.0
        """A time of time.monotonic: before it, a server that can't tell, or never syncs, is not asked again."""

    def check(self) -> None:
        """Looks whether the present primary would stop where it was cut off. Part of `Broker.check`.

        Raises InvalidInput where fewer replicas than are asked for are connected for the broker's patience, or where
        the server would accept writes without them. Where there are some and none is asked for, the log says so.
        """
        while True:
            state: Any = self._broker.redis.info("replication")
            connected = state.get("connected_slaves", 0)
            if connected >= self._num_replicas or self._broker.patience.left_s <= 0:
                break
            self._broker.patience.pause(LOOK_S)  # a replica that starts, or a failover that ends
        if connected < self._num_replicas:
            raise InvalidInput(
                f"asks for {self._num_replicas}, and the server has {connected}",
                field="ONBEAT_REDIS_REPLICAS",
                cure="start them, or ask for fewer",
            )
        if connected and not self._num_replicas:
            log.warning("Redis has replicas, and ONBEAT_REDIS_REPLICAS is 0: a failover may lose what is confirmed")
        # The server says it where `min-replicas-to-write` is above 0.
        if self._num_replicas and "min_slaves_good_slaves" not in state:
            raise InvalidInput(
                "leads to a server that accepts writes without its replicas: cut off from them, it would lose them all",
                field="ONBEAT_REDIS_URL",
                cure="set min-replicas-to-write 1 and min-replicas-max-lag 1 on each server",
            )

    def ask(self, command: Sequence[str | int | bytes]) -> list[Any]:
        """Calls a function that may be repeated, and answers once the replicas hold what it wrote. Part of a call.

        Function and question go over one connection, and are repeated together: at another primary the replicas would
        confirm what only the one before had. Raises redis-py's errors and BrokerUnavailable.
        """
        if not self._num_replicas:
            return self._broker.connections.ask(*command)
        while True:
            wait = ("WAIT", str(self._num_replicas), str(self._look_ms()))
            answer, num_holding = self._broker.connections.ask_all(command, wait)
            if num_holding >= self._num_replicas:
                return answer
            self._give_up_at_the_end(f"has not {self._num_replicas} replicas that hold its writes")

    def persisted(self, *, is_read_again: bool = False) -> bool:
        """Waits until all writes of this thread before this call are on disk.

        Args:
            is_read_again: The caller looks afterwards whether they are there.

        Returns:
            True once they are in the server's file, and in those of the replicas. False where the server can't tell,
            which is logged once: then the replicas hold them in memory.

        Raises:
            BrokerUnavailable: A disk or a replica takes nothing within the broker's patience, or, unless
                is_read_again, another server has become the primary since the last of them was answered.
        """
        place = None if is_read_again else self._broker.connections.place
        with self._broker.call():
            on_disk = self._on_disk(place)
            if not on_disk and self._num_replicas:
                self.ask(self._a_write())
                self._check_place(place)
        return on_disk

    def _on_disk(self, place: object) -> bool:
        num_quiet = 0
        while time.monotonic() >= self._asks_at_s:
            try:
                here, there = self._waited_for_disk()
            except exceptions.ResponseError as error:
                if not any(words in str(error) for words in NO_FILE):
                    raise
                return self._cannot_tell("it keeps no append-only file, or is too old to say")
            self._check_place(place)
            if here >= 1 and there >= self._num_replicas:
                self._asks_at_s = 0.0
                return True
            if here < 1 and self._is_quiet():
                num_quiet += 1
            else:
                num_quiet = 0
            if num_quiet == QUIET_LOOKS:
                return self._cannot_tell("it leaves that to the operating system (appendfsync no)")
            on_replicas = ""
            if self._num_replicas:
                on_replicas = f" here and on {self._num_replicas} replicas"
            self._give_up_at_the_end(f"has not put its writes on disk{on_replicas}")
        return False

    def _waited_for_disk(self) -> tuple[int, int]:
        """Returns how many files here, and how many replicas', had it all within a look (WAITAOF). Raises redis-py's
        errors."""
        wait = ("WAITAOF", "1", str(self._num_replicas), str(self._look_ms()))
        try:
            _, (here, there) = self._broker.connections.ask_all(self._a_write(), wait)
        except exceptions.ResponseError as error:
            if UNKNOWN_FUNCTION not in str(error):
                raise
            self._broker.write("SET", PERSISTED, 1)  # which brings the library
            return self._waited_for_disk()
        return here, there

    def _a_write(self) -> Sequence[str | bytes]:
        return ("FCALL", function_name("write"), "0", "", "", encode({"command": "SET", "name": PERSISTED}), "1")

    def _look_ms(self) -> int:
        """Returns the milliseconds that the server may wait: it answers before the call is over."""
        return max(1, int(1000 * min(LOOK_S, self._broker.patience.left_s - SLICE_S)))

    def _check_place(self, place: object) -> None:
        if place not in (None, self._broker.connections.place):
            raise BrokerUnavailable(
                "another server is the primary since this was written, and may not have it", cure="repeat the command"
            )

    def _give_up_at_the_end(self, problem: str) -> None:
        if self._broker.patience.left_s <= SLICE_S:
            raise BrokerUnavailable(
                f"Redis {problem}", cure="check free disk space, the disk's speed, and that each replica is running"
            )

    def _is_quiet(self) -> bool:
        """Returns True where nothing is on its way to the disk, though that was waited for."""
        state: Any = self._broker.redis.info("persistence")
        is_at_work = state.get("aof_pending_bio_fsync") or state.get("aof_rewrite_in_progress")
        return not is_at_work and state.get("aof_last_write_status") == "ok" and self._broker.patience.left_s > 0

    def _cannot_tell(self, why: str) -> bool:
        """Notes that the server can't tell, and returns False.

        It is asked again after ASK_AGAIN_S: an operator or a failover may change that, and a server that was paused may
        have looked so.
        """
        is_new = not self._asks_at_s
        self._asks_at_s = time.monotonic() + ASK_AGAIN_S
        if is_new:
            log.warning(
                "Redis can't say what is on its disk: %s; a crash of its machine may lose more than a second", why
            )
        return False
