"""What each scorer says about a completion, and what makes an item unscorable instead of worth 0 (I6)."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.encoding.numbers import MAX_CHARS, NUMBER
from contracts.rewards import (
    ExactReward,
    FormatReward,
    LengthReward,
    MathVerifyReward,
    NumericReward,
    OverlongReward,
    PluginReward,
    ReasoningGymReward,
    RegexReward,
    RewardComponent,
    RewardItem,
    Scored,
    Unscorable,
    UnscorableReason,
)
from reward_service.scorers import plugin, rubric


def item(completion: str, reference: str = "", *, task_entry: str = "", prompt: str = "2+3=") -> RewardItem:
    return RewardItem(prompt=prompt, completion=completion, reference=reference, task_entry=task_entry)


def score(component: RewardComponent, scored_item: RewardItem) -> float:
    result = rubric.score_item((component,), scored_item)
    assert isinstance(result, Scored), result
    assert result.breakdown == {component.name: result.reward}
    return result.reward


def refusal(component: RewardComponent, scored_item: RewardItem) -> Unscorable:
    result = rubric.score_item((component,), scored_item)
    assert isinstance(result, Unscorable), result
    assert result.component == component.name
    return result


@pytest.mark.parametrize(
    ("completion", "reference", "ignore_case", "expected"),
    [
        (" 42\n", "42", False, 1.0),
        ("42", " 42 ", False, 1.0),
        ("421", "42", False, 0.0),
        ("Paris", "paris", False, 0.0),
        ("STRASSE", "straße", True, 1.0),
        ("", "", False, 1.0),
    ],
)
def test_exact_compares_without_the_white_space_around(
    completion: str, reference: str, ignore_case: bool, expected: float
) -> None:
    assert score(ExactReward(ignore_case=ignore_case), item(completion, reference)) == expected


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("first 7, then 42.", "42", 1.0),
        ("42, then 7", "42", 0.0),
        ("10-5", "5", 1.0),
        ("x = -5", "-5", 1.0),
        ("x = \N{MINUS SIGN}5", "-5", 1.0),
        ("about 1,234.50 euros", "1234.5", 1.0),
        ("2.5e-3", "0.0025", 1.0),
        (".5", "0.5", 1.0),
        ("9007199254740993", "9007199254740992", 0.0),
        ("1e999999", "5", 0.0),
        ("no number here", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_numeric_takes_the_last_number(completion: str, reference: str, expected: float) -> None:
    assert score(NumericReward(), item(completion, reference)) == expected


@pytest.mark.parametrize(
    ("written", "value"),
    [
        # signs, which the minus of a difference or the dash of a range is not
        ("-5", "-5"),
        ("+5", "5"),
        ("\N{MINUS SIGN}5", "-5"),
        ("\N{EN DASH}5", "-5"),
        ("3\N{EN DASH}5", "5"),
        ("- 5 apples", "5"),
        ("(2)-5", "5"),
        # currencies
        ("-$5", "-5"),
        ("$-5", "-5"),
        (r"-\$5", "-5"),
        ("\N{EURO SIGN} 5", "5"),
        ("US$1,000.50", "1000.5"),
        ("x = -$5$", "-5"),
        # thousands
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("1 234", "1234"),
        ("1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567", "1234567"),
        ("1'234", "1234"),
        ("1_234", "1234"),
        ("1.234.567", "1234567"),
        ("1.234,5", "1234.5"),
        ("1,00,000", "100000"),
        ("1,234,567.89", "1234567.89"),
        # a comma that cannot separate thousands
        ("12,34", "12.34"),
        ("0,123", "0.123"),
        ("1,2,3", "3"),
        ("1, 2", "2"),
        # fractions, and what is none
        ("1/2", "0.5"),
        ("12/5", "2.4"),
        ("-1 / 2", "-0.5"),
        ("3 1/2", "3.5"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"3\frac{1}{2}", "3.5"),
        (r"$\dfrac{-3}{4}$", "-0.75"),
        ("on 7/10/2024", "2024"),
        # powers
        ("10^6", "1000000"),
        ("10^{-3}", "0.001"),
        ("2**10", "1024"),
        ("-2^2", "-4"),
        ("10\N{SUPERSCRIPT SIX}", "1000000"),
        (r"2.5 \times 10^{6}", "2500000"),
        ("2.5*10^-3", "0.0025"),
        ("2.5e-3", "0.0025"),
        ("x^2", "2"),
        # other arithmetic is not computed
        ("3*4", "4"),
        ("7-3", "3"),
    ],
)
def test_numeric_reads_a_number_as_people_write_it(written: str, value: str) -> None:
    assert score(NumericReward(tolerance=0.0), item(f"so it is {written}", value)) == 1.0
    assert score(NumericReward(tolerance=0.0), item(f"{written}.", value)) == 1.0


@pytest.mark.parametrize(
    "completion", ["5/0", "10^10^10", "10^9999999", "1e9999999", r"\frac{1}{0}", "7" * 500, "5" + "0" * 400, "\u0665"]
)
def test_what_is_no_number_for_any_answer_is_wrong(completion: str) -> None:
    for reference in ("5", "0", "10", "7", "1"):
        assert score(NumericReward(tolerance=1.0), item(completion, reference)) == 0.0


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("42 %", "42", 1.0),
        (r"42\%", "0.42", 1.0),
        ("42 percent", "42%", 1.0),
        ("0.42", "42 %", 1.0),
        ("42", "42%", 1.0),
        ("0.42%", "42%", 0.0),
        ("42%", "4200", 0.0),
    ],
)
def test_a_percentage_is_its_share_or_as_many_percent(completion: str, reference: str, expected: float) -> None:
    assert score(NumericReward(), item(completion, reference)) == expected


@pytest.mark.parametrize("part", ["1", "1,", "1,222", "1 ", "1/", "1^", "-", "$", "{,}", "1.222", r"\frac{1}{", " "])
def test_numeric_reads_no_more_than_the_end_of_a_text(part: str) -> None:
    long = part * 100_000
    looked_at = NUMBER.finditer(long + " 5", len(long) - MAX_CHARS)
    assert score(NumericReward(), item(long + " = 5", "5")) == 1.0
    assert sum(1 for _ in looked_at) <= MAX_CHARS + 2


@pytest.mark.parametrize(("completion", "expected"), [("3.1", 1.0), ("3.2", 0.0)])
def test_numeric_tolerance_is_absolute(completion: str, expected: float) -> None:
    assert score(NumericReward(tolerance=0.05), item(completion, "3.14")) == expected


@pytest.mark.parametrize("reference", ["", "five", "42 apples", "1 2", "inf", "nan", "1/0", "3*4", "5" * 500])
def test_numeric_reference_that_is_no_number_is_a_bad_reference(reference: str) -> None:
    assert refusal(NumericReward(), item("42", reference)).reason == "bad_reference"


def test_regex_is_found_anywhere() -> None:
    component = RegexReward(pattern=r"\bfive\b")
    assert score(component, item("it is five.")) == 1.0
    assert score(component, item("it is fiveish")) == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("answer: 4 answer: 5", 1.0), ("answer: 5 answer: 4", 0.0), ("answer: none", 0.0), ("5", 0.0)],
)
def test_regex_answer_group_of_the_last_match_must_equal_the_reference(completion: str, expected: float) -> None:
    assert score(RegexReward(pattern=r"answer: (?:(?P<answer>\d)|none)"), item(completion, "5")) == expected


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        ("#### 1058", "1,058", 1.0),
        ("#### 1,058", "1058", 1.0),
        ("#### 1058.0", "1,058", 1.0),
        ("#### 1059", "1,058", 0.0),
        ("#### 1,058\n#### 7", "1,058", 0.0),
        ("1,058", "1,058", 0.0),
        ("#### ,", "1,058", 0.0),
    ],
)
def test_regex_compares_numbers_where_it_is_told_to(completion: str, reference: str, expected: float) -> None:
    pattern = r"####\s*(?P<answer>-?[\d,.]+)"
    assert score(RegexReward(pattern=pattern, compare="number"), item(completion, reference)) == expected
    same_text = float(completion == "#### " + reference)
    assert score(RegexReward(pattern=pattern), item(completion, reference)) == same_text


def test_regex_that_compares_numbers_needs_a_number() -> None:
    result = rubric.score_item((RegexReward(pattern="(?P<answer>5)", compare="number"),), item("5", "five"))
    assert isinstance(result, Unscorable)
    assert result.reason == "bad_reference"


def test_format_must_match_the_whole_completion_across_lines() -> None:
    component = FormatReward(pattern=r"<think>.*</think>\d+")
    assert score(component, item("<think>one\ntwo</think>5")) == 1.0
    assert score(component, item("<think>one</think>5 ")) == 0.0


@pytest.mark.parametrize(("num_chars", "expected"), [(0, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (99, 0.0)])
def test_length_falls_linearly_between_target_and_maximum(num_chars: int, expected: float) -> None:
    assert score(LengthReward(target_chars=10, max_chars=20), item("é" * num_chars)) == expected


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0.0), (12, 0.0), (13, -0.25), (15, -0.75), (16, -1.0), (99, -1.0)]
)
def test_the_overlong_punishment_falls_linearly_over_the_buffer(num_tokens: int, expected: float) -> None:
    long = RewardItem(prompt="", completion="x", reference="", num_tokens=num_tokens)
    assert score(OverlongReward(max_tokens=16, buffer_tokens=4), long) == expected


def test_a_punishment_by_tokens_needs_their_number() -> None:
    refused = refusal(OverlongReward(max_tokens=16, buffer_tokens=4), item("x"))
    assert (refused.reason, "num_tokens" in refused.detail) == ("bad_reference", True)


@pytest.fixture
def user_function(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for an installed function: `returns` is what it returns or raises, `called_with` what it was told."""
    told: dict[str, Any] = {}

    def function(**arguments: str) -> object:
        told["called_with"] = arguments
        if isinstance(told["returns"], Exception):
            raise told["returns"]
        return told["returns"]

    known = plugin.Plugin(
        function=function,
        argument_names=plugin.ARGUMENTS,
        columns=(),
        num_required=0,
        takes_all=False,
        sees_groups=False,
    )
    monkeypatch.setattr(plugin, "load", lambda component: known)
    return told


