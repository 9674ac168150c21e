"""An answer is worked out while its client waits for it, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request

CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; only the metrics see it."""

T = TypeVar("T")


async def while_connected(request: Request, answer: Awaitable[T]) -> T | None:
    """Returns None once the client has gone: its retry must not queue behind work that no client will read."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait({work, gone})  # so that the work is withdrawn before a client hears of the end


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
