"""What math-verify's scorer says of an answer, and what ends where math-verify would not."""

from __future__ import annotations

import builtins
from typing import Any

import math_verify.parser
import pytest

from contracts.rewards import MathVerifyReward
from reward_service.scorers import math_verify as math_verify_scorer
from reward_service.scorers.expression_size import are_surely_unequal
from tests.unit.reward_service.scorers.test_scorers import item, refusal, score


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        (r"The answer is $\frac{2}{4}$.", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"$1+2x$", "2x+1", 1.0),
        ("2", "2x+1", 0.0),
        (r"$\{2, 1\}$", r"\{1, 2\}", 1.0),
        ("<think>6·7</think><answer>42</answer>", "42", 1.0),
        ("it is 3", "4", 0.0),
        ("no idea", "4", 0.0),
        (r"$\frac{$", "4", 0.0),
    ],
)
def test_math_verify_compares_values_not_texts(completion: str, reference: str, expected: float) -> None:
    assert score(MathVerifyReward(), item(completion, reference)) == expected


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        (r"\boxed{10^{10^{10}}}", "5", 0.0),
        (r"$(x+1)^{3000}$", "x^2", 0.0),
        (r"$(x+y+z)^{60}$", "x", 0.0),
        (r"$(x+1)^{3000}$", "(x+1)^{3000}", 1.0),
        (r"$10^{-10000000}$", "5", 0.0),
        ("9**9**9", "5", 0.0),
        (r"$2^{2024}$", "2^{2024}", 1.0),
        (r"$2^{2023} \cdot 2$", "2^{2024}", 1.0),
        (r"$\binom{1000000}{500000}$", "5", 0.0),
        (r"$\operatorname{eye}(100000)$", "5", 0.0),
        ("$" + "(" * 1000 + "1" + ")" * 1000 + "$", "5", 0.0),
        ("$" + r"\frac{1}{" * 500 + "1" + "}" * 500 + "$", "5", 0.0),
        ("$" + "x+" * 20_000 + "x$", "5", 0.0),
        (r"\[" * 50_000, "5", 0.0),
        (r"\[\boxed{" * 20_000, "5", 0.0),
        (r"\(\boxed{1}" * 20_000, "5", 0.0),
        (r"\[ 5 \]" + r"\[" * 4_000, "5", 1.0),
        (r"\boxed{4} " * 100 + r"\(\boxed{5}\)", "5", 1.0),
    ],
)
def test_math_verify_ends_on_what_would_not_end(completion: str, reference: str, expected: float) -> None:
    assert score(MathVerifyReward(), item(completion, reference)) == expected


@pytest.mark.parametrize("completion", ["$5!!!!$", r"$\tan^{200}(x)$", "$9^{9^{9^9}}$", r"$(1+\sqrt{2})^{5000}$"])
def test_what_cannot_be_compared_in_time_has_a_reason_and_no_score(completion: str) -> None:
    assert refusal(MathVerifyReward(), item(completion, "5")).reason == "too_complex"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("(x+1)^2", "x^2+2x+1", False),
        ("(x+1)^{400}", "(x+1)^{401}", True),
        (r"\frac{x^2-1}{x-1}", "x+1", False),
        (r"\frac{1}{2}", "0.5", False),
        (r"\sin x", "x", False),
    ],
)
def test_only_a_proof_makes_two_expressions_unequal(first: str, second: str, expected: bool) -> None:
    parsed = [math_verify_scorer._parse(f"${text}$")[0] for text in (first, second)]
    assert are_surely_unequal(*parsed) == expected


@pytest.mark.parametrize("payload", ["__import__('os').getcwd()", "().__class__", "1 if 1 else 2", "(lambda: 5)()"])
def test_math_verify_evaluates_nothing_that_has_a_name(payload: str) -> None:
    sources: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        compiled = compile

        def watched(source: Any, *arguments: Any, **options: Any) -> Any:
            sources.append(str(source))
            return compiled(source, *arguments, **options)

        patch.setattr(builtins, "compile", watched)
        for completion in (payload, f"${payload}$", rf"\boxed{{{payload}}}", f"the final answer is {payload} 1+1"):
            assert score(MathVerifyReward(), item(completion, "7")) == 0.0
    assert not [source for source in sources if payload[:8] in source]


@pytest.mark.parametrize("reference", ["", "cat", "not math at all", r"\frac{"])
def test_reference_that_is_no_mathematics_is_a_bad_reference(reference: str) -> None:
    assert refusal(MathVerifyReward(), item("4", reference)).reason == "bad_reference"


@pytest.mark.parametrize("place", ["grader.sympy_expr_eq", "parser.latex2sympy", "parser.extract_target_from_pred"])
@pytest.mark.parametrize(("error", "reason"), [(MemoryError(), "crashed"), (RecursionError(), "too_complex")])
def test_memory_or_stack_that_ends_inside_math_verify_is_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, reason: str
) -> None:
    component = MathVerifyReward()
    scored_item = item(r"\boxed{1+x+y}", "$y+x+1$")
    assert score(component, scored_item) == 1.0

    def ends(*_args: object, **_options: object) -> None:
        raise error

    math_verify_scorer._parse_reference.cache_clear()
    math_verify.parser.parse_latex_cached.__wrapped__.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(f"math_verify.{place}", ends)
    assert refusal(component, scored_item).reason == reason


def test_what_math_verify_can_not_compare_is_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_args: object, **_options: object) -> None:
        raise TypeError("no such comparison")

    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", ends)
    assert score(MathVerifyReward(), item(r"\boxed{1+x+y}", "$y+x+1$")) == 0.0
