"""`python -m reward_service`: serves until SIGTERM or SIGINT. Exit code 2: a bad setting, or a port in use.

It begins by forgetting the secrets of others that its launcher may have put into its environment: it runs other
people's code in cages, whose keepers must not be able to find them. Imports wait until then.
"""

from __future__ import annotations

import os
import sys

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)

DEFAULT_PORT = 8100
OTHERS = ("REDIS_URL", "REDIS_PASSWORD", "API_KEY", "CACHE_KEY", "ENGINE_API_KEY", "JUDGE_KEY")
OTHERS_SECRETS = {f"ONBEAT_{name}{end}" for name in OTHERS for end in ("", "_FILE")}


def main() -> int:
    if any(os.environ.get(secret) for secret in OTHERS_SECRETS):
        own = {variable: value for variable, value in os.environ.items() if variable not in OTHERS_SECRETS}
        # The environment that a process was started with stays readable in /proc for as long as it lives.
        os.execve(sys.executable, sys.orig_argv, own)
    from fastapi import FastAPI

    from contracts.settings import StackSettings
    from onbeat.base.http.server import serve
    from onbeat.base.process.crash_points import arm
    from reward_service.app import create_app

    def make_app(settings: StackSettings) -> FastAPI:
        arm(settings.crash_at)
        return create_app(settings)

    return serve("reward_service", make_app, default_port=DEFAULT_PORT)


if __name__ == "__main__":
    sys.exit(main())
