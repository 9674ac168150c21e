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
"""What bytes that are no record make a decoder raise; the last one where they are thousands of levels deep."""

KEY_IN_PROBLEM = re.compile(r"object (?P<fault>contains unknown|missing required) field `(?P<key>[^`]+)`")
"""What `invalid_input` says of a key of the table that it names as the field."""

INVALID_CHOICE = re.compile(r"invalid (?:enum )?value '?(?P<value>.*?)'?", re.DOTALL)
"""What it says of a literal, an enum or the `type` of a table that is none of its choices."""
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

MAP_16, FIX_MAP, LARGEST_FIX_MAP = 0xDE, 0x80, 15
"""How MessagePack opens a map: with 3 bytes, or, up to 15 pairs, with one."""


def encode(record: Any) -> bytes:
    """Record → MessagePack; arrays are `bin`, structs are maps by field name."""
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
    """MessagePack → record. Raises ContractViolation that names the field, also where there is nothing to read."""
    if data is None:
        raise ContractViolation("is not there", field=getattr(kind, "__name__", str(kind)))
    decoder = decoder_of(kind)
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise ContractViolation(str(error), field=getattr(kind, "__name__", str(kind))) from error


def encode_json(record: Any) -> bytes:
    """Record → JSON, for people and HTTP."""
    return _json_encoder.encode(record)


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """JSON from outside → record. Raises InvalidInput that names the field."""
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
    """Plain dicts and lists (a parsed TOML file) → record; without `strict`, numbers may be texts (variables).

    Raises InvalidInput that names the field.
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
    """`Expected `int` - at `$.model.seed`` → field "model.seed", problem "expected `int`".

    Of a table's key, which msgspec calls "`key` in `$.table`", the field is the table.
    """
    problem, _, place = str(error).partition(" - at `")
    path = f"${place.rpartition('$')[2]}"
    if NO_CONTROL_CHARACTERS in problem or repr(NO_CONTROL_CHARACTERS)[1:-1] in problem:
        problem = "Has control characters: line breaks, escapes or marks of writing direction"
    field = path.rstrip("`").removeprefix("$").removeprefix(".")
    problem = problem[:1].lower() + problem[1:]
    return InvalidInput(problem, field=field or None, cure=_cure(problem, _type_info(kind), field))


def _cure(problem: str, kind: msgspec.inspect.Type, field: str) -> str | None:
    """What the choices are, of a value or of a table's keys; None of another problem."""
    kinds = _kinds(kind, field)
    tables = [one for one in kinds if isinstance(one, msgspec.inspect.StructType)]
    if found := INVALID_CHOICE.fullmatch(problem):
        tags = [str(table.tag) for table in tables if table.tag_field and field.endswith(table.tag_field)]
        return one_of(found["value"], tags or [name for one in kinds for name in _choices(one)])
    found = KEY_IN_PROBLEM.fullmatch(problem)
    if found is None or found["fault"] != "contains unknown":
        return None
    keys = {key.encode_name: table.tag_field for table in tables for key in table.fields}
    if tag_field := keys.get(found["key"]):
        owners = [f'"{one.tag}"' for one in tables if found["key"] in (key.encode_name for key in one.fields)]
        return f"only with {tag_field} = {' or '.join(owners)}"
    return one_of(found["key"], list(keys), elsewhere=_places(kind, found["key"]))


def _places(kind: msgspec.inspect.Type, key: str, table: str = "") -> list[str]:
    """The dotted paths of a key below a type, such as `optimizer.learning_rate`; it looks into no list."""
    fields = [field for one in _members(kind) if isinstance(one, msgspec.inspect.StructType) for field in one.fields]
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
    if near or elsewhere:
        others = f" One of {', '.join(names)}" if near and len(names) <= MOST_NAMES else ""
        return f"did you mean {' or '.join(near or elsewhere)}?{others}"
    return f"one of {', '.join(names)}" if names else None


def _kinds(kind: msgspec.inspect.Type, field: str) -> Sequence[msgspec.inspect.Type]:
    """The types that may stand at a dotted path, of which an index of a list is `[...]` or a part by itself.

    The path of a `type` that chooses among tables leads to these tables.
    """
    kinds: Sequence[msgspec.inspect.Type] = _members(kind)
    for name in INDEX.sub(".0", field).split(".") if field else ():
        lists = [one.item_type for one in kinds if isinstance(one, LISTS)]
        tables = [one for one in kinds if isinstance(one, msgspec.inspect.StructType)]
        below = [one.type for table in tables for one in table.fields if one.encode_name == name]
        chosen = [table for table in tables if table.tag_field == name]
        kinds = chosen or [member for one in (lists if name.isdecimal() else below) for member in _members(one)]
    return kinds


def _members(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    while isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    return [member for one in kind.types for member in _members(one)] if isinstance(kind, UNION) else [kind]


def _choices(kind: msgspec.inspect.Type) -> list[str]:
    if isinstance(kind, msgspec.inspect.EnumType):
        return [str(member.value) for member in kind.cls]
    return [str(value) for value in kind.values] if isinstance(kind, msgspec.inspect.LiteralType) else []
