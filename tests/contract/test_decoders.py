"""Every decoder of what comes from outside answers with a value, or refuses: no bytes are a traceback.

`make fuzz` searches for longer (FUZZ_EXAMPLES).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import httpx
import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.encoding.wire import convert, decode, decode_json, encode_json
from contracts.errors import ContractViolation, InvalidInput, OnbeatError
from contracts.rewards import RewardRequest, TaskEntry
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings, settings_from
from contracts.spec.job import JobSpec
from onbeat.base.http.problems import Problem
from onbeat.client.gateway import audit_entries, parse_events
from reward_service.endpoints import BodyFormat, decode_request
from tests.contract.golden_files import NAMES, golden, golden_bytes, kind_of, record_types
from tests.contract.test_golden_bytes import NEVER_SENT

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "6"))
SEARCH = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
KINDS = sorted(record_types() - NEVER_SENT, key=lambda kind: kind.__name__)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ANY_TEXT = st.text(st.characters(), max_size=200)
"""Any text, unpaired surrogates included."""
DEPTHS = (100, 5_000, 300_000)


@st.composite
def damaged(draw: st.DrawFn, original: bytes) -> bytes:
    """Damaged bytes: one piece is cut out, one is written over, and one is repeated elsewhere."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 16)))
        data[start:end] = draw(st.sampled_from([b"", bytes(data[:16])]) | st.binary(max_size=16))
    return bytes(data)


@st.composite
def changed(draw: st.DrawFn, original: Any) -> Any:
    """The value with another one in the place of one of its parts, at any depth."""
    if isinstance(original, dict) and original and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(original)))
        return {**original, key: draw(changed(original[key]))}
    if isinstance(original, list | tuple) and original and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(original) - 1))
        return [*original[:index], draw(changed(original[index])), *original[index + 1 :]]
    return draw(PLAIN)


def answers_or_refuses(decode_it: Callable[[], object], *refusals: type[Exception]) -> None:
    """Asserts that the error's message can be sent."""
    said = "a value"
    try:
        decode_it()
    except refusals as refusal:
        said = str(refusal)
    assert said.encode("utf-8", "backslashreplace")


@pytest.mark.parametrize("name", NAMES)
@SEARCH
@given(st.data())
def test_messagepack_that_is_damaged_or_changed_is_a_value_or_a_violation(name: str, data: st.DataObject) -> None:
    kind = kind_of(name)
    plain = msgpack.unpackb(golden_bytes(name), use_list=True)
    for sent in (data.draw(damaged(golden_bytes(name))), msgpack.packb(data.draw(changed(plain)))):
        answers_or_refuses(lambda sent=sent: decode(sent, kind), ContractViolation)


@pytest.mark.parametrize("name", NAMES)
@SEARCH
@given(st.data())
def test_json_that_is_damaged_or_changed_is_a_value_or_a_refusal(name: str, data: st.DataObject) -> None:
    kind = kind_of(name)
    text = encode_json(golden(name))
    for sent in (data.draw(damaged(text)), json.dumps(data.draw(changed(json.loads(text))), default=str).encode()):
        answers_or_refuses(lambda sent=sent: decode_json(sent, kind), InvalidInput)


def test_a_record_that_refuses_what_json_and_plain_values_say_of_it_is_bad_input() -> None:
    plain = json.loads(encode_json(golden("RolloutBatch"))) | {"group_size": 1}
    for decode_it in (lambda: decode_json(json.dumps(plain), RolloutBatch), lambda: convert(plain, RolloutBatch)):
        with pytest.raises(InvalidInput, match=r"^groups: prompt train/17 has 2 rollouts, the batch needs 1$"):
            decode_it()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@SEARCH
@given(noise=st.binary(max_size=200), plain=PLAIN)
def test_noise_is_refused_by_every_type_in_every_form(kind: type, noise: bytes, plain: Any) -> None:
    answers_or_refuses(lambda: decode(noise, kind), ContractViolation)
    answers_or_refuses(lambda: decode(msgpack.packb(plain), kind), ContractViolation)
    answers_or_refuses(lambda: decode_json(noise, kind), InvalidInput)
    answers_or_refuses(lambda: convert(plain, kind), InvalidInput)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_is_too_deep_to_be_refused(kind: type, depth: int) -> None:
    for field in [*kind.__struct_fields__, "entry", "x"]:
        deep = b'{"%s":' % field.encode() + b"[" * depth
        answers_or_refuses(lambda deep=deep: decode_json(deep, kind), InvalidInput)
        tables = b'{"%s":' % field.encode() + b'{"a":' * depth + b"1" + b"}" * (depth + 1)
        answers_or_refuses(lambda tables=tables: decode_json(tables, kind), InvalidInput)
        packed = b"\x81" + msgpack.packb(field) + b"\x91" * depth + b"\xc0"
        answers_or_refuses(lambda packed=packed: decode(packed, kind), ContractViolation)


def event_stream(text: str) -> httpx.Response:
    body = f"data: {text}\n\nid:{text}\ndata:{{}}\n\n".encode(errors="replace")
    return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=body)


@SEARCH
@given(st.data())
def test_the_readers_above_the_wire_refuse_in_their_own_form(data: st.DataObject) -> None:
    noise = data.draw(st.binary(max_size=200) | damaged(golden_bytes("RewardRequest")))
    answers_or_refuses(lambda: decode_request(noise, BodyFormat.JSON, RewardRequest), Problem)
    answers_or_refuses(lambda: decode_request(noise, BodyFormat.MSGPACK, RewardRequest), Problem)
    entries = damaged(encode_json(golden("TaskEntry"))).map(lambda one: one.decode("latin-1"))
    text = data.draw(ANY_TEXT | entries)
    answers_or_refuses(lambda: decode_json(text, TaskEntry), OnbeatError)
    answers_or_refuses(lambda: list(parse_events(event_stream(text))), OnbeatError)


@SEARCH
@given(body=PLAIN | changed({"records": [{**msgspec.to_builtins(golden("AuditRecord-commit")), "digest": "x"}]}))
def test_an_audit_chain_of_another_form_is_refused(body: Any) -> None:
    answers_or_refuses(lambda: audit_entries(body), OnbeatError)


@SEARCH
@given(
    st.dictionaries(
        st.sampled_from([f"ONBEAT_{name.upper()}" for name in StackSettings.__struct_fields__]) | st.text(max_size=12),
        st.text(max_size=12) | st.sampled_from(["nan", "inf", "-1", "1e999", "٣", "0x10", "99999999999999999999"]),
        max_size=4,
    )
)
def test_settings_are_read_or_refused(environment: dict[str, str]) -> None:
    answers_or_refuses(lambda: settings_from(environment), InvalidInput)


@SEARCH
@given(body=changed(msgspec.to_builtins(golden("JobSpec-reasoning_gym"))))
def test_a_changed_job_spec_is_a_job_or_a_refusal_that_names_a_field(body: Any) -> None:
    answers_or_refuses(lambda: convert(body, JobSpec), InvalidInput)
