"""What stages of a job mean, and which of them are refused with what words."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_float64, pack_int32
from contracts.encoding.wire import encode
from contracts.errors import ContractViolation, FenceViolation
from contracts.experience.columns import (
    BASE_COLUMNS,
    Column,
    RowShape,
    base_values,
    check_values,
    pack_values,
    row_shapes,
    unpack_values,
)
from contracts.experience.graph import circle, columns_of
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from contracts.spec.rules import check_spec
from contracts.spec.rules import judge as refusals_of
from tests import builders
from tests.refusals import refusal_of
from tests.trajectories import played

COLUMNS = (Column(name="score", type="float32"), Column(name="values", type="float32", per="token"))
SHAPES = [RowShape(3, 2, 2), RowShape(3, 1, 1)]


def spec_with(*stages: dict[str, Any], **tables: Any) -> JobSpec:
    return builders.job_spec(stages=list(stages), **tables)


def external(name: str, inputs: list[str], *outputs: str, **more: Any) -> dict[str, Any]:
    made = [{"name": output, "type": "float32"} for output in outputs]
    return {"type": "external", "name": name, "inputs": inputs, "outputs": made, **more}


def batch_of(*lengths: int) -> RolloutBatch:
    """One group, whose responses are these numbers of tokens, and as many letters."""
    rollouts = [replace(builders.rollout(range(length), float(length)), text="x" * length) for length in lengths]
    return builders.batch_of([([7, 8, 9], rollouts)])


def judge(**keys: Any) -> dict[str, Any]:
    return {"type": "llm_judge", "model": "m", "prompt": "{completion}", **keys}


@pytest.mark.parametrize(
    ("keys", "dtype", "widths"),
    [
        ({"top_k": 3}, "float32", {"teacher_top": 7}),
        ({"hidden_size": 5}, "float32", {"teacher_states": 5, "teacher_head": UNSET}),
        ({"hidden_size": 5}, "bfloat16", {"teacher_states": 3, "teacher_head": UNSET}),
    ],
)
def test_a_teacher_sends_what_the_trainer_makes_distributions_of(
    keys: dict[str, int], dtype: str, widths: dict[str, Any]
) -> None:
    distils = {"distillation_coefficient": 0.5, "distillation_beta": 0.5}
    spec = spec_with({"type": "teacher", "model": "m", **keys}, model__dtype=dtype, algorithm=distils)
    (stage,) = spec.stage_graph.stages
    assert {column.name: column.width for column in stage.outputs} == {"teacher_logprobs": UNSET, **widths}


def test_a_stage_that_states_a_score_has_a_column_more_with_the_reason_and_any_other_is_what_it_was() -> None:
    def outputs(**keys: Any) -> list[tuple[str, str]]:
        (stage,) = spec_with(judge(**keys), deterministic=False).stage_graph.stages
        return [(column.name, column.type) for column in stage.outputs]

    assert outputs() == outputs(on_failure="fail") == [("llm_judge", "float32")]
    assert outputs(name="strict", on_failure=0.5) == [("strict", "float32"), ("strict_failure", "text")]


RUBRIC = {"answer": "json", "criteria": {"right": 3.0, "short": 1.0}}


def test_each_criterion_of_a_judge_is_a_column_and_a_part_of_its_weight() -> None:
    spec = spec_with(judge(**RUBRIC, weight=2.0, on_failure=0.5), deterministic=False)
    columns = [(column.name, column.type) for column in spec.stage_graph.outputs]
    scores = [("llm_judge_right", "float32"), ("llm_judge_short", "float32")]
    assert columns == [*scores, ("llm_judge_failure", "text")]
    assert spec.stage_reward_weights == {"llm_judge_right": 1.5, "llm_judge_short": 0.5}


def test_a_stage_named_as_the_environment_states_no_score() -> None:
    spec = {"environment": {"name": "secret_table", "renderer": "text"}, "deterministic": False}
    assert spec_with(judge(name="environment"), **spec).stated_scores == {}
    with refusal_of("stages[0].on_failure", match="neither a reward component nor the environment has"):
        check_spec(spec_with(judge(name="environment", on_failure=0.0), **spec))


def test_a_stage_follows_those_that_make_its_inputs() -> None:
    graph = spec_with(
        external("third", ["first_score", "text", "second_score"], "third_score", unit="batch"),
        external("first", ["text"], "first_score"),
        external("second", ["completion_ids", "first_score"], "second_score", unit="group"),
    ).stage_graph
    assert [stage.after for stage in graph.stages] == [(1, 2), (), (1,)]
    sizes = [stage.item_rows(num_groups=2, group_size=4) for stage in graph.stages]
    assert sizes == [8, 1, 4]
    assert graph.stages[2].rows_of_item(1, num_groups=2, group_size=4) == range(4, 8)
    assert not graph.carries_texts


def test_a_reward_of_a_stage_comes_too_late_for_resampling() -> None:
    stage = external("a", ["text"], "x", reward_column="x", weight=0.5)
    assert spec_with(stage).stage_reward_weights == {"x": 0.5}
    with refusal_of("rollout.max_resamples", match=r"drops groups .* \(x\)"):
        check_spec(spec_with(stage, rollout={"max_resamples": 1}))


@pytest.mark.parametrize(
    ("stages", "fields"),
    [
        ([judge(on_failure=0.0), external("a", ["text"], "llm_judge_failure")], ["stages[1]"]),
        ([external("a", ["text"], "exact", reward_column="exact")], ["stages[0].name"]),
        ([judge(answer="json", criteria={"right": 3.0}), external("a", ["text"], "llm_judge_right")], ["stages[1]"]),
        ([judge(answer="{number} of {number}")], ["stages[0].answer"]),
        ([judge(answer="JSON")], ["stages[0].answer"]),
        ([external("lost", ["nothing"], "made")], ["stages[0].inputs"]),
        (
            [external("a", ["text"], "reward"), external("a", ["no"], "y")],
            ["stages[1].name", "stages[0].outputs", "stages[1].inputs"],
        ),
    ],
)
def test_stages_that_can_not_be_are_refused_each_by_its_place(stages: list[dict[str, Any]], fields: list[str]) -> None:
    spec = spec_with(*stages, deterministic=False)
    assert [refusal.field for refusal in refusals_of(spec)] == fields


def test_a_circle_is_found_behind_stages_that_are_none() -> None:
    assert circle([(), (0, 3), (1,), (2,), (3,)]) == [1, 3, 2]
    assert circle([(), (0,), (0, 1)]) == []


def test_values_of_equal_content_are_equal_bytes() -> None:
    one = pack_values({"score": [b"1234"], "values": [b"5678"]})
    assert one == pack_values({"values": (b"5678",), "score": (b"1234",)})
    assert unpack_values(one) == {"score": [b"1234"], "values": [b"5678"]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"score": [b"1234"] * 2}, "column values is missing"),
        ({"score": [b"1234"] * 2, "values": [b"12345678", b"1234"], "more": []}, "column more is no output"),
        ({"score": [b"1234"], "values": [b"12345678", b"1234"]}, "column score has 1 values for 2 rows"),
        ({"score": [b"1234", b"12345678"], "values": [b"12345678", b"1234"]}, "column score, row 1: 8 bytes"),
        ({"score": [b"1234"] * 2, "values": [b"12345678"] * 2}, "column values, row 1: 8 bytes are not 1 x float32"),
    ],
)
def test_values_of_another_type_or_shape_are_refused_by_column_and_row(values: Any, words: str) -> None:
    with pytest.raises(ContractViolation) as refused:
        check_values(values, COLUMNS, SHAPES, of="stage judge, batch 0/train/0")
    assert words in str(refused.value)
    assert str(refused.value).startswith("stage judge, batch 0/train/0: ")


def test_a_text_column_holds_utf_8_of_bounded_length() -> None:
    column = [Column(name="note", type="text")]
    check_values({"note": ["é".encode()]}, column, SHAPES[:1], of="stage s")
    with pytest.raises(ContractViolation, match="the text is not UTF-8"):
        check_values({"note": [b"\xff"]}, column, SHAPES[:1], of="stage s")
    with pytest.raises(ContractViolation, match="longer than"):
        check_values({"note": [b"x" * (2**20 + 1)]}, column, SHAPES[:1], of="stage s")


def test_base_columns_are_read_off_the_rows_of_a_batch() -> None:
    batch = batch_of(2, 1, 3)
    assert row_shapes(batch) == [RowShape(3, 2, 2), RowShape(3, 1, 1), RowShape(3, 3, 3)]
    found = base_values(batch, ["text", "completion_ids", "made_by_a_stage"], range(1, 3))
    assert found == {"text": [b"x", b"xxx"], "completion_ids": [pack_int32([0]), pack_int32([0, 1, 2])]}
    with pytest.raises(ContractViolation, match="published no `prompt`"):
        base_values(batch, ["prompt"], range(1))


def test_a_trajectory_has_its_observations_in_two_columns_and_in_no_other() -> None:
    anew = played([[7], [9]], [[4, 4]], anew=[0])
    batch = builders.batch_of([([5, 6], [played([[7, 8], [9]], [[4, 4]], logprobs=[-0.5, -1.0, -1.5]), anew])])
    (shape, _) = row_shapes(batch)
    seen = base_values(batch, ["sees_from"], range(2))["sees_from"]
    assert seen == [pack_int32([0, 0, 0, 0, 0]), pack_int32([0, 1, 1, 1])]
    assert shape == RowShape(2, 3, 5)
    found = base_values(batch, ["completion_ids", "sampled", "generator_logprobs"], range(1))
    assert found == {
        "completion_ids": [pack_int32([7, 8, 4, 4, 9])],
        "sampled": [pack_int32([1, 1, 0, 0, 1])],
        "generator_logprobs": [pack_float32([-0.5, -1.0, -1.5])],
    }
    for name, (value,) in found.items():
        check_values({name: [value]}, [BASE_COLUMNS[name]], [shape], of="stage s")
    column = Column(name="teacher_logprobs", type="float32", per="token")
    with pytest.raises(ContractViolation, match="20 bytes are not 3 x float32, one per token"):
        check_values({column.name: [pack_float32([-1.0] * 5)]}, [column], [shape], of="stage s")
    wide = Column(name="wide", type="float32", per="token", width=2)
    check_values({"wide": [pack_float32([-1.0] * 6)]}, [wide], [shape], of="stage s")
    with pytest.raises(ContractViolation, match="12 bytes are not 3 x float32, 2 per token"):
        check_values({"wide": [pack_float32([-1.0] * 3)]}, [wide], [shape], of="stage s")


@pytest.mark.parametrize(("kind", "per"), [("float32", "rollout"), ("text", "rollout"), ("int32", "prompt_token")])
def test_a_width_is_of_numbers_of_a_sampled_token(kind: str, per: str) -> None:
    wide = external("a", ["text"]) | {"outputs": [{"name": "wide", "type": kind, "per": per, "width": 2}]}
    with refusal_of("stages[0].outputs[0].width", match="counts the numbers of a sampled token"):
        check_spec(spec_with(wide))


def test_a_batch_without_stages_has_no_byte_of_them() -> None:
    assert b"columns" not in encode(batch_of(2))
    assert b"prompt_text" not in encode(batch_of(2))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_no_value_of_a_column(number: float) -> None:
    with pytest.raises(ContractViolation, match="column score, row 0: a number is not finite"):
        check_values({"score": [pack_float32([number])]}, COLUMNS[:1], SHAPES[:1], of="stage judge")
    double = Column(name="double", type="float64", per="token")
    with pytest.raises(ContractViolation, match="column double, row 0: a number is not finite"):
        check_values({"double": [pack_float64([number, -number])]}, [double], SHAPES[:1], of="stage s")
    check_values({"double": [pack_float64([1e308] * 2)]}, [double], SHAPES[:1], of="stage s")


def test_columns_of_a_batch_are_those_of_all_of_its_items_or_the_first_that_lacks_them_is_named() -> None:
    graph, batch = spec_with(external("judge", ["text"], "score")).stage_graph, batch_of(1, 2)
    packed = [pack_values({"score": [pack_float32([row])]}) for row in (1.0, 2.0)]
    assert columns_of(graph, batch, packed) == {"score": (pack_float32([1.0]), pack_float32([2.0]))}
    with pytest.raises(FenceViolation, match="stage judge, batch 0/train/0: item 1 lacks its columns"):
        columns_of(graph, batch, [packed[0], None])
