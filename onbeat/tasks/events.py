"""Celery's events: what a worker says of itself and of its tasks, and what Flower hears. Off by default.

    worker ── PUBLISH, user celery ──▶ onbeat:celery:/0.celeryev/… ── PSUBSCRIBE, user flower ──▶ Flower

No process waits for an event, and one that no process hears is gone. Remote control stays off: no worker listens to it.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, bootsteps
from celery.app.control import Control
from kombu.transport import redis

from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskQueue
from onbeat.tasks import messages

HEARTBEAT_S = 10.0
"""How often a worker says that it lives. Flower takes one for dead that has been silent for twice as long."""


def send_events(app: Celery) -> None:
    """Has the worker of this app say what it does.

    Celery's own heartbeat of a worker tries for ever to reach a server that hangs. This one is sent between two reads,
    and bounded as each message is (`messages.make_celery_app`).
    """
    app.conf.worker_send_task_events = True
    steps: Any = app.steps
    steps["consumer"].add(HeartbeatStep)


class HeartbeatStep(bootsteps.StartStopStep):
    """Says every HEARTBEAT_S that the worker lives."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    timer: Any = None

    def start(self, parent: Any) -> None:
        """Celery calls it at each connection to the server."""

        def say() -> None:
            parent.event_dispatcher.send("worker-heartbeat", freq=HEARTBEAT_S)

        say()
        self.timer = parent.timer.call_repeatedly(HEARTBEAT_S, say)

    def stop(self, parent: Any) -> None:
        """Celery calls it when the connection is lost, and at the end."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class EventChannel(messages.Channel):
    """Hears events, and writes nothing: its user in Redis may not."""

    Message = redis.Channel.Message

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        """Notes which channels of Redis this queue of events stands for; kombu would note it in Redis, too."""
        self._fanout_queues[queue] = (exchange, routing_key.replace("#", "*"))

    def _delete(self, queue: str, *_: Any, **__: Any) -> None:
        """Deletes nothing: there is no list of this name."""


class EventTransport(messages.Transport):
    """Celery finds it by its name in the configuration."""

    Channel = EventChannel


class NoControl(Control):
    """Sends no command: workers would not hear it, and Flower's user in Redis may not send it."""

    def broadcast(self, *_: Any, **__: Any) -> list[Any]:
        """Has nothing to answer: remote control is off."""
        return []


def make_events_app(settings: StackSettings) -> Celery:
    """Makes the app of a program that shows events. Raises InvalidInput where the address is none."""
    app = messages.make_celery_app(settings, [queue.value for queue in TaskQueue])
    app.control_cls = NoControl
    app.conf.update(
        broker_transport=f"{__name__}:EventTransport",
        # kombu would see to the ends of these queues by scripts, in keys.
        event_queue_expires=None,
        event_queue_ttl=None,
    )
    return app