def test_plugin_is_called_with_the_items_texts(user_function: dict[str, Any]) -> None:
    user_function["returns"] = 1
    assert score(PluginReward(entry_point="mine"), item("c", "r", task_entry="t", prompt="p")) == 1.0
    texts = {"prompt": "p", "completion": "c", "reference": "r", "task_entry": "t"}
    assert user_function["called_with"] == {**texts, "metadata": {}, "finish_reason": "", "completion_ids": []}


@pytest.mark.parametrize(
    ("returns", "reason", "detail"),
    [
        ("1.0", "raised", "TypeError: `mine` returned str, not a number: return a float on every path"),
        (None, "raised", "TypeError: `mine` returned None, not a number: return a float on every path"),
        (ValueError("too \udc80 odd"), "raised", "ValueError: too \\udc80 odd"),
        (float("nan"), "not_finite", "the score is nan"),
        (float("inf"), "not_finite", "the score is inf"),
        (-1e308, "not_finite", "the score is -1e+308"),
    ],
)
def test_plugin_without_a_finite_number_leaves_the_item_unscorable(
    user_function: dict[str, Any], returns: object, reason: str, detail: str
) -> None:
    user_function["returns"] = returns
    unscorable = refusal(PluginReward(entry_point="mine"), item("c"))
    assert unscorable.reason == reason
    # What the function raises is told with its line.
    assert unscorable.detail == detail or unscorable.detail.startswith(f"{detail}, at test_scorers.py:")


