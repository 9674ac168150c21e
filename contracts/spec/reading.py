"""JSON or plain values → a JobSpec: types, ranges and choices, with every key that is wrong.

`onbeat demo/submit …`, `onbeat.train` ─▶ values ─▶ read_values ─┐
POST /v1/jobs, /v1/jobs/check ──────────▶ JSON ───▶ read_json ───┴─▶ SpecReading ─▶ contracts/spec/rules.py

What is wrong is left out, and the rest is read again, so that a spec with wrong keys is judged as well. In its JobSpec
the wrong keys, and those that a misspelt one may stand for, have no value: whatever looks at one raises AttributeError,
and `where_read` passes over it. So nothing is refused that would be right with the key as its author means it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from contracts.encoding.wire import KEY_IN_PROBLEM, convert, decode_json
from contracts.errors import MOST_REFUSALS, InvalidInput, Refusal, SpecRefused
from contracts.spec.job import JobSpec

MOST_READINGS = 4 * MOST_REFUSALS
"""Most readings of a spec: a value that is left out may take the tables around it along, each by another reading."""
ANY_ENTRY = "[...]"
"""The word that msgspec writes for the key of a table whose keys are free, as of `params`."""
SUGGESTED = re.compile(r"did you mean (?P<keys>[^?]+)\?")
OF_OTHER_TYPE = "only with "
"""The beginning of the cure of a key that another type of its table has."""
UNSET_FIELD = re.compile(r"Struct field '(?P<key>\w+)' is unset")
"""The words of msgspec where it compares or copies a record that lacks a value."""
STAND_INS: Mapping[str, Any] = {
    "name": "job",
    "iterations": 1,
    "model": {"path": "model"},
    "dataset": {"type": "addition"},
}
"""Values with which a spec can be read that lacks a required key. None of them is in the spec that comes of it."""
STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
"""A step of a path: a key of a table, or a place in a list."""

NAMES_ELSEWHERE = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "adv_estimator": "algorithm.advantage",
    "beta": "algorithm.kl_coefficient",
    "bf16": "model.dtype",
    "clip_ratio_c": "algorithm.clip_max",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "delta": "algorithm.clip_max",
    "epsilon_high": "algorithm.clip_high",
    "kl_coef": "algorithm.kl_coefficient",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "logging_steps": "trackers",
    "loss_type": "algorithm.loss",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "mask_truncated_completions": "algorithm.on_truncated",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.sampling.max_new_tokens",
    "max_steps": "iterations",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_iterations": "algorithm.updates_per_iteration",
    "num_train_epochs": "iterations",
    "report_to": "trackers",
    "reward_weights": "reward.components[0].weight",
    "save_steps": "trainer.checkpoint_every_iterations",
    "scale_rewards": "algorithm.advantage",
    "total_epochs": "iterations",
    "warmup_steps": "optimizer.warmup_iterations",
}
"""Key of TRL or verl → the key that says it here, where no key here has the same name (docs/from-trl.md)."""


@dataclass(frozen=True, kw_only=True)
class SpecReading:
    """A spec as far as it can be read."""

    spec: JobSpec | None
    """The spec; None where nothing of it can be read. If there are refusals, some of its keys have no value."""
    refusals: tuple[Refusal, ...] = ()
    """A refusal for each wrong key; () of a whole spec."""
    unread: Set[str] = frozenset()
    """Names of the keys that have no value: wrong keys, and those that a misspelt key may stand for."""
    values: Any = UNSET
    """The plain values that were read; UNSET where they are those of `spec`."""

    @property
    def plain(self) -> Any:
        """The spec as dicts and lists, with its wrong keys."""
        return msgspec.to_builtins(self.spec) if self.values is UNSET else self.values

    @property
    def whole(self) -> JobSpec:
        """The spec, all of whose keys are right. Raises SpecRefused where some are not."""
        if self.spec is None or self.refusals:
            raise SpecRefused(self.refusals)
        return self.spec


def with_values(values: Any, changes: Mapping[str, Any]) -> Any:
    """Returns a copy of a spec's plain values with other ones at some fields; a field that it lacks stays away.

    changes: field → its value.
    """
    whole = _copy(values)
    for field, value in changes.items():
        steps = list(STEP.finditer(field))
        container = _at(whole, field[: steps[-1].start()])
        name, place = steps[-1].groups()
        if isinstance(container, dict) and name in container:
            container[name] = value
        elif isinstance(container, list) and place and int(place) < len(container):
            container[int(place)] = value
    return whole


@contextmanager
def where_read(unread: Set[str]) -> Iterator[None]:
    """Ends what is done within, in silence, where it looks at a key of a spec that has no value.

    unread: the names of such keys.
    """
    try:
        yield
    except AttributeError as error:
        unset = UNSET_FIELD.fullmatch(str(error))
        key = unset["key"] if unset else error.name
        if key not in unread:
            raise


def read_json(body: bytes) -> SpecReading:
    """Reads a spec from outside. Raises InvalidInput where the body is no JSON."""
    try:
        return SpecReading(spec=decode_json(body, JobSpec))
    except InvalidInput as error:
        if not isinstance(error.__cause__, msgspec.ValidationError):
            raise
        return _read_in_part(lambda: msgspec.json.decode(body), error)


def read_values(values: Any) -> SpecReading:
    """Reads a spec from plain dicts and lists, as a TOML file has them."""
    try:
        return SpecReading(spec=convert(values, JobSpec), values=values)
    except InvalidInput as error:
        return _read_in_part(lambda: values, error)


def spec_of_values(values: Any) -> JobSpec:
    """Reads a spec from plain dicts and lists, as a TOML file has them.

    Raises SpecRefused where a key is unknown, missing, of another type or out of its range.
    """
    return read_values(values).whole


def _read_in_part(values: Callable[[], Any], error: InvalidInput) -> SpecReading:
    """Reads what is right of a spec; nothing of what is thousands of levels deep.

    error: what reading all of it raised.
    """
    try:
        return _Survey(values()).read(error)
    except (RecursionError, msgspec.DecodeError):
        return SpecReading(spec=None, refusals=(_refusal(error),), values=None)


@dataclass(frozen=True, kw_only=True)
class _UnknownKey:
    """A key that no table has at its place. It may be meant as another one."""

    table: str
    """Field of its table; "" for the spec itself."""
    value: Any
    suggested: tuple[str, ...]
    """The keys that its cure names: of the same table, or dotted paths of the spec. () where it names none."""

    @property
    def meant(self) -> set[str]:
        """The fields that it may stand for by its cure; some of them are none."""
        of_table = {f"{self.table}.{key}" for key in self.suggested if self.table}
        return of_table | set(self.suggested)


class _Survey:
    """Reads a spec again and again, each time without what was wrong, until the rest is a spec.

    The fields that it keeps are those of the given values. Entries that were left out of a list move the others, so
    that a field of what is left may have lower places (`_original_field`).
    """

    def __init__(self, values: Any) -> None:
        self._values = values
        self._left = _copy(values)
        self._refusals: list[Refusal] = []
        self._wrong: set[str] = set()
        """Fields without a value that can be read. Of a list it is the list, also where one entry alone is wrong."""
        self._unknown: list[_UnknownKey] = []
        self._missing_entries: dict[str, list[int]] = {}
        """Field of a list → places of the entries that were left out of it."""

    def read(self, error: InvalidInput) -> SpecReading:
        """Returns the reading. error: what reading all of it raised."""
        spec: JobSpec | None = None
        for _ in range(MOST_READINGS):
            if not self._leave_out(error):
                break
            try:
                spec = convert(self._left, JobSpec)
                break
            except InvalidInput as following:
                error = following
        unread: set[str] = set()
        if spec is not None:
            # A copy, since default values may be shared with other specs.
            spec = copy.deepcopy(spec)
            unread = {_take_value(spec, field) for field in sorted(self._doubtful(spec))} - {""}
        return SpecReading(spec=spec, refusals=tuple(self._refusals), unread=frozenset(unread), values=self._values)

    def _leave_out(self, error: InvalidInput) -> bool:
        """Notes a fault and leaves it out; returns False where that isn't possible, or there are too many."""
        refusal = _refusal(error)
        table = error.field or ""
        fault = KEY_IN_PROBLEM.fullmatch(error.problem)
        if fault is None:
            field = self._original_field(table)
        else:
            field = f"{self._original_field(table)}.{fault['key']}".removeprefix(".")
        is_required = fault is not None and fault["fault"] == "missing required"
        # It isn't missing where its table may be of another type, or where a misspelt key stands for it.
        is_meant = self._original_field(table) in self._wrong or any(field in key.meant for key in self._unknown)
        if field not in self._wrong and not (is_required and is_meant):
            if len(self._refusals) == MOST_REFUSALS:
                return False
            self._refusals.append(msgspec.structs.replace(refusal, field=field))
        if fault is None:
            self._wrong.add(field)
            return self._remove(table)
        if is_required:
            self._wrong.add(field)
            return self._leave_out_table(table, fault["key"])
        return self._leave_out_unknown(table, fault["key"], refusal.cure)

    def _leave_out_table(self, table: str, key: str) -> bool:
        """Leaves out a table that lacks a required key, which by now has no other fault."""
        if table:
            self._wrong.add(self._original_field(table))
            return self._remove(table)
        if key not in STAND_INS:
            return False
        self._left[key] = STAND_INS[key]
        return True

    def _leave_out_unknown(self, table: str, key: str, cure: str) -> bool:
        container = _at(self._left, table)
        if not isinstance(container, dict) or key not in container:
            return False
        value = container.pop(key)
        field = self._original_field(table)
        if cure.startswith(OF_OTHER_TYPE):
            # The type may be what is wrong.
            self._wrong.add(field)
            return True
        suggested = SUGGESTED.match(cure)
        keys = tuple(suggested["keys"].split(" or ")) if suggested else ()
        self._unknown.append(_UnknownKey(table=field, value=value, suggested=keys))
        return True

    def _remove(self, field: str) -> bool:
        """Removes a key, or an entry of a list, of what is left; False where there is none. field: of what is left."""
        field = field.partition(ANY_ENTRY)[0]
        steps = list(STEP.finditer(field))
        if not steps:
            return False
        last = steps[-1]
        container = _at(self._left, field[: last.start()])
        name, place = last.groups()
        if isinstance(container, dict) and name in container:
            del container[name]
            return True
        if isinstance(container, list) and place and int(place) < len(container):
            entries = self._original_field(field[: last.start()])
            original_place = STEP.findall(self._original_field(field))[-1][1]
            del container[int(place)]
            self._missing_entries.setdefault(entries, []).append(int(original_place))
            self._wrong.add(entries)
            return True
        return False

    def _original_field(self, field: str) -> str:
        """Returns the field that a field of what is left has in the given values."""
        head, any_entry, rest = field.partition(ANY_ENTRY)
        original = ""
        for step in STEP.finditer(head):
            if step[2] is None:
                original += step[0]
                continue
            place = int(step[2])
            for missing in sorted(self._missing_entries.get(original, ())):
                if missing <= place:
                    place += 1
            original += f"[{place}]"
        return original + any_entry + rest

    def _doubtful(self, spec: JobSpec) -> set[str]:
        """Returns the fields whose value isn't known: wrong ones, and those that an unknown key may stand for."""
        fields = set(self._wrong)
        for unknown in self._unknown:
            # Entries that were left out of a list have moved the others, and the list is wrong as a whole.
            if any(unknown.table.startswith(f"{entries}[") for entries in self._missing_entries):
                continue
            table = _at(spec, unknown.table)
            if not isinstance(table, msgspec.Struct):
                continue
            prefix = f"{unknown.table}." if unknown.table else ""
            if not unknown.suggested:
                fields |= {f"{prefix}{key}" for key in self._takers(unknown, table)}
            for key in unknown.suggested:
                field = f"{prefix}{key}" if key in table.__struct_fields__ else key
                if _at(self._values, field) is None:
                    fields.add(field)
        return fields

    def _takers(self, unknown: _UnknownKey, table: msgspec.Struct) -> list[str]:
        """Returns the keys of a table that aren't given, and would take the value of an unknown one."""
        written = _at(self._values, unknown.table)
        absent = [field for field in msgspec.structs.fields(type(table)) if field.name not in written]
        return [field.name for field in absent if _takes(field.type, unknown.value)]


