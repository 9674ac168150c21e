"""`python -m gateway`: serves until SIGTERM or SIGINT. Exit code 2: a bad setting, a port in use, no Redis."""

from __future__ import annotations

import asyncio
import sys

from fastapi import FastAPI

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from broker.connection.client import connect_within
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.services import Services
from onbeat.base.http.access import AccessRules
from onbeat.base.http.server import serve

DEFAULT_PORT = 8000
REQUEST_PATIENCE_S = 3.0
"""How long a request tries to reach a Redis that is being restarted."""


def main() -> int:
    closing = asyncio.Event()

    def make_app(settings: StackSettings) -> FastAPI:
        AccessRules.of(settings, key=settings.api_key, key_setting="ONBEAT_API_KEY")
        broker = connect_within(settings, patience_s=REQUEST_PATIENCE_S)
        broker.check()
        return create_app(Services(settings=settings, broker=broker, closing=closing))

    # Event streams end with the first signal: they would hold the shutdown for all of its grace.
    return serve("gateway", make_app, default_port=DEFAULT_PORT, on_signal=closing.set)


if __name__ == "__main__":
    sys.exit(main())
