"""The log of a job's trainers at a terminal: its last lines, and those that come."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.answers import LogPart
from onbeat.client.gateway import GatewayClient

LOG_BYTES = 256 * 1024
"""Bytes of the log that one request brings at most."""
END = 2**53
"""A place beyond the end of every file: the gateway answers with the file's size."""
LONGEST_LINE = 64 * 1024
"""Characters. A line that does not end is shown in parts of this length."""


class LogLines:
    """Reads the log of a job's trainers from the gateway. Call `last` once, then `rest` again and again."""

    def __init__(self, client: GatewayClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._at = 0
        self._part = ""

    def last(self, num_lines: int) -> list[str]:
        """Returns the last whole lines. `rest` goes on behind them, with a line that has not ended yet."""
        size = self._part_after(END).size
        num_bytes = LOG_BYTES // 4
        while True:
            start = max(0, size - num_bytes)
            text = self._read(start)
            lines = text.split("\n")
            if start == 0 or len(lines) > num_lines + 1:
                break
            num_bytes *= 4
        *whole, self._part = lines
        return whole[-num_lines:] if num_lines else []

    def rest(self) -> list[str]:
        """Returns the whole lines that came since the last call."""
        at = self._at
        text = self._read(at)
        if self._at < at:  # another file, as of a job that was made again under a restored server
            self._part = ""
        *whole, self._part = (self._part + text).split("\n")
        if len(self._part) > LONGEST_LINE:
            whole, self._part = [*whole, self._part], ""
        return whole

    def unfinished(self) -> list[str]:
        """Returns what came of a line that has not ended, and forgets it."""
        part, self._part = self._part, ""
        return [part] if part else []

    def _read(self, after: int) -> str:
        return "".join(self._parts(after))

    def _part_after(self, after: int) -> LogPart:
        return self._client.log_part(self._job_id, after=after, limit=LOG_BYTES)

    def _parts(self, after: int) -> Iterator[str]:
        while True:
            part = self._part_after(after)
            yield part.text
            self._at = part.next
            if part.next >= part.size or part.next == part.after:
                return
            after = part.next
