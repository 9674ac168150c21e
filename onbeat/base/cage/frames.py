"""Messages over a socket to a process that may be hostile: four bytes of length, then MessagePack.

What it sends is bounded in size, and neither half a message nor a full buffer holds its reader up beyond a deadline.
"""

from __future__ import annotations

import socket
import struct
import time

LENGTH = struct.Struct("!I")
READ_BYTES = 64 * 1024


class Late(Exception):
    """Says that the other side let the deadline pass."""


class Gone(Exception):
    """Says that the other side has ended, closed its socket, or sent bytes that are no message."""


class Frames:
    """Sends and receives whole messages over one socket.

    Each side of a cage creates one for its end, and uses it from one thread. Deadlines are on the clock of
    `time.monotonic`; None waits for ever.
    """

    def __init__(self, sock: socket.socket, *, max_bytes: int) -> None:
        """Wraps a connected socket.

        Args:
            sock: The socket; from now on nothing else may read from it.
            max_bytes: The longest message that is received.
        """
        self._socket = sock
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, payload: bytes, *, deadline_s: float | None = None) -> None:
        """Raises Late, Gone."""
        self._wait_until(deadline_s)
        try:
            self._socket.sendall(LENGTH.pack(len(payload)) + payload)
        except TimeoutError as error:
            raise Late from error
        except OSError as error:
            raise Gone from error

    def receive(self, *, deadline_s: float | None = None) -> bytes:
        """Waits for the next message, until the deadline. Raises Late, Gone."""
        while (payload := self._take()) is None:
            self._read_more(deadline_s)
        return payload

    def send_handle(self, payload: bytes, handle: int) -> None:
        """Sends a message with an open file descriptor beside it. Raises Gone."""
        self._socket.settimeout(None)
        try:
            socket.send_fds(self._socket, [LENGTH.pack(len(payload)) + payload], [handle])
        except OSError as error:
            raise Gone from error

    def receive_with_handle(self) -> tuple[bytes, int | None]:
        """Returns the next message, and the descriptor beside it, to a reader that is sent one message at a time."""
        handle: int | None = None
        self._socket.settimeout(None)
        while (payload := self._take()) is None:
            try:
                data, handles, _, _ = socket.recv_fds(self._socket, READ_BYTES, 1)
            except OSError as error:
                raise Gone from error
            if not data:
                raise Gone
            if handles:
                handle = handles[0]
            self._buffer += data
        return payload, handle

    def _take(self) -> bytes | None:
        """Takes the first message out of the bytes that were read.

        Returns:
            The message; None while it is not all there.

        Raises:
            Gone: The message is too long.
        """
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > self._max_bytes:
            raise Gone(f"a message of {length} bytes")
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return payload

    def _read_more(self, deadline_s: float | None) -> None:
        self._wait_until(deadline_s)
        try:
            data = self._socket.recv(READ_BYTES)
        except TimeoutError as error:
            raise Late from error
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._buffer += data

    def _wait_until(self, deadline_s: float | None) -> None:
        if deadline_s is None:
            self._socket.settimeout(None)
            return
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise Late
        self._socket.settimeout(left_s)
