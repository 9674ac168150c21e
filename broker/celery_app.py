"""Celery over the same Redis: small messages that ask a consumer to see to a job's trainer. MessagePack, no pickle.

A message only says "look": what is true stands in the job store and the fence. So it may be lost, or refused
by a Redis at `maxmemory` (consumers look every other second anyway), delivered twice, or late (it expires), and no harm
is done. It is acknowledged before it runs.
"""

from __future__ import annotations

import logging
from datetime import datetime
from queue import Empty
from typing import Any

from celery import Celery
from kombu.exceptions import KombuError, OperationalError
from kombu.transport import redis

from broker.connection.address import read_address
from contracts.errors import BrokerUnavailable
from contracts.settings import StackSettings

ENSURE_TRAINER = "onbeat.ensure_trainer"
"""Argument: the job id."""
SWEEP = "onbeat.sweep"
"""Sees to jobs that have ended: what becomes of their keys and files."""
QUEUE = "onbeat"
MAX_WAITING = 1000
"""Messages in a queue that no consumer reads: no more are sent, since one that comes finds all there is."""
MESSAGE_LIFE_S = 30.0
"""An older message is dropped unread: consumers have looked since."""
KEY_PREFIX = "onbeat:celery:"
CONNECT_TIMEOUT_S = 2.0
NUM_ARGUMENTS = {ENSURE_TRAINER: 1, SWEEP: 0}
MEDIA_TYPE = "application/x-msgpack"
YEARS = range(2000, 3000)
"""When a message may end: Celery overflows where another time zone has it in year 0 or 10000."""
UNREADABLE_MESSAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, KombuError)
"""What Kombu raises over a message that isn't one."""
ANSWER_TIMEOUT_S = 3.0
"""One command lasts no longer; a worker's blocking read lasts a second. A server that hangs counts as away (I8)."""

OF_TCP = ("host", "port", "socket_keepalive", "socket_keepalive_options")
"""What a connection to a socket file isn't told."""

log = logging.getLogger(__name__)


class Secret(str):
    """Isn't shown where Celery or Kombu show their settings."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'********'"


class Message(redis.Channel.Message):
    """One of our messages. What isn't one raises here, before the worker counts it as one that is in work.

    Any holder of the password of Celery's user may have sent it, so it is built anew from the few parts that ours have:
    no other header of Celery's (a time to wait for, a limit, a compression) does anything.
    """

    def __init__(self, payload: Any, channel: Any = None) -> None:
        task, message_id = payload["headers"]["task"], payload["headers"]["id"]
        body, tag = payload["body"], payload["properties"]["delivery_tag"]
        expires = payload["headers"].get("expires")
        if not all(isinstance(part, str) for part in (task, message_id, body, tag)):
            raise ValueError("its parts aren't text")
        if expires is not None and datetime.fromisoformat(expires).year not in YEARS:
            raise ValueError("its end is no time of ours")
        ours = {
            "body": body,
            "content-encoding": "binary",
            "content-type": MEDIA_TYPE,
            "headers": {"lang": "py", "task": task, "id": message_id, "root_id": message_id, "expires": expires},
            "properties": {
                "delivery_tag": tag,
                "body_encoding": "base64",
                "delivery_info": {"exchange": "", "routing_key": QUEUE},
            },
        }
        super().__init__(ours, channel=channel, accept={MEDIA_TYPE})
        arguments, keywords, _ = self.decode()
        if NUM_ARGUMENTS.get(task) != len(arguments) or keywords:
            raise ValueError("it asks for nothing that there is")


class Channel(redis.Channel):
    """Writes nothing but messages: a Redis at `maxmemory` refuses what Kombu notes beside them, and the worker ends."""

    Message = Message

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        """Reads the address as the broker does: Kombu has other words for a socket file and for sentinels, and other
        defaults of TLS."""
        address = read_address(self.connection.client.transport_options["address"])
        self.connection_class = address.pop("connection_class", self.connection_class)
        parameters = super()._connparams(asynchronous) | address
        if "path" in address:
            for of_tcp in OF_TCP:
                parameters.pop(of_tcp, None)
        return parameters

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        """Notes nothing: see `get_table`."""

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """Every message goes to the one queue that there is."""
        return [(QUEUE, "", QUEUE)]

    def _put(self, queue: str, message: Any, **how: Any) -> None:
        """Leaves a message out where so many wait already: Redis' memory has a bound while there is no consumer."""
        if self._size(queue) < MAX_WAITING:
            super()._put(queue, message, **how)

    def _brpop_read(self, **options: Any) -> Any:
        """Drops what isn't a message of ours, by which Kombu would end the worker."""
        try:
            return super()._brpop_read(**options)
        except UNREADABLE_MESSAGE as error:
            log.warning("drops a message that can't be read: %s", f"{type(error).__name__}: {error}"[:300])
            raise Empty from None  # Kombu's word for no message


class Transport(redis.Transport):
    Channel = Channel
    can_parse_url = True
    """Kombu shows the address as it was given, less the password."""


def make_celery_app(settings: StackSettings) -> Celery:
    """The app of gateways (which only send) and consumers (which take the messages). Raises InvalidInput."""
    url = settings.celery_url or settings.redis_url
    read_address(url, field="ONBEAT_CELERY_URL" if settings.celery_url else "ONBEAT_REDIS_URL")
    # The channel reads the address from the options: Kombu can't read, nor show, that of several sentinels.
    shown = "sentinel://" if "+sentinel://" in url else url
    app = Celery("onbeat", broker=shown, set_as_current=False)
    app.conf.update(
        broker_transport="broker.celery_app:Transport",
        accept_content=["msgpack"],
        task_serializer="msgpack",
        result_serializer="msgpack",
        event_serializer="msgpack",
        task_ignore_result=True,
        task_acks_late=False,
        task_default_queue=QUEUE,
        task_create_missing_queues=False,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_enable_remote_control=False,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        broker_connection_timeout=CONNECT_TIMEOUT_S,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "address": Secret(url),
            "global_keyprefix": KEY_PREFIX,
            # Our messages are acknowledged before they run: what a consumer has read need not be kept for another one.
            "ack_emulation": False,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": ANSWER_TIMEOUT_S,
            "health_check_interval": ANSWER_TIMEOUT_S,
            "socket_keepalive": True,
            # A publication is tried so often: a gateway must not wait for a server that is away, consumers look anyway.
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0.2,
            "interval_max": 0.2,
        },
    )
    return app


class TrainerRequests:
    """The gateway's side: asks any consumer to see to a job. Thread-safe."""

    def __init__(self, settings: StackSettings) -> None:
        self._app = make_celery_app(settings)

    def ensure_trainer(self, job_id: str) -> None:
        """Raises BrokerUnavailable; consumers find the job without the message, a little later."""
        try:
            self._app.send_task(ENSURE_TRAINER, args=[job_id], expires=MESSAGE_LIFE_S, retry=False, ignore_result=True)
        except OperationalError as error:
            raise BrokerUnavailable(f"the message for {job_id} could not be sent: {error}") from error

    def sweep(self) -> None:
        """Raises BrokerUnavailable; consumers do without the message, a minute later."""
        try:
            self._app.send_task(SWEEP, expires=MESSAGE_LIFE_S, retry=False, ignore_result=True)
        except OperationalError as error:
            raise BrokerUnavailable(f"the message for a sweep could not be sent: {error}") from error

    def close(self) -> None:
        self._app.close()
