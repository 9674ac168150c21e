"""`python -m onbeat.tasks.flower`: Flower, Celery's page, over the events of workers (extra `flower`).

It shows workers that have ONBEAT_TASK_EVENTS, their tasks by the ids of Celery's messages, and how many messages wait.
It only reads: what it could ask of workers is off, in Flower and in Redis. Nothing needs it: `onbeat jobs --tasks` and
the page of Onbeat have the records of tasks, which are what is true.

Options are Flower's, as FLOWER_… variables; FLOWER_BASIC_AUTH=NAME:PASSWORD must be among them.

Exit 0: it was asked to end. 2: a bad setting, no password, or Flower isn't installed.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from contracts.errors import InvalidInput, OnbeatError
from contracts.settings import StackSettings, settings_from
from onbeat.base.telemetry import logs

PASSWORD = "FLOWER_BASIC_AUTH"
PORT = 5555


def main() -> int:
    """Returns the exit code."""
    try:
        settings = settings_from(os.environ)
        logs.configure(settings, service="flower")
        name, _, password = os.environ.get(PASSWORD, "").partition(":")
        if not name or not password:
            raise InvalidInput("is not NAME:PASSWORD", field=PASSWORD, cure="set it: this page shows ids of tasks")
        if find_spec("flower") is None:
            raise InvalidInput("Flower is not installed", field="flower", cure="pip install 'onbeat[flower]'")
        serve(settings)
    except OnbeatError as error:
        sys.stderr.write(f"flower: {error}\n")
        return 2
    return 0


def serve(settings: StackSettings) -> None:
    """Serves the page until a signal. Raises InvalidInput."""
    from flower.app import Flower
    from flower.command import apply_env_options, extract_settings
    from flower.urls import settings as tornado_settings
    from tornado.options import options

    from onbeat.tasks.events import make_events_app

    options.port = settings.port or PORT
    options.address = settings.host
    apply_env_options()
    options.read_only = True
    # Workers answer no question: it would wait for them.
    options.inspect_timeout = 1.0
    extract_settings()
    page = Flower(capp=make_events_app(settings), options=options, **tornado_settings)

    def end(_: int, __: FrameType | None) -> None:
        page.io_loop.add_callback_from_signal(page.stop)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    page.start_http_server()
    page.start()


if __name__ == "__main__":
    sys.exit(main())
