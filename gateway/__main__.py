"""`python -m gateway`: serves until SIGTERM or SIGINT. Exit code 2: a bad setting, a port in use, no Redis."""

from __future__ import annotations

import logging
import os
import sys
from types import FrameType

import uvicorn

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import connect_within
from contracts.errors import OnbeatError
from contracts.settings import settings_from
from gateway.app import create_app
from gateway.services import Services
from onbeat.http_service.access import AccessRules
from onbeat.http_service.server import listen, server_config
from onbeat.process.signals import exit_cleanly_on_signals
from onbeat.telemetry import logs

DEFAULT_PORT = 8000
GRACE_S = 5.0
"""Requests in flight may finish for this long after a signal."""
REQUEST_PATIENCE_S = 3.0
"""How long a request tries to reach a Redis that is being restarted."""

log = logging.getLogger("gateway")


class Server(uvicorn.Server):
    """Ends the event streams with the first signal: they would hold the shutdown for all of its grace."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._services.closing.set()
        super().handle_exit(sig, frame)


def main() -> int:
    try:
        settings = settings_from(os.environ)
        logs.configure(settings, service="gateway")
        AccessRules.of(settings, key=settings.api_key, key_setting="ONBEAT_API_KEY")
        listener = listen(settings.host, settings.port or DEFAULT_PORT)
        broker = connect_within(settings, patience_s=REQUEST_PATIENCE_S)
        broker.check()
    except OnbeatError as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    services = Services(settings=settings, broker=broker)
    exit_cleanly_on_signals()
    config = server_config(create_app(services), grace_s=GRACE_S)
    log.info("listening on http://%s:%d", *listener.getsockname()[:2])
    Server(config, services).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
