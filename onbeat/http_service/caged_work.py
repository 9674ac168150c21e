"""A service that runs other people's code in cages: how its process begins, and ends.

Imports wait until the process is rid of the secrets that aren't its own: it may have to begin once more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from contracts.settings import StackSettings

GRACE_S = 5.0
"""Requests in flight may finish for this long after a signal."""


def serve(
    name: str,
    make_app: Callable[[], Callable[[StackSettings], FastAPI]],
    *,
    default_port: int,
    others_secrets: Sequence[str],
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code: 2 for a bad setting, or a port in use.

    make_app: imports what makes the application. others_secrets: variables that a launcher may have put into the
    environment, and that a cage's keeper must not be able to find.
    """
    if any(os.environ.get(secret) for secret in others_secrets):
        kept = {variable: value for variable, value in os.environ.items() if variable not in others_secrets}
        # The environment that a process was started with stays readable in /proc for as long as it lives.
        os.execve(sys.executable, sys.orig_argv, kept)
    import logging

    import uvicorn

    from contracts.errors import InvalidInput
    from contracts.settings import settings_from
    from onbeat.http_service.listening import listen
    from onbeat.http_service.server import server_config
    from onbeat.process.crash_points import arm
    from onbeat.process.signals import exit_cleanly_on_signals
    from onbeat.telemetry import logs

    create_app = make_app()
    try:
        settings = settings_from(os.environ)
        arm(settings.crash_at)
        app = create_app(settings)
        listener = listen(settings.host, settings.port or default_port)
    except InvalidInput as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2
    logs.configure(settings, service=name)
    exit_cleanly_on_signals()
    config = server_config(app, grace_s=GRACE_S)
    logging.getLogger(name).info("listening on http://%s:%d", *listener.getsockname()[:2])
    uvicorn.Server(config).run(sockets=[listener])
    return 0
