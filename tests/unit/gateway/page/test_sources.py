"""The page has the present types of answers, and a description of each key of a spec to show in its editor."""

from __future__ import annotations

import re
from typing import Any

from gateway.openapi import schemas_of_answers
from page.make_types import TYPES, text


def test_the_types_of_the_page_are_those_of_the_records() -> None:
    made = text(schemas_of_answers())
    assert TYPES.read_text() == made, "a record has changed: `make page` makes its type, and builds the page"


def reachable(schemas: dict[str, Any], name: str, seen: set[str]) -> set[str]:
    if name not in seen:
        seen.add(name)
        for inner in re.findall(r"#/components/schemas/(\w+)", repr(schemas[name])):
            reachable(schemas, inner, seen)
    return seen


def test_every_key_that_the_editor_offers_has_a_description() -> None:
    schemas = schemas_of_answers()
    for name in reachable(schemas, "JobSpec", set()):
        for field, schema in schemas[name].get("properties", {}).items():
            is_tag = field in ("type", "transport") and schema.get("enum")
            assert is_tag or schema.get("description"), f"{name}.{field} has no description"
