"""What outlives the server, or the primary: writes that are on its disk, and on replicas.

persisted    a commit, a job: on disk here and on R replicas          WAITAOF 1 R, up to a second each
replicated   a trainer's lease, and a version: in memory of R replicas      WAIT R, a round trip

R is ONBEAT_REDIS_REPLICAS. A primary that is cut off from the others goes on answering for a while; with R = 0 what it
accepts then is lost with it, also where it was called persisted.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from redis import exceptions

from broker.connection.script_texts import function_name
from broker.connection.server_errors import UNKNOWN_FUNCTION
from contracts.encoding.wire import encode
from contracts.errors import BrokerUnavailable, InvalidInput

if TYPE_CHECKING:
    from broker.connection.client import Broker

LOOK_S = 0.8
"""One look at the disk lasts so long: a server that syncs every second has done so within two."""
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
    """Thread-safe."""

    def __init__(self, broker: Broker, *, num_replicas: int = 0) -> None:
        self._broker = broker
        self._num_replicas = num_replicas
        self._can_tell = True
        """Whether the server keeps a file, and knows what of it is on its disk."""
        self._asks_at_s = 0.0
        """A time of time.monotonic: before it, a server that never syncs is not asked again."""

    def check(self) -> None:
        """Looks whether a primary that was cut off would stop. Part of `Broker.check`.

        Raises InvalidInput where fewer replicas are connected than are asked for, or where the server would accept
        writes without them. A line of the log says where there are some, and none is asked for.
        """
        state: Any = self._broker.redis.info("replication")
        connected = state.get("connected_slaves", 0)
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

    def persisted(self) -> bool:
        """True once all writes before this call are in the server's file, and in those of the replicas; False where it
        can't tell, and says so once: then the replicas hold them in memory.

        Raises BrokerUnavailable where it can, and a disk or a replica takes nothing within the broker's patience.
        """
        with self._broker.call():
            if self._on_disk():
                return True
            self.until_replicated()
        return False

    def until_replicated(self) -> None:
        """Returns when the replicas hold all writes before it. Part of a call; raises redis-py's errors and
        BrokerUnavailable."""
        while self._num_replicas and self._after_a_write("WAIT", self._num_replicas) < self._num_replicas:
            self._give_up_at_the_end(f"has not {self._num_replicas} replicas that hold its writes")

    def _on_disk(self) -> bool:
        num_quiet = 0
        while self._can_tell and time.monotonic() >= self._asks_at_s:
            if self._waits_for_disk():
                self._asks_at_s = 0.0
                return True
            num_quiet = num_quiet + 1 if self._can_tell and self._is_quiet() else 0
            if num_quiet == QUIET_LOOKS:
                self._expects_no_sync()
                return False
            if self._can_tell:
                there = f" here and on {self._num_replicas} replicas" if self._num_replicas else ""
                self._give_up_at_the_end(f"has not put its writes on disk{there}")
        return False

    def _waits_for_disk(self) -> bool:
        """Whether the append-only files had it all within some seconds (WAITAOF)."""
        try:
            here, there = self._after_a_write("WAITAOF", 1, self._num_replicas)
        except exceptions.ResponseError as error:
            if not any(words in str(error) for words in NO_FILE):
                raise
            self._can_tell = False
            self._says_unknown("it keeps no append-only file, or is too old to say")
            return False
        return here >= 1 and there >= self._num_replicas

    def _after_a_write(self, command: str, *arguments: int) -> Any:
        """The answer of a command that waits for the writes of its connection. Raises redis-py's errors."""
        left_ms = max(1, int(1000 * min(LOOK_S, self._broker.patience.left_s)))
        told = encode({"command": "SET", "name": PERSISTED})
        write = ("FCALL", function_name("write"), "0", "", "", told, "1")
        try:
            return self._broker.connections.ask_after(write, (command, *map(str, arguments), str(left_ms)))
        except exceptions.ResponseError as error:
            if UNKNOWN_FUNCTION not in str(error):
                raise
            self._broker.write("SET", PERSISTED, 1)  # which brings the library
            return self._after_a_write(command, *arguments)

    def _give_up_at_the_end(self, problem: str) -> None:
        if self._broker.patience.left_s <= 0:
            raise BrokerUnavailable(f"Redis {problem}", cure="is a disk full or slow, or a replica away?")

    def _is_quiet(self) -> bool:
        """Whether nothing is on its way to the disk, though that was waited for."""
        state: Any = self._broker.redis.info("persistence")
        is_at_work = state.get("aof_pending_bio_fsync") or state.get("aof_rewrite_in_progress")
        is_sound = not is_at_work and state.get("aof_last_write_status") == "ok"
        return is_sound and not self._num_replicas and self._broker.patience.left_s > 0

    def _expects_no_sync(self) -> None:
        """For a while: its operator may change that, and a server that was paused may have looked so."""
        is_new = not self._asks_at_s
        self._asks_at_s = time.monotonic() + ASK_AGAIN_S
        if is_new:
            self._says_unknown("it leaves that to the operating system (appendfsync no)")

    def _says_unknown(self, why: str) -> None:
        log.warning("Redis can't say what is on its disk: %s; a crash of its machine may lose more than a second", why)
