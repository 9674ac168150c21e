"""Kombu's Redis transport without scripts: Celery's user may run none (broker/connection/roles.py).

Kombu takes messages that were not acknowledged for an hour, and puts them back on their queue; its lock for that is a
script. Ours are acknowledged before they run, and may be lost (celery_app.py): there is nothing to put back.
"""

from __future__ import annotations

from kombu.transport import redis


class QoS(redis.QoS):
    def restore_visible(self, start: int = 0, num: int = 10, interval: int = 10) -> None:
        """Nothing is put back."""


class Channel(redis.Channel):
    QoS = QoS


class Transport(redis.Transport):
    Channel = Channel