def _refusal(error: InvalidInput) -> Refusal:
    """`model: object contains unknown field `pth`` → `model.pth: unknown key (did you mean path? …)`."""
    table = error.field or ""
    key = KEY_IN_PROBLEM.fullmatch(error.problem)
    if key is None:
        return Refusal.of(error)
    field = f"{table}.{key['key']}" if table else key["key"]
    if key["fault"] == "missing required":
        return Refusal(field=field, problem="is required", cure="docs/configuration.md explains it")
    elsewhere = NAMES_ELSEWHERE.get(key["key"])
    cure = f"did you mean {elsewhere}?" if elsewhere else error.cure
    return Refusal(field=field, problem="unknown key", cure=cure or "docs/configuration.md lists the keys")


def _takes(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, InvalidInput, RecursionError):
        return False
    return True


def _at(values: Any, field: str) -> Any:
    """Returns what stands at a field of a spec, or of its plain values; None where nothing does."""
    target = values
    for name, place in STEP.findall(field):
        if isinstance(target, dict):
            target = target.get(name)
        elif isinstance(target, list | tuple) and place and int(place) < len(target):
            target = target[int(place)]
        elif isinstance(target, msgspec.Struct) and name in target.__struct_fields__:
            target = getattr(target, name, None)
        else:
            return None
    return target


def _take_value(spec: JobSpec, field: str) -> str:
    """Takes the value away that a field of a spec has, or the key of the spec around it; returns that key's name.

    A field that the spec's tables don't have changes nothing: then "" is returned.
    """
    owner: msgspec.Struct | None = None
    key = ""
    target: Any = spec
    for name, place in STEP.findall(field):
        if isinstance(target, msgspec.Struct):
            if name not in target.__struct_fields__:
                return ""
            owner = target
            key = name
            target = getattr(target, name, None)
        elif isinstance(target, tuple) and place and int(place) < len(target):
            target = target[int(place)]
        else:
            break  # a key of `params`, an entry that was left out, a key of a table that isn't there
    if owner is not None and hasattr(owner, key):
        # A frozen record takes no change. Its slots do, and one without a value raises AttributeError.
        getattr(type(owner), key).__delete__(owner)
    return key


def _copy(values: Any) -> Any:
    """Copies tables and lists, so that those of a program stay as they are."""
    if isinstance(values, dict):
        return {key: _copy(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_copy(value) for value in values]
    return values
