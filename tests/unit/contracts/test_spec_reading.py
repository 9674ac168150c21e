"""A spec with wrong keys is refused with all of them, whichever door it comes by."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.encoding.wire import encode_json
from contracts.errors import InvalidInput, SpecRefused
from contracts.spec.job import JobSpec
from contracts.spec.reading import MOST_REFUSALS, NAMES_ELSEWHERE, spec_of_json, spec_of_values

SPEC: dict[str, Any] = {
    "name": "test",
    "iterations": 4,
    "model": {"path": "qwen3"},
    "dataset": {"type": "addition"},
    "reward": {"components": [{"type": "exact"}]},
}


def lines(values: Any) -> list[str]:
    """The refusals of a spec, which are the same of values and of JSON."""
    before = encode_json(values)
    with pytest.raises(SpecRefused) as of_values:
        spec_of_values(values)
    assert encode_json(values) == before, "what a program holds stays as it is"
    with pytest.raises(SpecRefused) as of_json:
        spec_of_json(before)
    assert of_json.value.refusals == of_values.value.refusals
    return str(of_values.value).splitlines()


def test_every_wrong_key_is_named_at_once_with_its_cure() -> None:
    wrong = {
        "name": 1,
        "modl": 1,
        "model": {"path": "x", "pth": 1},
        "algorithm": {"loss": "grop"},
        "rollout": {"group_size": 0},
    }
    assert lines(SPEC | wrong) == [
        "name: expected `str`, got `int`",
        "model.pth: unknown key (did you mean path? One of path, dtype, cast_lm_head_to_fp32, matmul, file_digests)",
        "modl: unknown key (did you mean model?)",
        "algorithm.loss: invalid enum value 'grop' (one of bnpo, cispo, dapo, dr_grpo, grpo, gspo, sft)",
        "rollout.group_size: expected `int` >= 1",
    ]


def test_a_wrong_key_of_an_entry_of_a_list_is_named_by_its_place() -> None:
    components = [{"type": "exact", "wieght": 1.0}, {"type": "length", "target_chars": -1, "max_chars": 9}]
    assert lines(SPEC | {"reward": {"components": components}}) == [
        "reward.components[0].wieght: unknown key (did you mean weight?)",
        "reward.components[1].target_chars: expected `int` >= 0",
    ]


def test_a_required_key_that_is_wrong_is_refused_once() -> None:
    assert lines(SPEC | {"iterations": -1, "seed": -1}) == [
        "iterations: expected `int` >= 0",
        "seed: expected `int` >= 0",
    ]
    assert lines({"name": "test"}) == ["iterations: is required (docs/configuration.md explains it)"]


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_a_key_of_another_library_is_refused_with_the_key_that_says_it_here(name: str) -> None:
    table, _, key = NAMES_ELSEWHERE[name].rpartition(".")
    assert lines(SPEC | {"algorithm": {name: 1}}) == [
        f"algorithm.{name}: unknown key (did you mean {NAMES_ELSEWHERE[name]}?)"
    ]
    if table in ("algorithm", "optimizer", "rollout", "trainer"):
        kind = {field: getattr(spec_of_values(SPEC), field) for field in JobSpec.__struct_fields__}[table]
        assert key in type(kind).__struct_fields__


def test_a_spec_of_a_thousand_wrong_keys_is_read_a_bounded_number_of_times() -> None:
    assert len(lines(SPEC | {f"key_{number}": 1 for number in range(1000)})) == MOST_REFUSALS


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe"])
def test_a_body_that_is_no_json_is_no_spec_that_breaks_rules(body: bytes) -> None:
    with pytest.raises(InvalidInput) as refused:
        spec_of_json(body)
    assert not isinstance(refused.value, SpecRefused)


@pytest.mark.parametrize("values", [[], "text", None, 7])
def test_what_is_no_table_is_refused_as_a_whole(values: Any) -> None:
    with pytest.raises(SpecRefused, match="expected `object`") as refused:
        spec_of_values(values)
    assert refused.value.field is None


def test_a_table_of_a_hundred_thousand_levels_is_refused_by_a_line() -> None:
    with pytest.raises(InvalidInput) as refused:
        spec_of_json(b'{"dataset":' + b'{"params":' * 100_000)
    assert str(refused.value)
    deep: Any = {}
    for _ in range(100_000):
        deep = {"params": deep}
    with pytest.raises(InvalidInput) as refused:
        spec_of_values(SPEC | {"dataset": {"type": "plugin", "entry_point": "own", "params": deep}})
    assert str(refused.value)
