"""A judge's answer is one plain number in its range, or an error that says why it isn't; texts are only ever texts."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from contracts.errors import BatchFailed, CompletionUnjudged
from contracts.spec.stages import LlmJudgeStage
from onbeat.client.spec_file import load_spec
from onbeat.stages.judge_answer import number_at, number_in, numbers_in_json, question, scores_of
from tests.judge_server import says

CONFIGS = Path(__file__).parents[3] / "configs"
JUDGE = LlmJudgeStage(model="judge", prompt="Rate {completion}", lowest=-2.0, highest=8.0)


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7.0), (" -1.5\n", -1.5), ("**7**.", 7.0), ('"+3"', 3.0), ("I rate it (7).", 7.0), ("Score: 0.25!", 0.25)],
)
def test_a_number_alone_is_read_with_marks_around_it(text: str, number: float) -> None:
    assert number_in(text) == number


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no number"),
        ("seven", "has no number"),
        ("\u0667", "has no number"),
        ("7 or 8", "several numbers"),
        ("<think>1 + 1</think> 7", "several numbers"),
        ("7/10", "no plain number"),
        (".5", "no plain number"),
        ("7,5", "no plain number"),
        ("1e3", "no plain number"),
        ("0x10", "no plain number"),
        ("10²", "no plain number"),
        ("7%", "no plain number"),
        ("score7", "no plain number"),
        ("7;import os", "no plain number"),
        ("--7", "no plain number"),
        ("1" * 400, "no plain number"),
        ("nan", "has no number"),
        ("Infinity", "has no number"),
    ],
)
def test_what_is_not_one_plain_number_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(BatchFailed, match=problem):
        number_in(text)


def test_a_number_is_moved_and_scaled_to_lie_between_0_and_1() -> None:
    assert [scores_of(says(text)[1], JUDGE) for text in ("-2", "3", "8")] == [[0.0], [0.5], [1.0]]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (says("-2.5")[1], r"-2\.5 is not between -2 and 8"),
        (says("9")[1], "9 is not between -2 and 8"),
        (says(None)[1], "has no number"),
        (says("7", refusal="I can't rate this")[1], 'refuses: "I can\'t rate this"'),
        (says("7", finish_reason="length")[1], "is cut: finish_reason is 'length'"),
        (says("7", finish_reason="content_filter")[1], "content_filter"),
        (b"", "no chat completion"),
        (b"<html>", "no chat completion"),
        (b"\xff\xfe", "no chat completion"),
        (b'{"choices": []}', "no chat completion"),
        (b'{"error": {"message": "7"}}', "no chat completion"),
        (json.dumps({"choices": [{"message": {"content": 7}}]}).encode(), "no chat completion"),
        (json.dumps({"choices": 2 * json.loads(says("7")[1])["choices"]}).encode(), "no chat completion"),
        (b'{"choices": ' + b"[" * 100_000, "no chat completion"),
    ],
)
def test_an_answer_without_a_number_in_its_range_is_an_error(body: bytes, problem: str) -> None:
    with pytest.raises(BatchFailed, match=problem):
        scores_of(body, JUDGE)


@pytest.mark.parametrize(
    ("pattern", "text", "number"),
    [
        ("{number}/10", "I'd say 3 of 4 points are right. **7**/10.", 7.0),
        ("{number}/10", "First 9/10, but then: 6.5 /10", 6.5),
        ("Score: {number}", "<think>1 + 1 = 2</think>\nScore: **-2**", -2.0),
        ("Score: {number}", "Score: 4, since it is short", 4.0),
        ("<score>{number}</score>", "<score>\n8\n</score>", 8.0),
        (".*{number}(a+)+$", ".*5(a+)+$", 5.0),
        ("{number}", "between 1 and 4", 4.0),
    ],
)
def test_a_pattern_says_where_the_number_stands_and_its_last_place_counts(
    pattern: str, text: str, number: float
) -> None:
    judge = LlmJudgeStage(model="m", prompt="{completion}", answer=pattern, lowest=-10.0)
    assert scores_of(says(text)[1], judge) == pytest.approx([(number + 10.0) / 20.0])


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("{number}/10", "7 out of 10"),
        ("{number}/10", "7/100"),
        ("{number}/10", "1.2.7/10"),
        ("Score: {number}", "Score: 7/10"),
        ("Score: {number}", "Score: 7,5"),
        ("Score: {number}", "Score: 7e3"),
        ("Score: {number}", "score: 7"),
        ("Score: {number}", "Score: " + "1" * 30),
        ("{number}", ""),
    ],
)
def test_a_number_that_isnt_where_the_pattern_has_it_is_none(pattern: str, text: str) -> None:
    with pytest.raises(CompletionUnjudged, match="nowhere"):
        number_at(text, pattern=pattern)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"score": 7}', 7.0),
        ('Well.\n```json\n{"why": "{brace} {", "score": 6.5, "parts": {"score": 1}}\n```', 6.5),
        ('{"score": 1} and after a second look {"score": 2}', 2.0),
        ('{"score": 3} {"other": 9} {not json', 3.0),
    ],
)
def test_a_json_object_has_the_number_under_its_key(text: str, number: float) -> None:
    assert numbers_in_json(text, ("score",)) == [number]


@pytest.mark.parametrize(
    "text",
    [
        *("7", '{"score": "7"}', '{"score": true}', '{"rating": 7}', '["score", 7]', '{"score"'),
        *("{" * 2**20, '{"":' * 2**18, '{"a": "' * 2**17),
        *('{"score": ' + "9" * 4000 + "}", '{"score": ' + "9" * 9000 + "}"),
    ],
)
def test_json_without_a_number_there_is_none_and_costs_no_more_than_its_length(text: str) -> None:
    with pytest.raises(CompletionUnjudged, match="no JSON object with a number"):
        numbers_in_json(text, ("score",))


@pytest.mark.parametrize("text", ["0" * 2**20, " " * 2**20 + "x", "Score:" * 2**17, "Score: 1" * 2**17 + "/"])
def test_a_pattern_is_looked_for_in_linear_time(text: str) -> None:
    for pattern in ("Score: {number}", "{number}/10", "{number}", "0{number}0", " {number} "):
        with contextlib.suppress(CompletionUnjudged):
            number_at(text, pattern=pattern)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (says("7/10"), "no_answer"),
        (says("11"), "out_of_range"),
        (says("7", finish_reason="length"), "no_answer"),
        (says("7", refusal="no"), "refused"),
    ],
)
def test_what_the_judge_says_is_of_the_completion_and_what_its_server_says_is_not(
    said: tuple[int, bytes], reason: str
) -> None:
    with pytest.raises(CompletionUnjudged) as raised:
        scores_of(said[1], LlmJudgeStage(model="m", prompt="{completion}"))
    assert (raised.value.reason, raised.value.lasts) == (reason, False)
    with pytest.raises(BatchFailed) as of_server:
        scores_of(b"<html>", JUDGE)
    assert not isinstance(of_server.value, CompletionUnjudged)


def test_a_reason_shows_a_short_piece_on_one_line() -> None:
    with pytest.raises(BatchFailed) as raised:
        number_in("a\n\x1b[31m" + 10_000 * "b")
    assert len(str(raised.value)) < 300
    assert not set(str(raised.value)) & {"\n", "\x1b"}


def test_a_long_word_costs_no_more_than_its_length() -> None:
    with pytest.raises(BatchFailed, match="no plain number"):
        number_in(500_000 * "a1")


def test_texts_are_put_in_as_they_are_and_never_read_as_a_template() -> None:
    judge = LlmJudgeStage(
        model="judge", prompt="{{x}} {prompt} | {completion} | {reference} | {completion} {other} {0}"
    )
    texts = {"prompt": "{completion} {prompt.__class__}", "completion": r"{reference}%s\1{", "reference": "}{prompt}"}
    filled = question(judge, **texts)
    assert filled == (
        r"{{x}} {completion} {prompt.__class__} | {reference}%s\1{ | }{prompt} | {reference}%s\1{ {other} {0}"
    )


def test_criteria_are_keys_of_one_object_and_each_has_a_score() -> None:
    judge = LlmJudgeStage(model="m", prompt="{completion}", answer="json", criteria={"right": 3.0, "short": 1.0})
    sure = '{"right": 1, "short": 1} but no: {"right": 10, "why": "all", "short": 2.0} {"short": 9}'
    assert scores_of(says(sure)[1], judge) == [1.0, pytest.approx(0.2)]
    with pytest.raises(CompletionUnjudged, match='no JSON object with a number "right" and a number "short"'):
        scores_of(says('{"right": 10} {"short": 2}')[1], judge)
    with pytest.raises(CompletionUnjudged, match="number 11 is not between 0 and 10"):
        scores_of(says('{"right": 10, "short": 11}')[1], judge)


def test_the_shipped_rubric_shows_what_it_asks_about_and_weighs_its_two_criteria() -> None:
    spec = load_spec(CONFIGS / "rubric.toml")
    (stage,) = spec.stages
    assert isinstance(stage, LlmJudgeStage)
    asked = question(stage, prompt="12+34=", completion="64", reference="64")
    assert all(
        words in asked for words in ("asked for 12+34=", "Right is: 64", "wrote: 64", '{"right": N, "digits": N}')
    )
    assert spec.stage_reward_weights == {"llm_judge_right": 0.375, "llm_judge_digits": 0.125}
    assert scores_of(says('{"right": 5, "digits": 10}')[1], stage) == [0.5, 1.0]
    assert spec.algorithm.advantage_kind.normalises_components
