"""MessagePack on the wire, JSON at the HTTP edge. Decoding validates; a bad record names its field.

Every number of a job has two bounds, and every text and list a longest length, so that no valid job can end a stack.
The ranges that spec fields share stand here; contracts/spec/limits.py bounds their products. The upper bounds are far
beyond what the largest known runs use, and within what one Redis and one process can hold.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from contracts.errors import ContractViolation, InvalidInput

T = TypeVar("T")

MAX_ITERATIONS = 1_000_000
MAX_BATCHES = 10_000
MAX_PROMPTS = 4096
MAX_TOKENS = 2**20
MAX_ATTEMPTS = 1000
NO_CONTROL_CHARACTERS = r"^(?![\s\S]*[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069])"
"""Neither line breaks, escapes, nor marks that turn the direction of writing around: the text is shown in logs and
terminals, or is a path."""

Iterations = Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)]
IterationsOrNone = Annotated[int, Meta(ge=0, le=MAX_ITERATIONS)]
Batches = Annotated[int, Meta(ge=1, le=MAX_BATCHES)]
"""In an iteration: each is an entry of the ledger and of what is in work, and one script opens them all."""
Prompts = Annotated[int, Meta(ge=1, le=MAX_PROMPTS)]
"""In a batch."""
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
"""In one text: contexts have a million tokens at most."""
Characters = Annotated[int, Meta(ge=0, le=2**27)]
Attempts = Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]
Seconds = Annotated[float, Meta(gt=0.0, le=604800.0)]
"""A deadline of a week at most."""
Lease = Annotated[float, Meta(ge=0.01, le=86400.0)]
"""A holder renews it three times in this time."""
Factor = Annotated[float, Meta(ge=0.0, le=1000.0)]
"""A coefficient of the loss, or what is added to a denominator."""
Line = Annotated[str, Meta(min_length=1, max_length=256, pattern=NO_CONTROL_CHARACTERS)]
"""A name."""
FilePath = Annotated[str, Meta(min_length=1, max_length=1024, pattern=NO_CONTROL_CHARACTERS)]
FilePathOrNone = Annotated[str, Meta(max_length=1024, pattern=NO_CONTROL_CHARACTERS)]
Text = Annotated[str, Meta(max_length=65536)]
"""A part of a prompt."""
Pattern = Annotated[str, Meta(max_length=4096)]
"""A regular expression."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that crosses a process line: frozen and closed; each type repeats `kw_only=True`.

    msgspec inherits every class option but that one.
    """


class Table(Record, tag_field="type", frozen=True, kw_only=True):
    """A table of a spec that is one of several kinds."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    def files(self) -> dict[str, str]:
        """Returns the paths that it names below the stack's model root, by their field."""
        return {}


R = TypeVar("R", bound=Record)
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Exceptions that a decoder raises for bytes that are no record; the last one where they are thousands of levels
deep."""

KEY_IN_PROBLEM = re.compile(r"object (?P<fault>contains unknown|missing required) field `(?P<key>[^`]+)`")
"""msgspec's words for an unknown or missing key of the table that `invalid_input` names as the field."""

INVALID_CHOICE = re.compile(r"invalid (?:enum )?value '?(?P<value>.*?)'?", re.DOTALL)
"""Its words for a literal, an enum or the `type` of a table that is none of its choices."""
MOST_NAMES = 12
DEEPEST_TABLE = 4
NEAR = 0.78
"""By `ONBEAT_`, which all settings have in common, no two of them are near."""
FEWEST_LETTERS = 4
"""A value of so many letters that is the beginning of a single name is near to it, however long the name is."""
UNION = msgspec.inspect.UnionType
LISTS = (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)
INDEX = re.compile(r"\[(?:\d+|\.\.\.)\]")

_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_making = threading.Lock()
_type_info = cache(msgspec.inspect.type_info)

