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
from http_service.access import OPEN_PATHS

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


OF_A_JOB = ("get_job", "cancel", "resume", "remove", "job_metrics", "streams", "audit", "events")
"""Operations that take a job's id: an answer that holds one links to them."""
EXAMPLE_JOB = {
    "name": "addition",
    "iterations": 30,
    "model": {"path": "configs/models/two-digit-addition"},
    "dataset": {"type": "addition"},
    "reward": {"components": [{"type": "exact"}]},
    "rollout": {
        "batches_per_iteration": 4,
        "prompts_per_batch": 4,
        "group_size": 4,
        "sampling": {"max_new_tokens": 6},
    },
}


def _links(where: str) -> dict[str, Any]:
    """`where`: the job's id in the body, as a JSON pointer."""
    return {name: {"operationId": name, "parameters": {"job_id": f"$response.body#{where}"}} for name in OF_A_JOB}


def _job(description: str) -> dict[str, Any]:
    return _answer(description, "application/json", _reference("JobStatus")) | {"links": _links("/job_id")}


LOCATION = {"Location": {"description": "Path of the job", "schema": {"type": "string"}}}
SUBMIT: dict[str, Any] = {
    "responses": {
        201: _job("The new job") | {"headers": LOCATION},
        200: _job("The job that this Idempotency-Key made before") | {"headers": LOCATION},
        "4XX": REFUSAL,
        "5XX": REFUSAL,
    },
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _reference("JobSpec"),
                    "examples": {"the demo's model": {"value": EXAMPLE_JOB}},
                }
            },
        },
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "The same key and spec answer the same job, for 24 hours",
                "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,200}$"},
            }
        ],
    },
}
JOB: dict[str, Any] = {"responses": {200: _job("Its status now"), "4XX": REFUSAL, "5XX": REFUSAL}}
JOBS: dict[str, Any] = {
    "responses": {
        200: _answer("", "application/json", _reference("JobList")) | {"links": _links("/jobs/0/job_id")},
        "4XX": REFUSAL,
        "5XX": REFUSAL,
    }
}
RESUME: dict[str, Any] = {
    **JOB,
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


STATE: dict[str, Any] = {
    "responses": {
        200: _answer("", "application/json", {"type": "object", "properties": {"status": {"type": "string"}}}),
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
            for operation in [one for path in made["paths"].values() for one in path.values()]:
                operation["responses"].pop("422", None)  # FastAPI's own form of it, which no route answers with
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document
