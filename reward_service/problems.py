"""Errors over HTTP: RFC 9457 problem details that name the field."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from contracts.errors import OnbeatError
from contracts.problems import MEDIA_TYPE, problem_body

log = logging.getLogger(__name__)


class Problem(Exception):
    """Ends a request with an error status."""

    def __init__(self, status: HTTPStatus, detail: str, *, field: str | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field


def problem_response(status: int, detail: str, *, field: str | None = None, cure: str | None = None) -> Response:
    body = problem_body(status, detail, field=field, cure=cure)
    return Response(body, status_code=status, media_type=MEDIA_TYPE)


def answer_with_problems(app: FastAPI) -> None:
    """Makes the app answer its own problems, the stack's errors, and the framework's, in this form."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(OnbeatError, _on_onbeat_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_defect)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return problem_response(error.status, error.detail, field=error.field)


async def _on_onbeat_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OnbeatError)
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.warning("%s %s: %s", request.method, request.url.path, error)
    return problem_response(error.status, error.problem, field=error.field, cure=error.cure)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = problem_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    response.headers.update(error.headers or {})
    return response


async def _on_defect(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this answer, and the server logs it with its traceback."""
    return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, "the reward service has a defect; its log says more")
