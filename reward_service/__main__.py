"""`python -m reward_service`: serves until SIGTERM or SIGINT. Exit code 2: a bad setting, or a port in use.

It begins by forgetting the secrets of others that its launcher may have put into its environment: it runs other
people's code in cages, whose keepers must not be able to find them. Imports wait until then.
"""

from __future__ import annotations

import os
import sys

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)

DEFAULT_PORT = 8100
OTHERS_SECRETS = (
    "ONBEAT_REDIS_URL",
    "ONBEAT_API_KEY",
    "ONBEAT_CACHE_KEY",
    "ONBEAT_ENGINE_API_KEY",
    "ONBEAT_JUDGE_KEY",
)
GRACE_S = 5.0
"""Requests in flight may finish for this long after a signal."""


def main() -> int:
    if any(os.environ.get(secret) for secret in OTHERS_SECRETS):
        own = {variable: value for variable, value in os.environ.items() if variable not in OTHERS_SECRETS}
        # The environment that a process was started with stays readable in /proc for as long as it lives.
        os.execve(sys.executable, sys.orig_argv, own)
    import logging

    import uvicorn

    from contracts.errors import InvalidInput
    from contracts.settings import settings_from
    from onbeat.http_service.server import listen, server_config
    from onbeat.process.crash_points import arm
    from onbeat.process.signals import exit_cleanly_on_signals
    from onbeat.telemetry import logs
    from reward_service.app import create_app

    try:
        settings = settings_from(os.environ)
        arm(settings.crash_at)
        app = create_app(settings)
        listener = listen(settings.host, settings.port or DEFAULT_PORT)
    except InvalidInput as error:
        sys.stderr.write(f"reward_service: {error}\n")
        return 2
    logs.configure(settings, service="reward_service")
    exit_cleanly_on_signals()
    logging.getLogger("reward_service").info("listening on http://%s:%d", *listener.getsockname()[:2])
    uvicorn.Server(server_config(app, grace_s=GRACE_S)).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
