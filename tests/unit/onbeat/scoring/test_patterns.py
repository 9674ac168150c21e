"""RE2 says of a text what Python's `re` says, wherever it is asked; what it isn't asked goes to `re`."""

from __future__ import annotations

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.encoding.wire import decode, decode_json, encode, encode_json
from contracts.rewards import (
    FormatReward,
    MathVerifyReward,
    ReasoningGymReward,
    RegexReward,
    RewardComponent,
    RewardItem,
    Unscorable,
)
from contracts.spec.job import JobSpec
from onbeat.scoring.patterns import BadPattern, Matcher, matcher, takes_re2, translate
from reward_service.scorers.rubric import score_component
from tests.builders import job_spec
from tests.chaos.short_job import IS_LONG

LITERALS = ["a", "b", "K", "k", "s", ".", "x", "1", "0", "_", "-", "\u00e9", "\n", "{", "}", "\u212a", "\u017f", "{a}"]
ESCAPES = [
    r"\w",
    r"\d",
    r"\s",
    r"\b",
    r"\B",
    r"\W",
    r"\D",
    r"\S",
    r"\n",
    r"\.",
    r"\x41",
    r"\u00e9",
    "\\\u00e9",
    r"\1",
    r"\Z",
]
CLASSES = [
    "[a-c]",
    "[^a]",
    r"[^\d]",
    r"[\w-]",
    "[]a]",
    "[^]a]",
    "[a-]",
    r"[\b]",
    "[[a]",
    "[Z-a]",
    r"[\x00-\xff]",
    r"[^\W\s]",
]
OTHERS = [
    "[K-s]",
    "[b-a]",
    "(?=a)",
    "(?!a)",
    "(?<=a)",
    "(?P<answer>x)",
    "(?P=answer)",
    "(?>a)",
    "[[:alpha:]]",
    "[a&&b]",
]
PARTS = st.sampled_from([*LITERALS, *ESCAPES, *CLASSES, *OTHERS, r"\A", "^", "$"])
REPEATS = st.sampled_from(
    ["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{,2}", "{1,}", "{1,2}?", "{0}", "{,}", "*+"]
)


def grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    opening = st.sampled_from(["(", "(?:", "(?P<answer>"])
    alternatives = st.lists(inner | st.just(""), min_size=1, max_size=3).map("|".join)
    return st.lists(
        st.tuples(opening, alternatives, REPEATS).map(lambda part: f"{part[0]}{part[1]}){part[2]}")
        | st.tuples(inner, REPEATS).map("".join),
        min_size=1,
        max_size=3,
    ).map("".join)


PATTERNS = st.tuples(
    st.sampled_from(["", "", "", "(?i)", "(?s)", "(?m)", "(?im)", "(?x)", "(?a)"]),
    st.recursive(st.lists(st.tuples(PARTS, REPEATS).map("".join), max_size=3).map("".join), grouped, max_leaves=6),
).map("".join)
TEXTS = st.text(st.sampled_from("abKks .x10_-\n\x1c\x0bAZz[]^{}"), max_size=8) | st.text(
    st.sampled_from("abKs 1\nAé\u212a\u017f\u0130\u0661\u3000"), max_size=6
)


def by_python(pattern: str, *, over_lines: bool) -> re.Pattern[str] | None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        try:
            return re.compile(pattern, re.DOTALL if over_lines else re.NOFLAG)
        except re.error:
            return None


@settings(max_examples=1500 if IS_LONG else 400, deadline=None)
@given(pattern=PATTERNS, texts=st.lists(TEXTS, min_size=1, max_size=8), over_lines=st.booleans())
def test_a_pattern_says_of_a_text_what_python_says(pattern: str, texts: list[str], over_lines: bool) -> None:
    expected = by_python(pattern, over_lines=over_lines)
    ours = Matcher(pattern=pattern, over_lines=over_lines, translation=translate(pattern, over_lines=over_lines))
    if expected is None:
        assert not takes_re2(pattern)
        with pytest.raises(BadPattern):
            ours.is_found("")
        return
    assert ours.has_group("answer") == ("answer" in expected.groupindex)
    for text in texts:
        assert ours.is_found(text) == (expected.search(text) is not None)
        assert ours.is_whole(text) == (expected.fullmatch(text) is not None)
        if "answer" in expected.groupindex:
            answers = [match["answer"] for match in expected.finditer(text)]
            assert ours.last_group("answer", text) == (answers[-1] if answers else None)


