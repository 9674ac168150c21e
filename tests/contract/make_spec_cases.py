"""Specs and their verdicts, for the two that check a spec: the form of the page and the gateway.

    .venv/bin/python -m tests.contract.make_spec_cases

The specs of configs/, changed in one place: each field of each table once, left out, of each wrong kind, at and beyond
each of its bounds. The verdicts are those of the records (msgspec): `takes`, `refuses` by the schema, `rules_out` by a
rule that a schema can't say. `test_spec_cases.py` compares them with the records; `page/src/submit/schema.test.ts` with
the form's walk over the schema, and with a validator of JSON schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.encoding.wire import decode_json
from contracts.errors import ContractViolation, InvalidInput
from contracts.spec.job import JobSpec
from gateway.openapi import schemas_of_answers
from onbeat.client.spec_file import read_toml
from tests.unit.gateway.page.test_sources import reachable

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "spec_cases.json"
LEFT_OUT = {"$left_out": True}
"""In place of a value: the key is not there."""
KINDS: tuple[Any, ...] = (None, True, 7, 0.5, "text", [], {})
UNKNOWN = ("no_such_key", "constructor", "__proto__", "toString")
"""The first, and what every object of JavaScript has."""
NO_WORDS = ("description", "title")
LOOSER = (("algorithm", "loss", "type"),)
"""Tags that the schema needs and msgspec doesn't, where a table is the only one of its union: the form writes them."""
LAST_EXACT = 2**53
"""Beyond it a browser knows only every other whole number."""

Path_ = tuple[str | int, ...]


def repeated(of: Any, times: int) -> dict[str, Any]:
    """In place of a long text or list."""
    return {"$repeat": of, "times": times}


def expanded(value: Any) -> Any:
    """The value that a case writes: a long one is made, and copies of a table's value get names of their own."""
    if not isinstance(value, dict) or "$repeat" not in value:
        return value
    of, times = value["$repeat"], value["times"]
    if isinstance(of, dict) and "$of_key" in of:
        return {f"{number}": of["$of_key"] for number in range(times)}
    return of * times if isinstance(of, str) else [of] * times


def changed(spec: Any, at: Sequence[str | int], value: Any) -> Any:
    """The spec with one value changed; tables on the way are there."""
    made = deepcopy(spec)
    target = made
    for key in at[:-1]:
        target = target[key]
    if value == LEFT_OUT:
        target.pop(at[-1], None)
    else:
        target[at[-1]] = expanded(value)
    return made


def verdict(spec: Any) -> str:
    """What the gateway says of a body: by its kind of refusal."""
    try:
        decode_json(json.dumps(spec), JobSpec)
    except InvalidInput as error:
        said = error.__cause__
        # A rule is a ValueError of the record itself, in msgspec's ValidationError or as it is.
        is_rule = isinstance(said, ContractViolation) or (said is not None and said.__cause__ is not None)
        return "rules_out" if is_rule else "refuses"
    return "takes"


