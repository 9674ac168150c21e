"""A spec with wrong keys is refused with all of them, whichever door it comes by."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.encoding.wire import encode_json
from contracts.errors import MOST_REFUSALS, InvalidInput, SpecRefused
from contracts.spec.job import JobSpec
from contracts.spec.reading import NAMES_ELSEWHERE, read_json, read_values, spec_of_values, where_read
from contracts.weights import FileWeights

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
        _ = read_json(before).whole
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
    assert lines({"name": "test"}) == [
        "iterations: is required (docs/configuration.md explains it)",
        "model: is required (docs/configuration.md explains it)",
        "dataset: is required (docs/configuration.md explains it)",
    ]


@pytest.mark.parametrize(
    ("changes", "unread"),
    [
        ({"seed": "one"}, {"seed"}),
        ({"shedule": "delayed"}, {"schedule"}),
        ({"optimizer": {"beta2": 0.9, "beta1x": 0.9}}, {"beta1"}),
        ({"trainer": {"max_steps": 9}}, set()),
        ({"trainer": {"lr": 1e-3}}, {"learning_rate"}),
        ({"rollout": {"top_p": 0.9}}, {"top_p", "sampling"}),
        ({"colour": 3}, {"seed", "max_policy_lag"}),
        ({"colour": "delayed"}, {"schedule"}),
        ({"trackers": ["wandb", "wand"]}, {"trackers"}),
        ({"dataset": {"type": "jsonl", "num_train_prompts": 3}}, {"dataset"}),
        ({"dataset": {"type": "adition"}}, {"dataset"}),
        ({"environment": {"name": "tools", "params": {"tools": [1]}}}, {"params"}),
    ],
)
def test_a_wrong_key_and_what_a_misspelt_one_may_stand_for_have_no_value(
    changes: dict[str, Any], unread: set[str]
) -> None:
    reading = read_values(SPEC | changes)
    assert reading.unread == unread
    assert reading.spec is not None
    assert reading.plain == SPEC | changes
    if "schedule" in unread:
        with pytest.raises(AttributeError):
            _ = reading.spec.schedule
        with where_read(unread):
            pytest.fail(reading.spec.schedule)
        with pytest.raises(AttributeError), where_read({"seed"}):
            pytest.fail(reading.spec.schedule)


def test_a_spec_that_lacks_values_leaves_the_defaults_of_others_as_they_are() -> None:
    assert read_values(SPEC | {"rollout": {"sampling": {"top_p": "x"}}, "weights": {"transport": 3}}).refusals
    assert spec_of_values(SPEC).rollout.sampling.top_p == 1.0
    assert spec_of_values(SPEC).weights == FileWeights()


def test_entries_of_a_list_are_named_by_their_places_though_others_are_wrong_too() -> None:
    components = [{"type": "exat"}, {"type": "exact"}, {"type": "length"}, {"type": "exact", "weight": "x"}, 7]
    assert [line.partition(": ")[0] for line in lines(SPEC | {"reward": {"components": components}})] == [
        "reward.components[0].type",
        "reward.components[2].target_chars",
        "reward.components[3].weight",
        "reward.components[4]",
    ]


def test_a_key_that_is_required_is_not_missing_where_it_is_misspelt() -> None:
    values = {key: value for key, value in SPEC.items() if key != "iterations"}
    assert lines(values | {"iteratons": 4}) == ["iteratons: unknown key (did you mean iterations?)"]


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
        read_json(body)
    assert not isinstance(refused.value, SpecRefused)


@pytest.mark.parametrize("values", [[], "text", None, 7])
def test_what_is_no_table_is_refused_as_a_whole(values: Any) -> None:
    with pytest.raises(SpecRefused, match="expected `object`") as refused:
        spec_of_values(values)
    assert refused.value.field is None


def test_a_table_of_a_hundred_thousand_levels_is_refused_by_a_line() -> None:
    with pytest.raises(InvalidInput) as refused:
        read_json(b'{"dataset":' + b'{"params":' * 100_000)
    assert str(refused.value)
    deep: Any = {}
    for _ in range(100_000):
        deep = {"params": deep}
    with pytest.raises(InvalidInput) as refused:
        spec_of_values(SPEC | {"dataset": {"type": "plugin", "entry_point": "own", "params": deep}})
    assert str(refused.value)
