"""What the OpenAPI document (`/openapi.json`) says beyond the routes' own types: schemas, and who needs the key."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST

from contracts.events import AuditRecord, IterationMetrics
from contracts.jobs import JobStatus, ResumeRequest
from contracts.monitor import StreamReport
from contracts.problems import MEDIA_TYPE, ProblemDetails
from contracts.spec import JobSpec
from telemetry.http_access import OPEN_PATHS

KEY_SCHEME = "key"
KEY = {"type": "http", "scheme": "bearer", "description": "The stack's API key"}
REFERENCE = "#/components/schemas/{name}"
CONTRACTS = (JobSpec, JobStatus, ResumeRequest, IterationMetrics, StreamReport, AuditRecord, ProblemDetails)


def _reference(name: str) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=name)}


def _list_of(member: str, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [member], "properties": {member: {"type": "array", "items": items}}}


LISTS = {
    "JobList": _list_of("jobs", _reference("JobStatus")),
    "IterationList": _list_of("iterations", _reference("IterationMetrics")),
    "AuditChain": _list_of(
        "records",
        {"allOf": [_reference("AuditRecord"), {"type": "object", "properties": {"digest": {"type": "string"}}}]},
    ),
}


def _answer(description: str, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


REFUSAL = _answer("What is wrong, by field (RFC 9457)", MEDIA_TYPE, _reference("ProblemDetails"))


def answers(name: str) -> dict[str, Any]:
    """Arguments of a route that answers the named schema."""
    return {"responses": {200: _answer("", "application/json", _reference(name)), "4XX": REFUSAL, "5XX": REFUSAL}}


SUBMIT: dict[str, Any] = {
    "responses": {
        201: _answer("The new job", "application/json", _reference("JobStatus")),
        200: _answer("The job that this Idempotency-Key made before", "application/json", _reference("JobStatus")),
        "4XX": REFUSAL,
        "5XX": REFUSAL,
    },
    "openapi_extra": {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _reference("JobSpec")}}},
        "parameters": [{"name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string"}}],
    },
}
RESUME: dict[str, Any] = {
    **answers("JobStatus"),
    "openapi_extra": {
        "requestBody": {"required": False, "content": {"application/json": {"schema": _reference("ResumeRequest")}}}
    },
}
EVENTS: dict[str, Any] = {
    "responses": {
        200: _answer("Events to the job's final state", "text/event-stream", {"type": "string"}),
        "4XX": REFUSAL,
        "5XX": REFUSAL,
    }
}


REMOVE: dict[str, Any] = {"responses": {204: {"description": "It is gone"}, "4XX": REFUSAL, "5XX": REFUSAL}}
METRICS: dict[str, Any] = {
    "responses": {
        200: _answer("Prometheus text format", CONTENT_TYPE_LATEST.partition(";")[0], {"type": "string"}),
        "4XX": REFUSAL,
        "5XX": REFUSAL,
    }
}


def describe_contracts(app: FastAPI) -> None:
    """Adds the key and the schemas that the routes refer to; the document is made once, at the first request for it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, schemas = msgspec.json.schema_components(CONTRACTS, ref_template=REFERENCE)
            components = made.setdefault("components", {})
            components.setdefault("schemas", {}).update({**schemas, **LISTS})
            components["securitySchemes"] = {KEY_SCHEME: KEY}
            made["security"] = [{KEY_SCHEME: []}]
            for path in OPEN_PATHS:
                made["paths"][path]["get"]["security"] = []
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document
