"""The OpenAPI document (`/openapi.json`): an endpoint names the records that it takes and answers; the rest follows.

Their schemas, the key, and links from a job's id to the operations that take one are added to the whole document.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from contracts.answers import MEDIA_TYPE, ProblemDetails
from contracts.encoding.docstrings import field_docstrings
from contracts.encoding.wire import Record
from contracts.events import JobEvent
from contracts.spec.algorithm import PluginLoss
from contracts.spec.trainer import PluginTracker
from onbeat.base.http.access import OPEN_PATHS
from onbeat.base.http.bodies import JSON

KEY_SCHEME = "key"
KEY = {"type": "http", "scheme": "bearer", "description": "The stack's API key"}
REFERENCE = "#/components/schemas/{name}"
LONE_TABLES = frozenset({PluginLoss.__name__, PluginTracker.__name__})
"""Tables with a `type` that has no other: msgspec reads them without it, though its schema asks for it."""
JOB_IN = {"JobStatus": "/job_id", "JobList": "/jobs/0/job_id"}
"""Schema that holds a job's id → where, as a JSON pointer."""

_records: set[type] = {*get_args(JobEvent)}
"""Records that routes name, and the events, which a stream sends as its data."""
_lists: dict[str, dict[str, Any]] = {}


def record(kind: type) -> dict[str, Any]:
    """The schema of a record of contracts/, by reference."""
    _records.add(kind)
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def list_of(name: str, member: str, items: dict[str, Any]) -> dict[str, Any]:
    """An object with one list, by reference under a name of its own."""
    _lists[name] = {"type": "object", "required": [member], "properties": {member: {"type": "array", "items": items}}}
    return {"$ref": REFERENCE.format(name=name)}


def answer(schema: dict[str, Any], description: str = "", *, media_type: str = JSON) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {name: {"type": "string"} for name in ("event", "data", "id")},
}
"""An event that a stream sends, as tools read the schema of this media type."""


REFUSAL = answer(record(ProblemDetails), "What is wrong, by field (RFC 9457)", media_type=MEDIA_TYPE)
REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": REFUSAL, "5XX": REFUSAL}
"""Errors that every endpoint may answer."""


def answers(schema: dict[str, Any], description: str = "", *, media_type: str = JSON) -> dict[str, Any]:
    """Arguments of a route that answers this with status 200."""
    return {"responses": {200: answer(schema, description, media_type=media_type)}}


def takes(kind: type, *, required: bool, **more: Any) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is this record."""
    return {"requestBody": {"required": required, "content": {JSON: {"schema": record(kind), **more}}}}


def describe_contracts(app: FastAPI) -> None:
    """Has the app describe itself with our records; the document is made once, at the first request for it."""
    app.openapi = cache(lambda: _document(app))


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas_of_answers())
    components["securitySchemes"] = {KEY_SCHEME: KEY}
    document["security"] = [{KEY_SCHEME: []}]
    for path in OPEN_PATHS:
        document["paths"][path]["get"]["security"] = []
    operations = [(path, operation) for path, methods in document["paths"].items() for operation in methods.values()]
    of_a_job = [operation["operationId"] for path, operation in operations if "{job_id}" in path]
    for _, operation in operations:
        operation["responses"].pop("422", None)  # FastAPI's own form of it, which no route answers with
        for response in operation["responses"].values():
            _link(response, of_a_job)
    return document


def schemas_of_answers() -> dict[str, Any]:
    """Returns the JSON schemas of every record that an endpoint takes or answers, by its name."""
    _, schemas = msgspec.json.schema_components(_records, ref_template=REFERENCE)
    classes = {kind.__name__: kind for kind in _subclasses(Record)}
    for name, schema in schemas.items():
        if name in LONE_TABLES:
            schema["required"].remove("type")
        docstrings = field_docstrings(classes[name]) if name in classes else {}
        for field, text in docstrings.items():
            if field in schema.get("properties", {}):
                schema["properties"][field]["description"] = text
    return {**schemas, **_lists}


def _subclasses(kind: type) -> Iterator[type]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _link(response: dict[str, Any], operations: list[str]) -> None:
    """An answer that holds a job's id leads to the operations that take one."""
    reference = response.get("content", {}).get(JSON, {}).get("schema", {}).get("$ref", "")
    where = JOB_IN.get(reference.rpartition("/")[2])
    if where:
        response["links"] = {
            name: {"operationId": name, "parameters": {"job_id": f"$response.body#{where}"}} for name in operations
        }
