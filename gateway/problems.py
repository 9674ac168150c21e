"""Errors over HTTP: RFC 9457 problem details that name the field, and the cure where there is one."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from contracts.errors import BrokerFull, Conflict, NotFound, OnbeatError, Unavailable
from contracts.wire import Record, encode_json

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2
STATUSES: tuple[tuple[type[OnbeatError], HTTPStatus], ...] = (
    (NotFound, HTTPStatus.NOT_FOUND),
    (Conflict, HTTPStatus.CONFLICT),
    (BrokerFull, HTTPStatus.INSUFFICIENT_STORAGE),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
)
"""Errors of the stack itself. What is wrong with a request is a `Problem`, raised where the request is read."""

log = logging.getLogger(__name__)


class ProblemDetails(Record, frozen=True, kw_only=True):
    """The body of every answer of 400 and above."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    field: str | None = None
    """Path of the offending field, e.g. "model.path"; null where no field is at fault."""
    cure: str | None = None
    """What to do about it."""


class Problem(Exception):
    """Ends a request with an error status."""

    def __init__(self, status: HTTPStatus, detail: str, *, field: str | None = None, cure: str | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field
        self.cure = cure


def problem_response(status: int, detail: str, *, field: str | None = None, cure: str | None = None) -> Response:
    details = ProblemDetails(title=HTTPStatus(status).phrase, status=status, detail=detail, field=field, cure=cure)
    return Response(encode_json(details), status_code=status, media_type=MEDIA_TYPE)


def answer_with_problems(app: FastAPI) -> None:
    """Makes the app answer its own problems, the stack's errors, and the framework's, in this form."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(OnbeatError, _on_onbeat_error)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_defect)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    response = problem_response(error.status, error.detail, field=error.field, cure=error.cure)
    if error.status is HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _on_onbeat_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OnbeatError)
    status = next((status for kind, status in STATUSES if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.warning("%s %s: %s", request.method, request.url.path, error)
    response = problem_response(status, error.problem, field=error.field, cure=error.cure)
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


async def _on_bad_parameter(request: Request, error: Exception) -> Response:
    """A path or query parameter that FastAPI refuses."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, str(first["msg"]), field=str(first["loc"][-1]))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = problem_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    response.headers.update(error.headers or {})
    return response


async def _on_defect(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, and the server logs it with its traceback."""
    return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway has a defect; its log says more")
