"""`python -m environment_service`: serves until SIGTERM or SIGINT. Exit code 2: a bad setting, or a port in use.

It begins by forgetting the secrets of others that its launcher may have put into its environment.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from onbeat.http_service.caged_work import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from contracts.settings import StackSettings

DEFAULT_PORT = 8200
OTHERS_SECRETS = (
    "ONBEAT_REDIS_URL",
    "ONBEAT_CELERY_URL",
    "ONBEAT_API_KEY",
    "ONBEAT_REWARD_KEY",
    "ONBEAT_ENGINE_API_KEY",
    "ONBEAT_JUDGE_KEY",
)


def main() -> int:
    return serve("environment_service", _make_app, default_port=DEFAULT_PORT, others_secrets=OTHERS_SECRETS)


def _make_app() -> Callable[[StackSettings], FastAPI]:
    from environment_service.app import create_app

    return create_app


if __name__ == "__main__":
    sys.exit(main())
