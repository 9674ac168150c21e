"""What the page takes from elsewhere is the present: the types of answers, and the words of a spec's schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gateway.openapi import schemas_of_answers
from page.make_types import TYPES, text

ROOT = Path(__file__).parents[4]
FORM = ROOT / "page" / "src" / "submit" / "schema.ts"
NAMED = ("properties",)
"""Keywords under which keys are names of fields."""
GIVEN = ("default", "enum", "required", "mapping")
"""Keywords whose values are no schemas."""


def test_the_types_of_the_page_are_those_of_the_records() -> None:
    made = text(schemas_of_answers())
    assert TYPES.read_text() == made, "a record has changed: `make page` makes its type, and builds the page"


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for key, inner in schema.items():
        if key in NAMED:
            found |= set().union(*map(keywords, inner.values()))
        elif key not in GIVEN:
            found |= keywords(inner)
    return found - {"propertyName", "mapping"}


def reachable(schemas: dict[str, Any], name: str, seen: set[str]) -> set[str]:
    if name not in seen:
        seen.add(name)
        for inner in re.findall(r"#/components/schemas/(\w+)", repr(schemas[name])):
            reachable(schemas, inner, seen)
    return seen


def test_the_form_checks_every_keyword_that_the_schema_of_a_spec_has() -> None:
    schemas = schemas_of_answers()
    of_spec = [schemas[name] for name in reachable(schemas, "JobSpec", set())]
    listed = FORM.read_text().partition("KEYWORDS = [")[2].partition("]")[0]
    known = set(re.findall(r'"([$\w]+)"', listed))
    assert keywords(of_spec) <= known


def test_every_field_of_a_spec_has_its_words_in_the_schema() -> None:
    schemas = schemas_of_answers()
    for name in reachable(schemas, "JobSpec", set()):
        for field, schema in schemas[name].get("properties", {}).items():
            is_tag = field in ("type", "transport") and schema.get("enum")
            assert is_tag or schema.get("description"), f"{name}.{field} has no words under it"
