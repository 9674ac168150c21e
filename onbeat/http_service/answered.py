"""What the answer of an HTTP service, or none, says of the fault: the service's, that of who asks, or the request's."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

import httpx

from contracts.errors import Unavailable
from onbeat.http_service.outgoing import said

NEVER_ASKED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)
"""No byte of the request was sent, so that it can't be the cause."""
OF_THE_MOMENT = frozenset({408, 425, 429})
"""Refusals that another moment mends; any other 4xx but those below speaks of the request."""
OF_WHO_ASKS = frozenset({401, 403, 404, 407, 421})
"""Refusals of a key, or of a service that isn't there: whatever this process asks is refused."""

Away = TypeVar("Away", bound=Unavailable)


def unanswered(error: httpx.RequestError | TimeoutError, kind: type[Away]) -> Away:
    """The error of a request without an answer: in doubt where it was sent, for its service may hang or die of it."""
    away = kind(f"no answer: {type(error).__name__} {error}".rstrip())
    return away if isinstance(error, NEVER_ASKED) else in_doubt(away)


def in_doubt(away: Away) -> Away:
    """The same error, of which what was asked may be the cause."""
    away.is_doubtful = True
    return away


def check_status(answer: httpx.Response, kind: type[Away], *, of: str) -> bool:
    """Whether the request is answered; False for a refusal that speaks of the request itself.

    of: the service, in words. Raises `kind` for the others; a 500 is in doubt, for the request may be its cause.
    """
    status = answer.status_code
    if status == HTTPStatus.OK:
        return True
    if status in OF_WHO_ASKS:
        raise kind(f"{of} refuses this process with {status}: {said(answer)}")
    if 400 <= status < 500 and status not in OF_THE_MOMENT:
        return False
    away = kind(f"{of} answered {status}: {said(answer)}")
    raise in_doubt(away) if status == HTTPStatus.INTERNAL_SERVER_ERROR else away