@dataclass
class Maker:
    """Walks the schema of a spec along with a spec."""

    schemas: dict[str, Any]
    cases: list[dict[str, Any]] = field(default_factory=list)
    bases: dict[str, Any] = field(default_factory=dict)
    derivations: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: set[tuple[str, str]] = field(default_factory=set)

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        return self.schemas[self.name_of(schema)] if "$ref" in schema else schema

    def name_of(self, schema: dict[str, Any]) -> str:
        return schema.get("$ref", "").rpartition("/")[2]

    def base(self, name: str, spec: Any) -> None:
        self.bases[name] = spec
        self.table(name, (), {"$ref": "#/components/schemas/JobSpec"}, spec)

    def add(self, base: str, at: Path_, values: Sequence[Any]) -> None:
        said: dict[str, list[Any]] = {}
        for value in values:
            said.setdefault(verdict(changed(self.bases[base], at, value)), []).append(value)
        self.cases.append({"base": base, "at": list(at)} | {name: said[name] for name in sorted(said)})

    def table(self, base: str, at: Path_, schema: dict[str, Any], value: dict[str, Any]) -> None:
        """Every key of a table that was not met yet in a table of this kind."""
        own, name = self.resolved(schema), self.name_of(schema)
        if self.first(name, "$unknown"):
            for key in UNKNOWN if name == "JobSpec" else UNKNOWN[:1]:
                self.add(base, (*at, key), [1, None])
        for key, inner in own["properties"].items():
            place = (*at, key)
            if self.first(name, key):
                left_out = [] if place in LOOSER else [LEFT_OUT]
                self.add(base, place, [*left_out, *unlike(self.values(inner))])
            self.within(base, place, inner, value.get(key))

    def first(self, table: str, key: str) -> bool:
        is_first = (table, key) not in self.seen
        self.seen.add((table, key))
        return is_first

    def within(self, base: str, at: Path_, schema: dict[str, Any], value: Any) -> None:
        """Tables and lists below a field, in the spec as it is; those that no spec has, in a spec made for them."""
        own = self.resolved(schema)
        for choice in own.get("anyOf", [schema]):
            kind = self.resolved(choice)
            if kind.get("type") == "array":
                self.items(base, at, kind["items"], value)
            elif "properties" in kind and self.takes(own, choice, value):
                self.table(base, at, choice, value)
            elif "properties" in kind and not self.met(choice):
                self.made(base, at, choice, self.sample(choice))
            elif isinstance(kind.get("additionalProperties"), dict) and not self.met_at(at):
                self.entries(base, at, kind, value)

    def items(self, base: str, at: Path_, schema: dict[str, Any], value: Any) -> None:
        for place, item in enumerate(value or []):
            self.within(base, (*at, place), schema, item)
        own = self.resolved(schema)
        for choice in own.get("anyOf", [schema]):
            if "properties" in self.resolved(choice) and not self.met(choice):
                made = [*(value or []), self.sample(choice)]
                self.made(base, at, choice, made, below=(len(made) - 1,))
        if "properties" not in own and "anyOf" not in own and not self.met_at(at):
            name = self.derived(base, at, [self.sample(schema)])
            self.add(name, (*at, 0), unlike(self.values(schema)))

    def entries(self, base: str, at: Path_, kind: dict[str, Any], value: Any) -> None:
        """An open table: its values, and the names of its keys."""
        inner, names = kind["additionalProperties"], kind.get("propertyNames", {})
        key = next(iter(value)) if value else "1" if "[1-9]" in names.get("pattern", "") else "key"
        name = base if value else self.derived(base, at, {key: self.sample(inner)})
        self.add(name, (*at, key), unlike(self.values(inner)))
        for odd in ("__proto__", *self.of_text(names)):
            if isinstance(odd, str):
                self.add(name, (*at, odd), [self.sample(inner)])

    def made(self, base: str, at: Path_, choice: dict[str, Any], value: Any, *, below: Path_ = ()) -> None:
        name = self.derived(base, at, value)
        self.table(name, (*at, *below), choice, value[below[0]] if below else value)

    def derived(self, base: str, at: Path_, value: Any) -> str:
        """A base that is another one with this value."""
        name = f"{base.partition(',')[0]}, {len(self.bases)}"
        self.bases[name] = changed(self.bases[base], at, value)
        self.derivations[name] = {"of": base, "at": list(at), "to": value}
        return name

    def met(self, choice: dict[str, Any]) -> bool:
        return (self.name_of(choice), "$unknown") in self.seen

    def met_at(self, at: Path_) -> bool:
        return not self.first("$at", ".".join(str(key) for key in at if isinstance(key, str)))

    def takes(self, own: dict[str, Any], choice: dict[str, Any], value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        if "discriminator" not in own:
            return True
        tag = value.get(own["discriminator"]["propertyName"])
        return own["discriminator"]["mapping"].get(tag) == choice.get("$ref")

    def sample(self, schema: dict[str, Any]) -> Any:
        """A value that the schema takes, with what it must have alone."""
        own = self.resolved(schema)
        if "anyOf" in own:
            return self.sample(next(choice for choice in own["anyOf"] if choice.get("type") != "null"))
        if "enum" in own:
            return own["enum"][0]
        match own.get("type"):
            case "object":
                must = own.get("required", [])
                return {key: self.sample(own["properties"][key]) for key in must}
            case "array":
                return [self.sample(own["items"]) for _ in range(own.get("minItems", 0))]
            case "string":
                if own.get("pattern") == "^[0-9a-f]{64}$":  # a digest
                    return "0" * 64
                return "x" * max(1, own.get("minLength", 0))
            case "boolean":
                return True
            case "null":
                return None
            case kind:
                low = own.get("minimum", own.get("exclusiveMinimum", 0) + (1 if kind == "integer" else 1e-3))
                return min(max(low, 1), own.get("maximum", own.get("exclusiveMaximum", 2) / 2))

    def values(self, schema: dict[str, Any]) -> Iterator[Any]:
        """Yields values of each kind, and at and beyond each bound."""
        own = self.resolved(schema)
        yield from KINDS
        for choice in own.get("anyOf", [own]):
            yield from self.of_kind(self.resolved(choice))
        if "discriminator" in own:
            tag = own["discriminator"]["propertyName"]
            yield from ({tag: "no_such"}, {tag: "constructor"}, {tag: 7}, {tag: None})

    def of_kind(self, own: dict[str, Any]) -> Iterator[Any]:
        if "enum" in own:
            yield from (own["enum"][0], own["enum"][-1], str(own["enum"][0]).upper() + "?")
            return
        match own.get("type"):
            case "integer" | "number":
                yield from self.of_number(own)
            case "string":
                yield from self.of_text(own)
            case "array":
                yield from self.of_list(own)
            case "object" if isinstance(own.get("additionalProperties"), dict):
                if "maxProperties" in own:
                    entry = {"$of_key": self.sample(own["additionalProperties"])}
                    yield from (repeated(entry, own["maxProperties"] + more) for more in (0, 1))

    def of_number(self, own: dict[str, Any]) -> Iterator[Any]:
        step = 1 if own["type"] == "integer" else 1e-3
        for key, side in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
            bound = own.get(key)
            if bound is not None:
                wide = max(step, 2 if abs(bound) >= LAST_EXACT else 0, abs(bound) * 1e-6 if step != 1 else 0)
                yield from (bound, bound + side * wide, bound - side * wide)
        if own["type"] == "integer":
            yield 1.5

    def of_text(self, own: dict[str, Any]) -> Iterator[Any]:
        yield ""
        longest = own.get("maxLength")
        if longest is not None:
            yield from (repeated("x", longest), repeated("x", longest + 1))
            # A character of two halves in JavaScript is one.
            yield from (repeated("\U0001f600", longest), repeated("\U0001f600", longest + 1))
        if "pattern" in own:
            yield from ("two\nlines", "a\u202eb", "../up", "a b", "Ä", "-x", "a/b", ".", "a\n", "5\n")

    def of_list(self, own: dict[str, Any]) -> Iterator[Any]:
        one = self.sample(own["items"])
        yield [one]
        if "maxItems" in own:
            yield from (repeated(one, own["maxItems"]), repeated(one, own["maxItems"] + 1))
        if own.get("minItems", 0) > 1:
            yield repeated(one, own["minItems"] - 1)


def unlike(values: Iterator[Any]) -> list[Any]:
    """Each value once, as a browser writes it: 1.0 is 1 there."""
    written = (int(value) if isinstance(value, float) and value.is_integer() else value for value in values)
    return list({json.dumps(value): value for value in written}.values())


def without_words(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_words(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_words(inner) for key, inner in schema.items() if not (key in NO_WORDS and isinstance(inner, str))
    }


def made() -> dict[str, Any]:
    """The whole file."""
    schemas = schemas_of_answers()
    schemas = {name: without_words(schemas[name]) for name in sorted(reachable(schemas, "JobSpec", set()))}
    maker = Maker(schemas=schemas)
    for path in sorted((ROOT / "configs").glob("*.toml"), key=lambda path: (path.stem != "demo", path.stem)):
        maker.base(path.stem, read_toml(path))
    bases = {name: maker.derivations.get(name, {"spec": spec}) for name, spec in maker.bases.items()}
    return {"schemas": schemas, "bases": bases, "cases": maker.cases}


def text(whole: dict[str, Any]) -> str:
    """One line for each schema, base and case."""
    parts = [f'"{name}": {{\n{_lines(_pairs(whole[name]))}\n}}' for name in ("schemas", "bases")]
    parts.append(f'"cases": [\n{_lines(map(json.dumps, whole["cases"]))}\n]')
    return f"{{\n{_lines(parts)}\n}}\n"


def _pairs(values: dict[str, Any]) -> Iterator[str]:
    return (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())


def _lines(parts: Iterable[str]) -> str:
    return ",\n".join(parts)


if __name__ == "__main__":
    CASES.write_text(text(made()))