def test_unknown_entry_point_is_named_with_the_ones_that_exist() -> None:
    unscorable = refusal(PluginReward(entry_point="no_such_reward"), item("c"))
    assert unscorable.reason == "unknown_entry_point"
    assert "no_such_reward" in unscorable.detail


def test_rubric_adds_weighted_scores_and_tells_equal_types_apart() -> None:
    components = (
        ExactReward(weight=2.0),
        LengthReward(weight=-0.5, target_chars=1, max_chars=3),
        RegexReward(weight=0.25, pattern="5"),
        RegexReward(weight=8.0, pattern="6"),
    )
    result = rubric.score_item(components, item("55", "55"))
    assert result == Scored(reward=2.0, breakdown={"exact": 1.0, "length": 0.5, "regex": 1.0, "regex_2": 0.0})


def test_one_failing_component_makes_the_item_unscorable_and_is_named() -> None:
    components = (ExactReward(), NumericReward(), NumericReward(tolerance=1.0))
    result = rubric.score_item(components, item("5", "five"))
    assert isinstance(result, Unscorable)
    assert (result.reason, result.component) == ("bad_reference", "numeric")


def test_rubric_sum_that_overflows_is_not_finite(user_function: dict[str, Any]) -> None:
    user_function["returns"] = 1e12
    result = rubric.score_item((PluginReward(entry_point="mine", weight=1000.0),), item("c"))
    assert isinstance(result, Unscorable)
    assert result.reason == "not_finite"