@pytest.mark.parametrize(
    ("pattern", "is_linear"),
    [
        (r"(?s)<answer>\s*(?P<answer>.*?)\s*</answer>", True),
        (r"(?i)the answer is:? (?P<answer>-?\d+)", True),
        (r"^<think>.*</think>\d+$", True),
        (r"(a+)+$", True),
        ("\u7b54\u6848 (?P<answer>[0-9]+)", True),
        (r"\bfive\b(?! apples)", False),
        (r"(a+)\1", False),
        ("(?i)[\u0100-\u1fff]", False),
        ("x{2000}", False),
        ("(", False),
    ],
)
def test_re2_takes_what_it_has_and_leaves_the_rest_to_python(pattern: str, is_linear: bool) -> None:
    assert takes_re2(pattern) is is_linear


def test_a_pattern_that_backtracks_without_end_in_python_is_matched_in_linear_time() -> None:
    text = "a" * 100_000 + "b"
    started_s = time.monotonic()
    assert not matcher(r"(a+)+$").is_found(text)
    assert matcher(r"(a|aa)+b").is_whole(text)
    assert time.monotonic() - started_s < 60.0  # re would need longer than the age of the universe


@pytest.mark.parametrize("text", ["5", "5\n", "x\n5", "\u0665", "5 \u00e9"])
def test_texts_in_which_the_engines_may_differ_are_pythons(text: str) -> None:
    for pattern in (r"\d$", r"^\d\Z", r"(?m)^\d$", r"\w\b"):
        assert matcher(pattern).is_found(text) == (re.search(pattern, text) is not None)


HOSTILE = [
    "(?i)" + "[\u0100-\U0010ffff]" * 800,
    "(" * 2000 + ")" * 2000,
    "((((a{1000}){1000}){1000}){1000})",
    r"\w{1000}" * 500,
    "a?" * 2000,
    "(?:" * 90 + "a" + "){1000}" * 90,
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_hostile_pattern_costs_milliseconds_where_others_wait(pattern: str) -> None:
    """Ten such patterns would hold an event loop for minutes if `re` compiled them."""
    started_s = time.monotonic()
    takes_re2(pattern[:4096])
    assert time.monotonic() - started_s < 10.0


def test_no_pattern_of_a_spec_is_compiled_while_the_spec_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    components: tuple[RewardComponent, ...] = (
        RegexReward(pattern="(?i)" + "[\u0100-\U0010ffff]" * 800),
        FormatReward(pattern="((a{1000}){1000}){1000}"),
        ReasoningGymReward(answer_pattern="(?i)(?P<answer>[\u0100-\U0010ffff]{9})"),
        MathVerifyReward(),
    )
    spec = job_spec(reward__components=components)
    packed, text = encode(spec), encode_json(spec)

    def refuse(*arguments: object, **options: object) -> object:
        raise AssertionError(f"compiled {arguments[0]!r:.60}")

    monkeypatch.setattr("re.compile", refuse)
    monkeypatch.setattr("re._compiler.compile", refuse)
    monkeypatch.setattr("re2.compile", refuse)
    assert decode(packed, JobSpec) == spec
    assert decode_json(text, JobSpec) == spec
    assert [key for component in components for key in component.patterns] == ["pattern", "pattern", "answer_pattern"]


def test_a_pattern_that_is_none_makes_every_item_unscorable_and_no_score_hides_it() -> None:
    item = RewardItem(prompt="", completion="a", reference="a")
    outcome = score_component("regex", RegexReward(pattern="(", on_unscorable=0.0), item)
    assert isinstance(outcome, Unscorable)
    assert (outcome.reason, outcome.component) == ("bad_pattern", "regex")
    assert "`(` is not a regular expression: missing )" in outcome.detail
