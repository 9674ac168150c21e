"""docs/configuration.md, made from the config types: `python -m docs.make_configuration > docs/configuration.md`.

contracts/{spec,…,settings,engines}.py, onbeat/stack/profile.py ─▶ fields, types, ranges, defaults ─┐
                                      their source text ─▶ docstrings under the fields ─────────────┴▶ one page
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import inspect as types

from contracts.encoding.docstrings import field_docstrings
from contracts.encoding.wire import MAX_BATCHES, Record
from contracts.engines import DEFAULT, ENGINES, VARIABLE, users_of, variable
from contracts.settings import ENGINE_OPTIONS, PREFIX, StackSettings
from contracts.spec import limits as spec_limits
from contracts.spec.job import JobSpec
from contracts.spec.rules import RULES
from onbeat.stack.profile import KEY_VARIABLE, GeneratorProfile, StackProfile

PAGE = Path(__file__).parent / "configuration.md"
UNIONS = {
    "dataset": ("`[dataset]`", "Where prompts come from; `type` is one of:"),
    "loss": ("`algorithm.loss`", "A name, or a table `{ type = ..., ... }`; `type` is:"),
    "trackers": ("`trackers`", "A list, each a name, or a table `{ type = ..., ... }`; `type` is:"),
    "components": ("`reward.components`", "A list of scorers, each a table `{ type = ..., ... }`; `type` is one of:"),
    "stages": ("`[[stages]]`", "What is made of training rollouts before they are trained; `type` is one of:"),
    "weights": ("`[weights]`", 'How each version gets to the generators; `transport`, "file" if unset, is one of:'),
}
"""Field that chooses between types → its heading and the sentence under it."""

RULE = "| --- | --- | --- | --- |"
BAR = "\\|"
"""A bar inside a cell."""

INTRO = """\
# Configuration

This page is generated from the types of the code: `python -m docs.make_configuration > docs/configuration.md`.