def test_only_linear_time_scorers_run_outside_the_pool() -> None:
    safe = (ExactReward(), NumericReward(), LengthReward(target_chars=1, max_chars=2))
    assert not rubric.needs_isolation(safe)
    for hostile in (
        RegexReward(pattern="a"),
        FormatReward(pattern="a"),
        ReasoningGymReward(),
        MathVerifyReward(),
        PluginReward(entry_point="mine"),
    ):
        assert rubric.needs_isolation((*safe, hostile))


def test_a_completion_that_can_never_be_scored_gets_the_stated_score_and_its_neighbours_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(component: object, item: RewardItem) -> float:
        raise OverflowError("a number of a billion digits")

    monkeypatch.setitem(rubric.SCORERS, ExactReward, rubric.Scorer(score=never))
    one = item("a")
    components = (ExactReward(weight=2.0, on_unscorable=-1.0), LengthReward(target_chars=10, max_chars=20))
    expected = Scored(reward=-1.0, breakdown={"exact": -1.0, "length": 1.0}, unscorable={"exact": "raised"})
    assert rubric.score_item(components, one) == expected
    failed = rubric.score_item((ExactReward(), components[1]), one)
    assert isinstance(failed, Unscorable)
    assert failed.reason == "raised"


@pytest.mark.parametrize(
    ("component", "reason", "at_once", "at_last"),
    [
        (MathVerifyReward(on_unscorable=0.5), "raised", 0.5, 0.5),
        (MathVerifyReward(on_unscorable=0.5), "not_finite", 0.5, 0.5),
        (MathVerifyReward(on_unscorable=0.5), "timeout", None, 0.5),
        (MathVerifyReward(on_unscorable=0.5), "crashed", None, 0.5),
        (PluginReward(entry_point="p", on_unscorable=0.5), "raised", None, 0.5),
        (NumericReward(on_unscorable=0.5), "bad_reference", None, None),
        (PluginReward(entry_point="p", on_unscorable=0.5), "unknown_entry_point", None, None),
        (MathVerifyReward(), "timeout", None, None),
    ],
)
def test_luck_gets_a_score_at_last_and_what_is_not_the_completions_fault_never(
    component: RewardComponent, reason: UnscorableReason, at_once: float | None, at_last: float | None
) -> None:
    assert rubric.score_in_place(component, reason, settles=False) == at_once
    assert rubric.score_in_place(component, reason, settles=True) == at_last
