"""The process that asks a service for work, in the service's log.

    client: asker_headers ─ x-onbeat-process: onbeat-producer-2 ─▶ service: asker_of ─▶ WorkLog ─┬▶ refused: a line
                                                                                                 └▶ answered: counted,
                                                                                                    a line a minute

The service's key says that one of the stack's processes asks; the header says which one. A process can write any name
there, so no right hangs on it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence

from contracts.settings import StackSettings
from onbeat.base.telemetry.logs import shown

HEADER = "x-onbeat-process"
NAME_FORM = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""A process' name, or its host's name, of 64 characters at most, with a number behind it."""
SUMMARY_S = 60.0
MAX_COUNTED = 64
"""Most pairs of a name and a route that are counted by themselves until the next line."""
OTHERS = "others"

log = logging.getLogger(__name__)


def asker_headers(settings: StackSettings) -> dict[str, str]:
    """Returns the header in which a client names its process; {} where its host's name has another form."""
    name = settings.process_name()
    return {HEADER: name} if NAME_FORM.fullmatch(name) else {}


def asker_of(names: Sequence[str]) -> str:
    """Returns the name of the client's process that a request carries.

    Args:
        names: The values of each header HEADER of the request.

    Returns:
        The name; "" without one, with two, or with one of another form.
    """
    return names[0] if len(names) == 1 and NAME_FORM.fullmatch(names[0]) else ""


class WorkLog:
    """The answered requests of a service that works for others: counted, and logged in one line a minute.

    Access creates it, and adds each answered request. Only the service's event loop may call it.
    """

    def __init__(self, *, summary_s: float = SUMMARY_S) -> None:
        self._summary_s = summary_s
        self._counts: dict[tuple[str, str], int] = {}
        """(name of who asked, method and path) → how many of its requests were answered since the last line."""
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def count(self, who: str, route: str) -> None:
        """Counts an answered request; the first after a line begins the next line's time."""
        if self._timer is None:
            self._since_s = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(self._summary_s, self.say)
        key = who, route
        if key not in self._counts and len(self._counts) >= MAX_COUNTED:
            key = OTHERS, OTHERS
        self._counts[key] = self._counts.get(key, 0) + 1

    def say(self) -> None:
        """Logs what was counted; nothing where nothing was. Called at the end of the service, too."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts = self._counts
        self._counts = {}
        if not counts:
            return
        seconds = time.monotonic() - self._since_s
        requests: dict[str, dict[str, int]] = {}
        for (who, route), number in sorted(counts.items()):
            requests.setdefault(who, {})[route] = number
        in_words = "; ".join(f"{who}: {_in_words(routes)}" for who, routes in requests.items())
        facts = {"seconds": round(seconds), "requests": requests}
        log.info("answered in %.0f s: %s", seconds, in_words, extra={"facts": facts})


def _in_words(routes: Mapping[str, int]) -> str:
    return ", ".join(f"{shown(route)} {number} times" for route, number in routes.items())
