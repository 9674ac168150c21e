"""Errors over HTTP: RFC 9457 problem details that name the field, and the cure where there is one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from contracts.answers import MEDIA_TYPE, problem_body
from contracts.errors import HubFetching, OnbeatError, Refusal, SpecRefused, Unavailable

log = logging.getLogger(__name__)


class Problem(Exception):
    """Ends a request with an error status. Handlers and Access raise it; the app answers it as a JSON problem."""

    def __init__(self, status: HTTPStatus, detail: str, *, field: str | None = None, cure: str | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.field = field
        self.cure = cure


def problem_response(
    status: int,
    detail: str,
    *,
    field: str | None = None,
    cure: str | None = None,
    refusals: Sequence[Refusal] = (),
) -> Response:
    body = problem_body(status, detail, field=field, cure=cure, refusals=refusals)
    return Response(body, status_code=status, media_type=MEDIA_TYPE)


def answer_with_problems(app: FastAPI, routers: Sequence[APIRouter], *, service: str) -> None:
    """Has the app answer problems, the stack's errors and the framework's errors in the form of a problem.

    Args:
        app: The app.
        routers: The routers of its routes.
        service: The service's name, for the answer to a defect.
    """
    app.state.routes = [route for router in routers for route in router.routes]
    app.state.service = service
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(OnbeatError, _on_onbeat_error)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_defect)


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return problem_response(error.status, error.detail, field=error.field, cure=error.cure)


async def _on_onbeat_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OnbeatError)
    status = error.status
    # A client asks for what is being fetched every few seconds; the fetch itself logs its begin and its end.
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, HubFetching):
        log.warning("%s %s: %s", request.method, request.url.path, error)
    refusals = error.refusals if isinstance(error, SpecRefused) else ()
    response = problem_response(status, error.problem, field=error.field, cure=error.cure, refusals=refusals)
    if isinstance(error, Unavailable):
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


async def _on_bad_parameter(request: Request, error: Exception) -> Response:
    """Answers a path or query parameter that FastAPI refuses."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # ("query", "state"), and ("query", "state", 1) of a parameter that is given several times: the name comes second.
    place = first["loc"]
    name = place[1] if len(place) > 1 else ""
    return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, str(first["msg"]), field=str(name))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = problem_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    response.headers.update(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = _allowed(request)
        if allowed:
            response.headers["Allow"] = allowed
    return response


def _allowed(request: Request) -> str:
    """Returns the methods of all routes with this path: the framework's own header names those of the first alone.

    A path that a route spells out is no job's id, though a pattern takes it too.
    """
    routes: list[BaseRoute] = request.app.state.routes
    matching = [
        route for route in routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    spelt_out = [route for route in matching if not route.param_convertors]
    return ", ".join(sorted({method for route in spelt_out or matching for method in route.methods or ()}))


async def _on_defect(request: Request, error: Exception) -> Response:
    """Answers an unexpected exception, which Starlette raises again, so that the server logs it with its traceback."""
    detail = f"{request.app.state.service} has a defect; its log says more"
    return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, detail)
