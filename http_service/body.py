"""Reading a request's body under a bound, for the services that take one."""

from __future__ import annotations

from collections.abc import AsyncIterable


async def read_within(chunks: AsyncIterable[bytes], *, declared: str, max_bytes: int) -> bytes | None:
    """The whole body; None as soon as it is known to be longer than max_bytes. declared: its Content-Length, or ""."""
    if declared.isdecimal() and int(declared) > max_bytes:
        return None
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            return None
    return bytes(body)
