"""math-verify: mathematical equality by sympy. Some expressions never end to simplify: runs in the pool.

completion ─ its end, without what can't match ─▶ math-verify's search ─ short expressions ─▶ its parsers
score ◀─ verify ◀─ pairs that end; others are unequal by a proof, or TooComplex ◀─ unevaluated expressions ◀─┘

Its own timeouts are signal.alarm and are off: the pool kills the process, which also ends a loop inside C code.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from contracts.rewards import MathVerifyReward, RewardItem
from onbeat.data.datasets.references import MATH_DELIMITER, MATH_WORD
from reward_service.scorers.texts import BadReference, TooComplex

TAG = re.compile(r"</?[A-Za-z][\w-]*>")
"""Set apart from what it encloses: math-verify finds no number in `<answer>42</answer>`."""

MAX_CHARS = 16_384
"""The end of a completion that is searched: the search takes quadratic time, and answers stand at the end."""
MAX_BOXES = 8
MAX_EXPRESSION_CHARS = 2_000
MAX_DEPTH = 25
"""The deepest brackets of one expression: the LaTeX parser takes exponential time in their depth."""
NOTHING = "\N{REPLACEMENT CHARACTER}"
ARITHMETIC = re.compile(r"[0-9.\s+\-*/()]*", re.ASCII)
"""Text that sympy's own parser may see, which evaluates it: nothing in it can be a name."""
MADE_AT_ONCE = re.compile(r"binom|eye|zeros|ones|diag")
LARGE = re.compile(r"[0-9]{4}")
"""Binomials and matrices are computed while they are parsed."""
REHEARSALS = tuple(
    RewardItem(prompt="", completion=completion, reference=reference)
    for completion, reference in (
        (r"so \boxed{\frac{1}{2}}", r"\frac{3}{4}"),
        ("hence $x^2+1$", "$(x+1)^2$"),
        ("The answer is 12.", "13"),
        (r"$\{1, 2\}$ or $(1, 3]$", r"$[1, 3)$"),
    )
)
"""Each of them has another part of the package loaded."""


def warm_up(component: MathVerifyReward) -> None:
    """Imports sympy and builds the LaTeX grammar: seconds, which are not the item's to pay."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on each call that its timeouts are off
    _parse(r"$\frac{1}{2}$")


def score(component: MathVerifyReward, item: RewardItem) -> float:
    """Returns 1.0 if an answer in the completion equals the reference; 0.0 too if it holds none.

    Raises BadReference, and TooComplex for what would not end.
    A completion that math-verify cannot parse or compare has not been shown equal, hence 0.0.
    """
    gold = _parse_reference(item.reference)
    answers = _parse(readable(item.completion))
    return float(any(_is_equal(right, answer) for right in gold for answer in answers))


def readable(completion: str) -> str:
    """Cuts a completion to its end, without what can begin no match: what never closes, and boxes before the last."""
    text = TAG.sub(r" \g<0> ", completion[-MAX_CHARS:])
    *earlier, _ = parts = text.rsplit(r"\boxed", MAX_BOXES)
    if len(earlier) == MAX_BOXES:
        parts[0] = parts[0].replace(r"\boxed", NOTHING)
    text = _closed(r"\boxed".join(parts), r"\[", r"\]")
    return "\n".join(_closed(line, r"\(", r"\)") for line in text.split("\n"))


def _closed(text: str, start_tag: str, end_tag: str) -> str:
    """Keeps only the first start tag before each end tag: no other can begin a match."""
    *segments, rest = text.split(end_tag)
    parts = []
    for segment in segments:
        before, tag, after = segment.partition(start_tag)
        parts.append(before + tag + after.replace(start_tag, NOTHING))
    return end_tag.join([*parts, rest.replace(start_tag, NOTHING)])


def _is_equal(right: Any, answer: Any) -> bool:
    """Raises TooComplex where comparing would not end and nothing proves that the two differ."""
    import math_verify

    from reward_service.scorers.expression_size import are_surely_unequal, check_size

    if isinstance(right, str) or isinstance(answer, str):  # what could not be parsed is compared as text
        return bool(right == answer)
    try:
        check_size(right)
        check_size(answer)
    except TooComplex:
        if right == answer or are_surely_unequal(right, answer):
            return bool(right == answer)
        raise
    try:
        return math_verify.verify([right], [answer], timeout_seconds=None, raise_on_error=True)
    except Exception as error:
        # sympy raises errors of any kind where two expressions can't be compared: they aren't equal then.
        _raise_if_exhausted(error)
        return False


class _Exhausted(BaseException):
    """Memory or stack ended in a parser: passes math-verify's own `except Exception`, which would call it no match."""


def _raise_if_exhausted(error: BaseException) -> None:
    """Says nothing about the answer, so that the item must not be scored 0 (I6)."""
    cause: BaseException | None = error
    met: set[int] = set()  # math-verify raises `e from e`: a chain that never ends
    while cause is not None and id(cause) not in met:
        met.add(id(cause))
        if isinstance(cause, MemoryError):
            raise cause
        if isinstance(cause, RecursionError):
            raise TooComplex("the expression is nested too deeply") from error
        cause = cause.__cause__ or cause.__context__


@functools.lru_cache(maxsize=1024)
def _parse_reference(reference: str) -> tuple[Any, ...]:
    """Expressions of the reference, cached: the G completions of a group share it.

    A bare `2x+1` is set between $ signs, since math-verify reads only the 2 of it otherwise.
    """
    bare = not MATH_DELIMITER.search(reference) and not MATH_WORD.search(reference)
    gold = tuple(_parse(f"${reference}$" if bare else reference))
    if all(isinstance(expression, str) for expression in gold):
        raise BadReference("math-verify finds no expression in the reference", field="reference", cure="write $…$")
    return gold


def _parse(text: str) -> list[Any]:
    import math_verify

    _guard_parsers()
    try:
        return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
    except (Exception, _Exhausted) as error:
        _raise_if_exhausted(error)
        return []


@functools.cache
def _guard_parsers() -> None:
    """Wraps the two parsers of math-verify, which has no place to look at what it found before it parses it."""
    from math_verify import parser

    parser.parse_latex_cached = _guarded(parser.parse_latex_cached, is_readable)
    parser.parse_expr_cached = _guarded(
        parser.parse_expr_cached, lambda text: is_readable(text) and ARITHMETIC.fullmatch(text) is not None
    )


def _guarded(parse: Callable[[str], Any], is_allowed: Callable[[str], bool]) -> Callable[[str], Any]:
    """Wraps a parser. An expression that isn't allowed can't be parsed: math-verify goes on to the one before it."""

    @functools.wraps(parse)
    def guarded(text: str) -> Any:
        if not is_allowed(text):
            raise ValueError("not an expression that is read")
        try:
            return parse(text)
        except (MemoryError, RecursionError) as error:
            raise _Exhausted from error

    return guarded


def is_readable(text: str) -> bool:
    """Returns True where the text is short, not nested deeply, and nothing in it is computed at once."""
    depth = deepest = 0
    for character in text if len(text) <= MAX_EXPRESSION_CHARS else "":
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return (
        len(text) <= MAX_EXPRESSION_CHARS
        and deepest <= MAX_DEPTH
        and not (MADE_AT_ONCE.search(text) and LARGE.search(text))
    )
