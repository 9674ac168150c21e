"""Errors over HTTP: RFC 9457 problem details that name the field."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from contracts.wire import Record, encode_json

MEDIA_TYPE = "application/problem+json"


class ProblemDetails(Record, frozen=True, kw_only=True):
    """The body of every answer of 400 and above."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    field: str | None = None
    """Path of the offending field in the request, e.g. "items[3].reference"; null where no field is at fault."""


class Problem(Exception):
    """Ends a request with an error status."""

    def __init__(self, status: HTTPStatus, detail: str, *, field: str | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field


def problem_response(status: int, detail: str, *, field: str | None = None) -> Response:
    details = ProblemDetails(title=HTTPStatus(status).phrase, status=status, detail=detail, field=field)
    return Response(encode_json(details), status_code=status, media_type=MEDIA_TYPE)


def answer_with_problems(app: FastAPI) -> None:
    """Makes the app answer its own problems, and the framework's 404 and 405, in this form."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return problem_response(error.status, error.detail, field=error.field)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = problem_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    response.headers.update(error.headers or {})
    return response
