"""Celery over Redis: small messages that say "there may be a task to begin". JSON, with MessagePack in it; no pickle.

What is true of a task stands in its record (broker/task_store.py). So a message may be lost, refused, doubled or late,
and no harm is done: a worker asks the record before it begins, and the record is found again without its message. For
that reason messages are acknowledged by being read (`ack_emulation` is off): kombu's own bookkeeping beside the queue
ends workers at `maxmemory`, runs finished tasks again after a restart of Redis, and needs scripts of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from queue import Empty
from typing import Any

from celery import Celery
from kombu.entity import Exchange, Queue
from kombu.exceptions import KombuError
from kombu.transport import redis
from kombu.utils.json import dumps

from broker import keys
from broker.connection import script_texts
from broker.connection.address import read_address
from broker.connection.client import connect_within
from broker.connection.server_errors import CLIENT_ERRORS, is_of_another_type
from contracts.encoding.wire import changed, encode
from contracts.errors import DeadlineExceeded, InvalidInput
from contracts.settings import StackSettings
from contracts.tasks.kinds import QUEUE_NAME, TASK_ID, TaskQueue

TASK_NAMES = {queue: f"onbeat.{queue.value}" for queue in TaskQueue}
"""Queue → the name of Celery's task that begins one of ours from it. Limits of time go by these."""
MAX_WAITING = 1000
"""Messages in a queue that no worker reads. The records of those that are left out are found by the look."""
MESSAGE_LIFE_S = 30.0
"""An older message is dropped: its record was found again meanwhile."""
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 3.0
"""A command lasts no longer; a worker's blocking read lasts a second. A server that hangs counts as away (I8)."""
MEDIA_TYPE = "application/x-msgpack"
YEARS = range(2000, 3000)
"""When a message may end: Celery overflows where another time zone has it in year 0 or 10000."""
OF_TCP = ("host", "port", "socket_keepalive", "socket_keepalive_options")
"""Options that a connection to a socket file isn't given."""

log = logging.getLogger(__name__)


class Secret(str):
    """A text that isn't shown where Celery or kombu show their settings."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'********'"


class Message(redis.Channel.Message):
    """A message of ours. Anything else raises here, before the worker counts it as one that is in work.

    Any holder of the password of Celery's user may have sent it, so it is built anew from the few parts that ours have:
    no other header of Celery's (a time to wait for, a limit, a compression, a callback) does anything.
    """

    def __init__(self, payload: Any, channel: Any = None) -> None:
        name = payload["headers"]["task"]
        message_id = payload["headers"]["id"]
        body = payload["body"]
        tag = payload["properties"]["delivery_tag"]
        expires = payload["headers"].get("expires")
        if not all(isinstance(part, str) for part in (name, message_id, body, tag)):
            raise ValueError("its parts aren't text")
        if expires is not None and datetime.fromisoformat(expires).year not in YEARS:
            raise ValueError("its end is no time of ours")
        ours = {
            "body": body,
            "content-encoding": "binary",
            "content-type": MEDIA_TYPE,
            "headers": {"lang": "py", "task": name, "id": message_id, "root_id": message_id, "expires": expires},
            "properties": {
                "delivery_tag": tag,
                "body_encoding": "base64",
                "delivery_info": {"exchange": "", "routing_key": name},
            },
        }
        super().__init__(ours, channel=channel, accept={MEDIA_TYPE})
        arguments, keywords, _ = self.decode()
        is_ours = name in TASK_NAMES.values() and len(arguments) == 1 and not keywords
        if not is_ours or not TASK_ID.fullmatch(arguments[0]):
            raise ValueError("it names no task")


class Channel(redis.Channel):
    """Reads and writes messages, and nothing beside them: a Redis at `maxmemory` refuses kombu's own bookkeeping."""

    Message = Message
    do_restore = False
    """False: a message that was read and not begun isn't put back. Its record is found again."""

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        """Reads the address as the broker does: kombu has other words for a socket file and for sentinels, and other
        defaults of TLS."""
        address = read_address(self.connection.client.transport_options["address"], field="ONBEAT_CELERY_URL")
        self.connection_class = address.pop("connection_class", self.connection_class)
        # No role may name its library to the server: it would stand in ACL LOG at each connection.
        parameters = super()._connparams(asynchronous) | address | {"driver_info": None}
        if "path" in address:
            for of_tcp in OF_TCP:
                parameters.pop(of_tcp, None)
        return parameters

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        """Notes nothing: each message names its queue."""

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """Returns no bindings: each message names its queue."""
        return []

    def _put(self, queue: str, message: Any, **_: Any) -> None:
        """Sends through a function of ours, which goes on at `maxmemory` and has bounds in number and length."""
        if not QUEUE_NAME.fullmatch(queue):
            raise ValueError(f"{queue} is no queue of ours")
        arguments = encode({"queue": queue, "max_waiting": MAX_WAITING})
        with self.conn_or_acquire() as client:
            # Of the command no word is a key: the prefix of kombu's client is not put before any.
            outcome: Any = client.execute_command(
                "FCALL", script_texts.function_name("send_message"), 0, "", "", arguments, dumps(message)
            )
        if outcome and outcome[0] == b"full":
            log.warning("%d messages wait in the queue %s: this one is left out", MAX_WAITING, queue)

    def _brpop_read(self, **options: Any) -> Any:
        """Drops what isn't a message of ours, by which kombu would end the worker."""
        try:
            return super()._brpop_read(**options)
        except Empty:
            raise
        except CLIENT_ERRORS as error:
            if not is_of_another_type(error):
                raise
            self._clear_queues()
            raise Empty from None
        except Exception as error:  # kombu raises many kinds over bytes that are no message
            log.warning("drops a message that can't be read: %s", f"{type(error).__name__}: {error}"[:300])
            raise Empty from None  # kombu's word for no message

    def _clear_queues(self) -> None:
        """Removes what stands under a queue's name and is no queue: the worker would read no message ever after."""
        with self.conn_or_acquire() as client:
            for queue in self.active_queues:
                try:
                    client.llen(queue)
                except CLIENT_ERRORS as error:
                    if not is_of_another_type(error):
                        raise
                    log.warning("removes %s%s, which is no queue: %s", self.global_keyprefix, queue, error)
                    client.delete(queue)


