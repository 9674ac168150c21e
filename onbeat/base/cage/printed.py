"""The prints of a reward or an environment: its process sends them with the next answer, and a log has them.

    print(…) ─▶ Printed, in the cage ─▶ ScorerAnswer, Answers ─▶ PrintLog ─▶ log of the reward service

Both ends are bounded: code that prints without end costs its own lines and nothing else.
"""

from __future__ import annotations

import io
import logging
import time
from collections import OrderedDict

MAX_PRINTED_CHARS = 4096
"""Most characters that go with one answer; what is printed beyond is counted."""
MAX_LINE_CHARS = 1000
NULL_DEVICE = 1
"""Descriptor that the nursery leaves open."""
MINUTE_S = 60.0
MAX_CHARS_A_MINUTE = 32 * 1024
"""Most characters of one job that a thread logs in a minute."""
MAX_JOBS = 64
"""Jobs of which a thread remembers what they have printed."""

log = logging.getLogger(__name__)


class Printed(io.TextIOBase):
    """The standard output and standard error of a caged process, in place of the null device."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._num_chars = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Returns the null device of the cage, for programs that the code starts: what they print is dropped."""
        return NULL_DEVICE

    def write(self, text: str) -> int:
        room = MAX_PRINTED_CHARS - self._num_chars
        if room > 0:
            self._parts.append(text[:room])
        self._num_chars += len(text)
        return len(text)

    def take(self) -> str:
        """Returns what was printed since the last call, with what can't be encoded escaped."""
        text = "".join(self._parts)
        num_left_out = self._num_chars - len(text)
        if num_left_out:
            text += f"\n({num_left_out} more characters)"
        self._parts = []
        self._num_chars = 0
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


class PrintLog:
    """The log lines for what rewards or an environment print to one thread, which calls `write`."""

    def __init__(self) -> None:
        self._written: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Job → begin of its minute on the clock of `time.monotonic`, and the characters that were logged in it."""

    def write(self, owner: str, printed: str) -> None:
        """Logs each line that is not empty, with the job in front; control characters are escaped.

        Args:
            owner: The job, or the request, that the process works for.
            printed: `Printed.take` of the process.
        """
        if not printed:
            return
        now_s = time.monotonic()
        began_s, num_chars = self._written.pop(owner, (now_s, 0))
        if now_s - began_s > MINUTE_S:
            began_s, num_chars = now_s, 0
        for line in printed.splitlines():
            shown = _escaped(line)[:MAX_LINE_CHARS]
            if not shown.strip():
                continue
            was_below = num_chars < MAX_CHARS_A_MINUTE
            num_chars += len(shown)
            if num_chars <= MAX_CHARS_A_MINUTE:
                log.info("%s prints: %s", owner, shown)
            elif was_below:
                log.info("%s prints more than %d characters a minute; the rest is left out", owner, MAX_CHARS_A_MINUTE)
                num_chars = max(num_chars, MAX_CHARS_A_MINUTE)
        self._written[owner] = (began_s, num_chars)
        while len(self._written) > MAX_JOBS:
            self._written.popitem(last=False)


def _escaped(line: str) -> str:
    """Returns the line with each character that doesn't print, but tabs, as an escape."""
    return "".join(
        character if character.isprintable() or character == "\t" else ascii(character)[1:-1] for character in line
    )