MAP_16 = 0xDE
"""The first byte of a map of MessagePack that opens with 3 bytes; the other two are its number of pairs."""
FIX_MAP = 0x80
"""The bits of the byte that opens a smaller map; the number of its pairs is in the other bits."""
LARGEST_FIX_MAP = 15
"""Most pairs of a map that opens with one byte."""


def encode(record: Any) -> bytes:
    """Encodes a record as MessagePack; arrays are `bin`, structs are maps by field name."""
    data = _encoder.encode(record)
    if data[0] == MAP_16 and data[1] == 0 and data[2] <= LARGEST_FIX_MAP:
        # msgspec chooses the head by the fields of the type, not by those that are there: a type that gains an optional
        # field would change the bytes, and the digest, of each record that doesn't have it.
        return bytes((FIX_MAP | data[2],)) + data[3:]
    return data


def decoder_of(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Returns the decoder of a type; from then on any number of threads may decode or convert to it, in any format.

    msgspec keeps what it reads of a struct's annotations with the struct, while it still reads: of two threads that
    meet a type for the first time, the second finds half of it, and the process dies of a segmentation fault.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _making:
            decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return decoder


def decode(data: bytes | None, kind: type[T]) -> T:
    """Decodes a record. Raises ContractViolation that names the field, also where there is nothing to read."""
    if data is None:
        raise ContractViolation("is not there", field=getattr(kind, "__name__", str(kind)))
    decoder = decoder_of(kind)
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise ContractViolation(str(error), field=getattr(kind, "__name__", str(kind))) from error


def encode_json(record: Any) -> bytes:
    """Encodes a record as JSON, for people and HTTP."""
    return _json_encoder.encode(record)


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """Decodes a record of JSON from outside. Raises InvalidInput that names the field."""
    decoder_of(kind)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_input(error, kind) from error
    except ContractViolation as error:
        raise InvalidInput(error.problem, field=error.field, cure=error.cure) from error
    except UNREADABLE as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error


def convert(values: Any, kind: type[T], *, strict: bool = True) -> T:
    """Makes a record of plain dicts and lists, such as a parsed TOML file.

    Args:
        values: The dicts and lists.
        kind: The record's type.
        strict: False lets numbers be texts, as in environment variables.

    Raises:
        InvalidInput: The values are no such record; it names the field.
    """
    decoder_of(kind)
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise invalid_input(error, kind) from error
    except ContractViolation as error:
        raise InvalidInput(error.problem, field=error.field, cure=error.cure) from error
    except RecursionError as error:
        raise InvalidInput(f"too deep: {error}") from error


def changed(record: R, **fields: Any) -> R:
    """Returns the record with other values, which are of the fields' types already."""
    return msgspec.structs.replace(record, **fields)


def invalid_input(error: msgspec.ValidationError, kind: type) -> InvalidInput:
    """Makes our error: `Expected `int` - at `$.model.seed`` → field "model.seed", problem "expected `int`".

    For a table's key, which msgspec calls "`key` in `$.table`", the field is the table.
    """
    problem, _, place = str(error).partition(" - at `")
    path = f"${place.rpartition('$')[2]}"
    if NO_CONTROL_CHARACTERS in problem or repr(NO_CONTROL_CHARACTERS)[1:-1] in problem:
        problem = "Has control characters: line breaks, escapes or marks of writing direction"
    field = path.rstrip("`").removeprefix("$").removeprefix(".")
    problem = problem[:1].lower() + problem[1:]
    return InvalidInput(problem, field=field or None, cure=_cure(problem, _type_info(kind), field))


def _cure(problem: str, kind: msgspec.inspect.Type, field: str) -> str | None:
    """Says which choices a value or a table's keys have; None for another problem.

    Args:
        problem: The problem, as msgspec says it.
        kind: The type of the record that was read.
        field: The dotted path of the field.
    """
    kinds = _kinds(kind, field)
    tables = [member for member in kinds if isinstance(member, msgspec.inspect.StructType)]
    choice = INVALID_CHOICE.fullmatch(problem)
    if choice is not None:
        names = [str(table.tag) for table in tables if table.tag_field and field.endswith(table.tag_field)]
        if not names:
            names = [name for member in kinds for name in _choices(member)]
        return one_of(choice["value"], names)
    unknown = KEY_IN_PROBLEM.fullmatch(problem)
    if unknown is None or unknown["fault"] != "contains unknown":
        return None
    key = unknown["key"]
    tag_fields = {member.encode_name: table.tag_field for table in tables for member in table.fields}
    tag_field = tag_fields.get(key)
    if tag_field:  # another of the tables that may stand here has the key
        owners = [f'"{table.tag}"' for table in tables if key in (member.encode_name for member in table.fields)]
        return f"only with {tag_field} = {' or '.join(owners)}"
    return one_of(key, list(tag_fields), elsewhere=_places(kind, key))


def _places(kind: msgspec.inspect.Type, key: str, table: str = "") -> list[str]:
    """Returns the dotted paths of a key below a type, such as `optimizer.learning_rate`; it looks into no list.

    Args:
        kind: The type.
        key: The key.
        table: The path of the type itself, with its dot.
    """
    tables = [member for member in _members(kind) if isinstance(member, msgspec.inspect.StructType)]
    fields = [field for member in tables for field in member.fields]
    if any(field.encode_name == key for field in fields):
        return [f"{table}{key}"]
    below = [(field.type, f"{table}{field.encode_name}.") for field in fields if table.count(".") < DEEPEST_TABLE]
    return list(dict.fromkeys(place for of_field, path in below for place in _places(of_field, key, path)))


def one_of(value: str, names: Sequence[str], *, elsewhere: Sequence[str] = ()) -> str | None:
    """Returns `did you mean icepop? One of decoupled_ppo, icepop, …`; None where no name is known.

    Of many names only the near one is said. elsewhere: where the value would be right, if it is near to none of them.
    """
    near = difflib.get_close_matches(value[:100], names, n=1, cutoff=NEAR)  # a text from outside may be long
    longer = [name for name in names if len(value) >= FEWEST_LETTERS and name.startswith(value)]
    if len(longer) == 1:
        near = longer
    choices = ", ".join(names)
    if near or elsewhere:
        others = ""
        if near and len(names) <= MOST_NAMES:
            others = f" One of {choices}"
        return f"did you mean {' or '.join(near or elsewhere)}?{others}"
    return f"one of {choices}" if names else None


def _kinds(kind: msgspec.inspect.Type, field: str) -> Sequence[msgspec.inspect.Type]:
    """Returns the types that may stand at a dotted path, of which an index of a list is `[...]` or a part by itself.

    The path of a `type` that chooses among tables leads to these tables.
    """
    kinds: Sequence[msgspec.inspect.Type] = _members(kind)
    if not field:
        return kinds
    for name in INDEX.sub(".0", field).split("."):
        tables = [member for member in kinds if isinstance(member, msgspec.inspect.StructType)]
        if name.isdecimal():  # an element of a list
            below = [member.item_type for member in kinds if isinstance(member, LISTS)]
        else:
            below = [key.type for table in tables for key in table.fields if key.encode_name == name]
        chosen = [table for table in tables if table.tag_field == name]
        kinds = chosen or [member for inner in below for member in _members(inner)]
    return kinds


def _members(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """Returns the members of a union, those of a union in it too; another type is its only member."""
    while isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if isinstance(kind, UNION):
        return [member for inner in kind.types for member in _members(inner)]
    return [kind]


def _choices(kind: msgspec.inspect.Type) -> list[str]:
    """Returns the values of an enum or a literal; [] for another type."""
    if isinstance(kind, msgspec.inspect.EnumType):
        return [str(member.value) for member in kind.cls]
    if isinstance(kind, msgspec.inspect.LiteralType):
        return [str(value) for value in kind.values]
    return []
