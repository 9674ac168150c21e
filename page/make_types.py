"""page/src/types.ts, made from the records of contracts/ that the gateway answers: `python -m page.make_types`.

gateway's /openapi.json ─▶ components.schemas ─▶ an interface each, under the record's own name
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.app import ROUTERS
from gateway.openapi import schemas_of_answers

TYPES = Path(__file__).parent / "src" / "types.ts"
HEADER = "// Made by `python -m page.make_types` from the records of contracts/: do not edit.\n"
NAMES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}


def of_schema(schema: dict[str, Any]) -> str:
    """The TypeScript type of what this schema describes."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    for key, joint in (("anyOf", " | "), ("oneOf", " | "), ("allOf", " & ")):
        if key in schema:
            return "(" + joint.join(dict.fromkeys(map(of_schema, schema[key]))) + ")"
    if "enum" in schema:
        return "(" + " | ".join(json.dumps(value) for value in schema["enum"]) + ")"
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("type") == "array":
        prefix = schema.get("prefixItems")
        if prefix:
            return "[" + ", ".join(map(of_schema, prefix)) + "]"
        return f"{of_schema(schema.get('items') or {})}[]"
    if "properties" in schema:
        return "{ " + " ".join(_members(schema)) + " }"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {of_schema(values) if isinstance(values, dict) else 'unknown'}>"
    return NAMES.get(schema.get("type", ""), "unknown")


def _members(schema: dict[str, Any], *, answered: bool = True) -> list[str]:
    """answered: a record in an answer has all its fields, but those that a job leaves out, which have no default."""
    required = set(schema.get("required", ()))
    members = []
    for name, member in schema["properties"].items():
        always = name in required or (answered and "default" in member)
        members.append(
            f"{json.dumps(name) if not name.isidentifier() else name}{'' if always else '?'}: {of_schema(member)};"
        )
    return members


def text(schemas: dict[str, Any]) -> str:
    parts = [HEADER]
    for name, schema in sorted(schemas.items()):
        if "properties" in schema:
            body = "\n".join(f"  {member}" for member in _members(schema))
            parts.append(f"export interface {name} {{\n{body}\n}}\n")
        else:
            parts.append(f"export type {name} = {of_schema(schema)};\n")
    return "\n".join(parts)


def main() -> None:
    assert ROUTERS, "to import the endpoints is what names their records"
    TYPES.write_text(text(schemas_of_answers()))


if __name__ == "__main__":
    main()
