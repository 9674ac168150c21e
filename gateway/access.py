"""The bearer key (RFC 6750): compared in constant time, never logged."""

from __future__ import annotations

import hmac
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from gateway.problems import Problem

bearer = HTTPBearer(auto_error=False, description="The stack's API key")


def require_configured_key(settings: StackSettings) -> bytes:
    """Raises InvalidInput for a stack without a key: an open gateway would let anybody start jobs."""
    if not settings.api_key:
        raise InvalidInput("is not set", field="ONBEAT_API_KEY", cure="give the gateway a long random key")
    return settings.api_key.encode()


def has_key(request: Request, credentials: HTTPAuthorizationCredentials | None) -> bool:
    """Whether the request bears the stack's key."""
    given = credentials.credentials.encode() if credentials else b""
    return hmac.compare_digest(given, request.app.state.api_key)


async def bears_key(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> bool:
    """For a route that tells more to who has the key."""
    return has_key(request, credentials)


async def require_key(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> None:
    """Runs before the body is read. Raises Problem 401."""
    if not has_key(request, credentials):
        what = "the key is wrong" if credentials else "a bearer key is needed"
        raise Problem(HTTPStatus.UNAUTHORIZED, what, field="Authorization", cure="send `Authorization: Bearer KEY`")