class Transport(redis.Transport):
    """Celery finds it by its name in the configuration."""

    Channel = Channel
    can_parse_url = True
    """kombu shows the address as it was given, less the password."""


def check_address(settings: StackSettings) -> None:
    """Connects once to the server of Celery's messages: Celery would try a wrong password for ever.

    Raises:
        InvalidInput: The address is none, or the server refuses its user.
        DeadlineExceeded: Nothing answers.
    """
    if not settings.celery_url:
        return
    try:
        connect_within(changed(settings, redis_url=settings.celery_url)).close()
    except (InvalidInput, DeadlineExceeded) as error:
        cure = "is ONBEAT_CELERY_URL right?"
        raise type(error)(error.problem, field="ONBEAT_CELERY_URL", cure=cure) from error


def make_celery_app(settings: StackSettings, queues: Sequence[str] = ()) -> Celery:
    """Makes the app of gateways and clocks, which only send, and of workers.

    Args:
        settings: Theirs; `celery_url` is the address of Celery's user, "" takes `redis_url`.
        queues: What a worker takes from.

    Raises:
        InvalidInput: The address is none.
    """
    url = settings.celery_url or settings.redis_url
    read_address(url, field="ONBEAT_CELERY_URL" if settings.celery_url else "ONBEAT_REDIS_URL")
    # The channel reads the address from the options: kombu can't read, nor show, that of several sentinels.
    shown = "sentinel://" if "+sentinel://" in url else url
    app = Celery("onbeat", broker=shown, set_as_current=False)
    app.conf.update(
        broker_transport=f"{__name__}:Transport",
        accept_content=["msgpack"],
        task_serializer="msgpack",
        result_serializer="msgpack",
        event_serializer="msgpack",
        task_queues=[queue_named(name) for name in queues],
        task_default_queue=TaskQueue.CHECK.value,
        task_create_missing_queues=False,
        # Results are in the records of tasks.
        task_ignore_result=True,
        # Acknowledged before it runs, and never sent again by Celery: see the head.
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        # One broadcast would end a fleet; a task is cancelled by its record.
        worker_enable_remote_control=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_max_tasks_per_child=1,
        broker_connection_timeout=CONNECT_TIMEOUT_S,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # A server that is a replica after a failover, or loads its data, refuses what is read: by another connection.
        broker_channel_error_retry=True,
        # Fewer messages at once after a lost connection; what is read is acknowledged, so none is out.
        worker_enable_prefetch_count_reduction=False,
        broker_transport_options={
            "address": Secret(url),
            "global_keyprefix": keys.celery_queue(""),
            "ack_emulation": False,
            "priority_steps": [0],
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": ANSWER_TIMEOUT_S,
            "health_check_interval": ANSWER_TIMEOUT_S,
            "socket_keepalive": True,
            # A message is tried so often: its sender must not wait for a server that is away.
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0.2,
            "interval_max": 0.2,
        },
    )
    return app


def queue_named(name: str) -> Queue:
    """Returns a queue of Celery's; it is reached by its name, through no exchange."""
    return Queue(name, exchange=Exchange("", type="direct"), routing_key=name, no_declare=True)


class TaskMessages:
    """Sends messages. Thread-safe."""

    def __init__(self, settings: StackSettings) -> None:
        """Raises InvalidInput."""
        self._app = make_celery_app(settings)

    def send(self, task_id: str, queue: str) -> bool:
        """Says that there may be a task to begin. A message that can't be sent is a warning: the record stands.

        Args:
            task_id: The task.
            queue: Its queue, perhaps of one host: `files@node-3`.

        Returns:
            False where the server is away, or refuses it.
        """
        name = TASK_NAMES[TaskQueue(queue.partition("@")[0])]
        try:
            self._app.send_task(
                name, args=[task_id], queue=queue_named(queue), expires=MESSAGE_LIFE_S, retry=False, ignore_result=True
            )
        except (KombuError, *CLIENT_ERRORS) as error:
            log.warning(
                "no message about %s could be sent; a worker finds the task in the store: %s", task_id, str(error)[:300]
            )
            return False
        return True

    def close(self) -> None:
        """Closes the connections."""
        self._app.close()
