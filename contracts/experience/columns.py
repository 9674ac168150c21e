"""Columns and their values: a name, a type, and along what of a row its values lie.

The *rows* of a rollout batch are its rollouts, group by group: row r is sample r % G of group r // G. On the wire a
value is bytes, arrays little-endian and texts UTF-8, and the values of some rows are one MessagePack map:

    {"teacher_logprobs": [b"...", b"..."]}        one value a row, in the order of the rows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.arrays import pack_float64, pack_int32, unpack_float32, unpack_float64
from contracts.encoding.digests import content_digest
from contracts.encoding.wire import Record, decode, encode
from contracts.errors import ContractViolation
from contracts.rollouts import Completion, Rollout, RolloutBatch, RolloutGroup

MAX_COLUMN_NAME = 64
ColumnName = Annotated[str, Meta(min_length=1, max_length=MAX_COLUMN_NAME, pattern=r"^[a-z][a-z0-9_]*$(?![\s\S])")]
ColumnType = Literal["float32", "float64", "int32", "text"]
Axis = Literal["rollout", "token", "prompt_token", "completion_token"]
"""rollout: one value; token: one for each sampled token; prompt_token: one for each token of the prompt;
completion_token: one for each token of the completion, an environment's observations included."""
ITEM_BYTES: Mapping[ColumnType, int] = {"float32": 4, "int32": 4, "float64": 8}
MAX_TEXT_BYTES = 2**20
UNPACKERS: Mapping[ColumnType, Callable[[bytes], list[float]]] = {"float32": unpack_float32, "float64": unpack_float64}
"""Types whose numbers may be none: they have to be finite."""

ColumnValues = Mapping[str, Sequence[bytes]]
"""Column → a value for each row."""


class Column(Record, frozen=True, kw_only=True):
    """A column that a stage makes."""

    name: ColumnName
    """Letters, digits and underscores; unique in the job."""
    type: ColumnType
    """Arrays are little-endian on the wire, a text is UTF-8 of a mebibyte at most."""
    per: Axis = "rollout"
    """The thing that has a value: the row (rollout), each sampled token, or each token of its prompt or its
    completion."""
    width: Annotated[int, Meta(ge=1, le=2**14)] | UnsetType = UNSET
    """With per = "token": numbers of each; left out: 1."""

    @property
    def num_bytes(self) -> int:
        """Length of a number, or of all that a token has; a text has none."""
        return ITEM_BYTES[self.type] * (self.width or 1)


class RowShape(NamedTuple):
    """How long the values of a row are."""

    num_prompt_tokens: int
    num_sampled: int
    num_tokens: int
    """Sampled tokens and observations."""

    def length(self, axis: Axis) -> int:
        """Returns the number of values along the axis."""
        return {
            "rollout": 1,
            "token": self.num_sampled,
            "prompt_token": self.num_prompt_tokens,
            "completion_token": self.num_tokens,
        }[axis]


_Maker = Callable[[RolloutGroup, Rollout], bytes]

_BASE: Mapping[str, tuple[ColumnType, Axis, _Maker]] = {
    "prompt_ids": ("int32", "prompt_token", lambda group, _: group.prompt_token_ids),
    "completion_ids": ("int32", "completion_token", lambda _, rollout: rollout.completion.token_ids),
    "sampled": ("int32", "completion_token", lambda _, rollout: _sampled(rollout.completion)),
    "sees_from": ("int32", "completion_token", lambda _, rollout: _sees_from(rollout.completion)),
    "generator_logprobs": ("float32", "token", lambda _, rollout: rollout.completion.generator_logprobs),
    "text": ("text", "rollout", lambda _, rollout: rollout.text.encode()),
    "reward": ("float64", "rollout", lambda _, rollout: pack_float64([rollout.reward])),
    "prompt_id": ("text", "rollout", lambda group, _: group.prompt_id.encode()),
    "prompt": ("text", "rollout", lambda group, _: _carried(group.prompt_text, "prompt")),
    "reference": ("text", "rollout", lambda group, _: _carried(group.reference, "reference")),
}
BASE_COLUMNS: Mapping[str, Column] = {
    name: Column(name=name, type=kind, per=axis) for name, (kind, axis, _) in _BASE.items()
}
"""The columns that a row has from its publication on."""
CARRIED_COLUMNS = frozenset({"prompt", "reference"})
"""Base columns that a generator publishes only where a stage of the job asks for one of them."""


