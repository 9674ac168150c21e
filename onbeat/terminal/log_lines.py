"""A trainer's log from the gateway, as lines: the last ones, and those that come."""

from __future__ import annotations

from collections.abc import Iterator

from onbeat.client.gateway import LOG_BYTES, GatewayClient

END = 2**53
"""Beyond every file: the gateway answers with its size."""
LONGEST_LINE = 64 * 1024
"""A line that does not end is shown in parts."""


class LogLines:
    """Follows one log; `rest` is called again and again."""

    def __init__(self, client: GatewayClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._at = 0
        self._part = ""

    def last(self, num_lines: int) -> list[str]:
        """The last whole lines, and what is behind them where a line has not ended; then `rest` goes on there."""
        size = self._client.log(self._job_id, after=END).size
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
        """The whole lines that came since."""
        at = self._at
        text = self._read(at)
        if self._at < at:  # another file, as of a job that was made again under a restored server
            self._part = ""
        *whole, self._part = (self._part + text).split("\n")
        if len(self._part) > LONGEST_LINE:
            whole, self._part = [*whole, self._part], ""
        return whole

    def unfinished(self) -> list[str]:
        """What is left of a line that was never ended."""
        part, self._part = self._part, ""
        return [part] if part else []

    def _read(self, after: int) -> str:
        return "".join(self._parts(after))

    def _parts(self, after: int) -> Iterator[str]:
        while True:
            part = self._client.log(self._job_id, after=after)
            yield part.text
            self._at = part.next
            if part.next >= part.size or part.next == part.after:
                return
            after = part.next
