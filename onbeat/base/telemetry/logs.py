"""Log lines of a process: human one-liners or one JSON object a line, on stderr. Payloads are never logged.

    2026-07-04T12:03:44+02:00 trainer        info    iteration 7 of 20: reward 0.610, 3834 tokens, 1.9 s, version 8
    {"at": "2026-07-04T10:03:44.200+00:00", "level": "info", "message": "iteration 7 of 20: …", "service": "trainer", …}

What a line shows may come from a model, a data set or a client: control characters are escaped, so that no text makes a
line of its own or moves a terminal's cursor.

Structured facts ride along as `extra={"facts": {...}}`, and those of a batch or a request by themselves
(correlation.py); the JSON form shows them as fields.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TextIO

from contracts.settings import StackSettings
from onbeat.base.telemetry.correlation import current_facts

QUIET_LOGGERS = ("httpx", "httpcore", "urllib3", "matplotlib", "filelock", "asyncio")
"""Libraries whose info lines repeat every request: they would bury ours."""


UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Controls of both sets, line breaks, marks that are invisible or turn the direction of writing, and half characters,
which no stream can encode."""


def configure(settings: StackSettings, *, service: str, stream: TextIO | None = None) -> None:
    """Makes the root logger write in `settings.log_format`; called once, first thing in a process.

    A second call replaces the first, so that a test or a forked process may call it again.
    """
    handler = logging.StreamHandler(stream) if stream else StderrHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonLines(service, settings.process_name()))
    else:
        handler.setFormatter(HumanLines(service, settings.name or service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


class StderrHandler(logging.StreamHandler[TextIO]):
    """A log handler that writes to the current `sys.stderr`: a live display replaces that stream to keep its panel
    whole.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


class ServiceFormatter(logging.Formatter):
    def __init__(self, service: str, name: str) -> None:
        """Takes the names that each line carries.

        Args:
            service: The service.
            name: The name of this process, where there may be several of the service.
        """
        super().__init__()
        self.service = service
        self.name = name


class HumanLines(ServiceFormatter):
    """The format for people: `2026-07-04T12:03:44+02:00 generator-1    info   message`; an exception follows on its own
    lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="seconds")
        line = f"{clock} {self.name:<14} {record.levelname.lower():<7} {shown(record.getMessage())}"
        if not record.exc_info:
            return line
        # Its lines are indented as Python does it: a line break in an error's own text can't pass for a log line.
        trace = "\n".join(
            f"  | {shown(trace_line)}" for trace_line in self.formatException(record.exc_info).split("\n")
        )
        return f"{line}\n{trace}"


class JsonLines(ServiceFormatter):
    """The format with a JSON object on each line; the text of an exception is a field, so that a line stays a line.

    Time, level and message come first: a terminal shows the beginning of a line, and cuts the rest.
    """

    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, object] = {
            "at": iso(record.created),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "service": self.service,
            "name": self.name,
        }
        last: dict[str, object] = {"logger": record.name, "at_s": round(record.created, 3)}
        facts = {**current_facts(), **getattr(record, "facts", {})}
        # A fact can't pass for a field that every line has.
        fields = own | {name: value for name, value in facts.items() if name not in own} | last
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        line = json.dumps(fields, default=str, ensure_ascii=False)
        return UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", line)  # JSON itself leaves these as they are


def iso(at_s: float) -> str:
    """Formats a Unix time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(round(at_s, 3), UTC).isoformat(timespec="milliseconds")


def shown(text: str) -> str:
    """Escapes a text into a line that a terminal shows as it is: the characters of UNSHOWN as `\\x1b`, `\\n` etc."""
    return UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