def _sampled(completion: Completion) -> bytes:
    """Returns 1 for each token that was sampled, 0 for each of an observation."""
    values = [0] * completion.num_tokens
    for start, end in completion.spans:
        values[start:end] = [1] * (end - start)
    return pack_int32(values)


def _sees_from(completion: Completion) -> bytes:
    """Returns for each token the place in the completion with which what its model saw begins; 0: with the prompt."""
    return pack_int32([begin for begin, _, end in completion.lines for _ in range(begin, end)])


def _carried(text: object, column: str) -> bytes:
    if text is UNSET or not isinstance(text, str):
        raise ContractViolation(
            f"its generator published no `{column}`: no stage of the job asks for it", field=f"column {column}"
        )
    return text.encode()


def row_shapes(batch: RolloutBatch) -> list[RowShape]:
    """Returns the shape of each row of the batch."""
    return [
        RowShape(len(group.prompt_token_ids) // 4, rollout.completion.num_sampled, rollout.completion.num_tokens)
        for group in batch.groups
        for rollout in group.rollouts
    ]


def base_values(batch: RolloutBatch, names: Iterable[str], rows: range) -> dict[str, list[bytes]]:
    """Reads base columns of some rows off their batch. Raises ContractViolation for one that was not published."""
    places = (divmod(row, batch.group_size) for row in rows)
    chosen = [(batch.groups[group], batch.groups[group].rollouts[sample]) for group, sample in places]
    return {name: [_BASE[name][2](group, rollout) for group, rollout in chosen] for name in names if name in _BASE}


def pack_values(values: ColumnValues) -> bytes:
    """Values → MessagePack; equal values give equal bytes, in whatever order their columns come."""
    return encode({name: list(values[name]) for name in sorted(values)})


def unpack_values(data: bytes) -> dict[str, list[bytes]]:
    """Unpacks values of MessagePack. Raises ContractViolation."""
    return decode(data, dict[str, list[bytes]])


def values_digest(values: ColumnValues) -> str:
    """Returns the digest of the columns of a whole batch: what was trained beside the batch's own digest."""
    return content_digest(pack_values(values))


def check_values(values: ColumnValues, columns: Collection[Column], shapes: Sequence[RowShape], *, of: str) -> None:
    """Raises ContractViolation that names the column and the row, for values that aren't those of the columns.

    of: what brings them, e.g. "stage teacher, batch 3/train/1".
    """
    expected = {column.name: column for column in columns}
    for name in sorted(expected.keys() ^ values.keys()):
        problem = "is no output of this stage"
        if name in expected:
            problem = "is missing"
        raise ContractViolation(f"column {name} {problem}; its outputs are {', '.join(expected)}", field=of)
    for name, column in expected.items():
        if len(values[name]) != len(shapes):
            raise ContractViolation(f"column {name} has {len(values[name])} values for {len(shapes)} rows", field=of)
        for row, (value, shape) in enumerate(zip(values[name], shapes, strict=True)):
            problem = _problem(value, column, shape)
            if problem:
                raise ContractViolation(f"column {name}, row {row}: {problem}", field=of)


def _problem(value: bytes, column: Column, shape: RowShape) -> str:
    if column.type == "text":
        if len(value) > MAX_TEXT_BYTES:
            return f"a text of {len(value)} bytes is longer than {MAX_TEXT_BYTES}"
        try:
            value.decode()
        except UnicodeDecodeError:
            return "the text is not UTF-8"
        return ""
    length = shape.length(column.per)
    if len(value) != length * column.num_bytes:
        return f"{len(value)} bytes are not {length} x {column.type}, {column.width or 'one'} per {column.per}"
    numbers = UNPACKERS[column.type](value) if column.type in UNPACKERS else ()
    # A log-prob of -inf or a score of NaN would end the job as diverged, and name no stage. Sums are the fast test.
    if not math.isfinite(sum(numbers)) and not all(map(math.isfinite, numbers)):
        return "a number is not finite"
    return ""