A *spec* describes a job: a TOML file for the command line, or the same keys as JSON for `POST /v1/jobs`. This page has
every key of a spec, then the [rules](#rules) between keys, then every [setting of a process](#environment). If you look
for the key for what you want, [recipes](recipes.md) are shorter.

An unknown key, a wrong type or a value out of range is refused by its name. `configs/` has specs to start from, and
`--set rollout.group_size=16` changes one key for one run. *Left out* in a row says what holds if a spec doesn't have
the key. Words such as *version*, *lag* and *lease* are explained in [words](internals.md#words).
"""
PRODUCTS = f"""\
## Products

Some products of these numbers are bounded, too. A job beyond such a bound is refused, and the refusal names the keys.

| of a batch, also of an evaluation's | at most |
| --- | --- |
| completions: `prompts_per_batch` x `group_size` | {spec_limits.MAX_BATCH_COMPLETIONS} |
| tokens: completions x `max_new_tokens`, with an environment x its `max_tokens` | {spec_limits.MAX_BATCH_TOKENS} |
| prompt tokens: `prompts_per_batch` x (1 + `max_resamples`) x `max_prompt_tokens` | \
{spec_limits.MAX_BATCH_PROMPT_TOKENS} |

| of an iteration, x (`max_policy_lag` + 1) | at most |
| --- | --- |
| batches, with those of an evaluation | {MAX_BATCHES} |
| completions | {spec_limits.MAX_ITERATION_COMPLETIONS} |
| tokens | {spec_limits.MAX_ITERATION_TOKENS} |
| prompt tokens, with reserves and the evaluation's | {spec_limits.MAX_ITERATION_PROMPT_TOKENS} |
"""
RULES_HEAD = """\
## Rules

A spec may be refused although each of its values is within its range: if keys don't go together, if a key has no
effect, or if the job is more than a stack holds. A refusal names the key, what is wrong with it, and a cure. The
commands, `onbeat.train` and the gateway judge by this table, and give all refusals of a spec at once. The gateway adds
what needs the stack: paths, plug-ins, the generators that run.

`…` stands for a value of the spec, `[i]` for a place in a list, `KEY` for a key. `DATASET` is `dataset`, the data set
of a source or of a set; `POOLS` its `difficulty_pools`; `ENVIRONMENT` is `environment`, or that of a source;
`EVALUATION` is `evaluation`, or a set of it; `SAMPLING` is `rollout.sampling`, or that of an evaluation.

| key | refused where it | cure |
| --- | --- | --- |
"""
PROFILE_HEAD = """\
## Stack profile

`onbeat up --profile FILE` and `onbeat demo --profile FILE` take the stack's generators from a TOML file. It has a table
`[[generators]]` for each kind of generator, and unknown keys are refused as in a spec. `configs/stacks/` has two
profiles ([engines](engines.md)).

### `[[generators]]`
"""
SETTINGS_HEAD = """\
## Environment

A process of the stack reads its settings from these variables. `onbeat demo` and `onbeat up` set them for the processes
that they start, and docker-compose.yml sets them for its services. An unknown `ONBEAT_` variable is refused, except
those that Kubernetes and Docker set for a service called onbeat (`ONBEAT_PORT=tcp://10.0.0.1:8000`).
"""


def configuration_page() -> str:
    """The whole page, ending in one line break."""
    job = _spec_sections("Top level", _struct(JobSpec), path="", seen={})
    parts = [INTRO, *job, PRODUCTS, RULES_HEAD + _rules_table(), PROFILE_HEAD, _profile_table(), SETTINGS_HEAD]
    return "\n".join([*parts, _settings_table()])


def undocumented_fields() -> list[str]:
    """`Type.field` of every config field without a docstring under it."""
    documented = {cls: field_docstrings(cls) for cls in documented_types()}
    missing = [
        f"{cls.__name__}.{name}"
        for cls, docstrings in documented.items()
        for name in cls.__struct_fields__
        if not docstrings.get(name)
    ]
    return sorted(missing)


def documented_types() -> set[type]:
    """All that the page describes."""
    return {JobSpec, StackProfile, StackSettings, *ENGINES.values(), *_reachable(JobSpec), *_reachable(StackProfile)}


def _spec_sections(heading: str, struct: types.StructType, *, path: str, seen: dict[type, str]) -> Iterator[str]:
    """A section for the struct, then one for each struct below it, in the order of the fields; a type once."""
    first = seen.setdefault(struct.cls, heading)
    if first != heading:
        yield f"## {heading}\n\nThe keys of {first}.\n"
        return
    rows, like = _rows(struct), ""
    (base,) = struct.cls.__bases__
    if (of := seen.setdefault(base, heading)) != heading and base is not Record:
        rows = rows[len(base.__struct_fields__) :]
        like = f"In addition to the keys of {of} up to `{base.__struct_fields__[-1]}`:\n\n"
    yield f"## {heading}\n\n{_summary(struct.cls)}\n\n{like}{_table(rows)}"
    for field in struct.fields:
        yield from _below(field, f"{path}.{field.name}".lstrip("."), seen)


def _below(field: types.Field, path: str, seen: dict[type, str]) -> Iterator[str]:
    choices = _structs_in(field.type)
    if path.startswith(("dataset.sources.", "evaluation.sets.")):
        return  # the kinds of data sets, once more
    if field.name in UNIONS:
        heading, sentence = UNIONS[field.name]
        yield f"## {heading}\n\n{sentence}\n"
        shared = _shared_rows(choices)
        if shared:
            yield f"Keys of each of them, but for what a row says:\n\n{_table(list(shared.values()))}"
        told: dict[str, object] = {}
        for choice in choices:
            table = _table([row for row in _rows(choice) if row not in shared])
            first = told.setdefault(table, choice.tag)
            if first != choice.tag and choice.fields:
                table = f"The keys of `{first}`.\n"
            yield f"### `{choice.tag_field} = {json.dumps(choice.tag)}`\n\n{_summary(choice.cls)}\n\n{table}"
        inner = {below.name: below for choice in choices for below in choice.fields if _structs_in(below.type)}
        for name, below in inner.items():
            yield from _below(below, f"{path}.{name}", seen)
    else:
        for choice in choices:
            yield from _spec_sections(f"`[{path}]`", choice, path=path, seen=seen)


def _shared_rows(choices: list[types.StructType]) -> dict[str, str]:
    """Row → the row that tells which types have it, of those that most of several types have alike."""
    has = {choice.tag: _rows(choice) for choice in choices}
    shared = {}
    for row in dict.fromkeys(row for rows in has.values() for row in rows):
        without = [f"`{tag}`" for tag, rows in has.items() if row not in rows]
        if len(has) > 2 * len(without) and len(has) > 1:
            shared[row] = row.removesuffix(" |") + (f" Not of {', '.join(without)}." if without else "") + " |"
    return shared


def _rows(struct: types.StructType) -> list[str]:
    docstrings = field_docstrings(struct.cls)
    return [_row(field, name=field.name, docstring=docstrings[field.name]) for field in struct.fields]


def _table(rows: list[str]) -> str:
    return "\n".join(["| key | type | default | effect |", RULE, *rows]) + "\n" if rows else ""


def _rules_table() -> str:
    """Returns a row for each rule of the judge, but one row for keys with the same words."""
    fields: dict[tuple[str, str], list[str]] = {}
    for rule in RULES:
        cells = (without_places(rule.says), without_places(rule.cure))
        fields.setdefault(cells, []).append(field_of(rule.field))
    rows = []
    for cells, names in fields.items():
        keys = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        rows.append(f"| {' | '.join(cell.replace('|', BAR) for cell in (keys, *cells))} |\n")
    return "".join(rows)


def field_of(field: str) -> str:
    """`stages[{place}].weight` → `stages[i].weight`, `{dataset}.chat` → `DATASET.chat`."""
    field = re.sub(r"\[\{\w+\}\]", "[i]", field)
    return re.sub(r"\{(\w+)[^}]*\}", lambda place: "KEY" if place[1] == "spec" else place[1].upper(), field)


def without_places(text: str) -> str:
    """Writes `…` in each place of a rule's words that a value of the spec takes; `{{` is a bracket."""
    return re.sub(r"(?<!\{)\{[^{}]+\}(?!\})", "…", text).replace("{{", "{").replace("}}", "}")


def _profile_table() -> str:
    return _table(_rows(_struct(GeneratorProfile))) + (
        f"\n`engine` has `type`, {VARIABLE} of the [environment](#environment), and that type's options, each without "
        f"`{VARIABLE}_` and in small letters. A key doesn't belong into a file: `{KEY_VARIABLE}` names the launcher's "
        "variable that holds it.\n"
    )


def _settings_table() -> str:
    docstrings = field_docstrings(StackSettings)
    rows = [
        _row(field, name=f"{PREFIX}{field.name.upper()}", docstring=docstrings[field.name])
        for field in _struct(StackSettings).fields
    ]
    rows += [_engine_row(), *map(_option_row, ENGINE_OPTIONS)]
    return "\n".join(["| variable | type | default | effect |", RULE, *rows]) + "\n"


def _engine_row() -> str:
    names = ", ".join(f"`{json.dumps(name)}`" for name in sorted(ENGINES))
    engines = " ".join(f"{name}: {_summary(kind)}" for name, kind in ENGINES.items())
    return f"| `{VARIABLE}` | {names} | `{json.dumps(DEFAULT)}` | What a generator samples with. {engines} |"


def _option_row(option: str) -> str:
    """An option of one engine or several, which the row names."""
    users = users_of(option)
    kind = ENGINES[users[0]]
    field = next(field for field in _struct(kind).fields if field.name == option)
    return _row(field, name=variable(option), docstring=f"{', '.join(users)}: {field_docstrings(kind)[option]}")


def _row(field: types.Field, *, name: str, docstring: str) -> str:
    cells = (f"`{name}`", _type_words(field.type), _default(field), docstring)
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "none"  # UNSET: what is left out is not in the record
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "none"
    if isinstance(value, msgspec.Struct):
        given = [below.name for below in _struct(type(value)).fields if below.required]
        pairs = ", ".join(f"{name} = {json.dumps(getattr(value, name))}" for name in given)
        return f"`{{ {pairs} }}`" if pairs else "all defaults"
    return f"`{json.dumps(value)}`"


def _type_words(kind: types.Type) -> str:
    """`integer 1…64`, `"periodic", "synchronous"`, `list of tables`."""
    match kind:
        case types.BoolType():
            return "boolean"
        case types.IntType():
            return f"integer{_range_words(kind)}"
        case types.FloatType():
            return f"number{_range_words(kind)}"
        case types.StrType():
            return "string"  # what is too long, or empty, is refused by name
        case types.LiteralType():
            return ", ".join(f"`{json.dumps(value)}`" for value in kind.values)
        case types.DictType():
            return "table"
        case types.VarTupleType():
            words = _type_words(kind.item_type)
            return f"list of {'tables' if words == 'table' else words}"
    if isinstance(kind, types.UnionType):
        # What may be left out is written like what it is when given: TOML has no null.
        words = [_type_words(member) for member in kind.types if not isinstance(member, types.NoneType)]
        return ", ".join(dict.fromkeys(words))
    if _structs_in(kind):
        return "table"
    raise TypeError(f"no words for a config field of type {kind}")


def _range_words(kind: types.IntType | types.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" {_number(kind.ge)}…{_number(kind.le)}"
    bounds = (("> ", kind.gt), ("≥ ", kind.ge), ("< ", kind.lt), ("≤ ", kind.le))
    words = [f"{sign}{_number(limit)}" for sign, limit in bounds if limit is not None]
    return f" {', '.join(words)}" if words else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _structs_in(kind: types.Type) -> list[types.StructType]:
    """The struct, those of a union, or those of a list; [] for plain values."""
    match kind:
        case types.StructType():
            return [kind]
        case types.UnionType():
            return [member for member in kind.types if isinstance(member, types.StructType)]
        case types.VarTupleType():
            return _structs_in(kind.item_type)
    return []


def _struct(cls: type) -> types.StructType:
    kind = types.type_info(cls)
    assert isinstance(kind, types.StructType)
    return kind


def _reachable(cls: type) -> Iterator[type]:
    for field in _struct(cls).fields:
        for below in _structs_in(field.type):
            yield below.cls
            yield from _reachable(below.cls)


def _summary(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
