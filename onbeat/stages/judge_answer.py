"""A judge's question and answer as values: the template is filled by plain replacement, the number is read strictly.

    prompt of the spec + texts ─▶ question ─▶ server ─▶ answer ─ as `answer` says ─▶ number, or why there is none

No text is ever evaluated. {prompt}, {completion} and {reference} are replaced in the spec's template alone, at once:
braces of a completion, also ones that spell a place, stay as they are. A pattern of the spec is no regular expression:
it is its own text with one place for a number in it, which is looked for in linear time.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from contracts.errors import BatchFailed, CompletionUnjudged
from contracts.rewards import StageReason
from contracts.spec.stages import NUMBER_PLACE, LlmJudgeStage

PLACES = re.compile(r"\{(prompt|completion|reference)\}")
DIGIT = re.compile(r"[0-9]")
BEFORE, BEHIND = "*_`'\"([{", "*_`'\")]}.,:;!?"
"""Marks that may stand around the number, as in **7**. or "7"; a point or comma before it would be a part of it."""
NUMBER = re.compile(r"[-+]?[0-9]{1,15}(?:\.[0-9]{1,15})?")
AROUND = r"[\s*_`]{0,8}"
"""White space and marks that may stand between a pattern's text and its number."""
NO_PART_BEFORE, NO_PART_BEHIND = r"(?<![0-9.,/])", r"(?![0-9/%^]|[.,][0-9]|[eE][-+0-9])"
"""Where a pattern's number ends by itself, as that of "7/10" doesn't."""
JSON_KEY = "score"
LOOKED_AT_CHARACTERS = 2**16
"""As much of the end of an answer is searched for a pattern."""
MOST_BRACES = 256
"""As many of the last left braces of an answer are looked at for a JSON object."""
OBJECTS = json.JSONDecoder()
SHOWN_CHARACTERS = 200
"""Longest part of an answer in a reason."""


class Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class Choice(msgspec.Struct):
    message: Message
    finish_reason: str | None = None


class ChatAnswer(msgspec.Struct):
    """The part of an answer to POST /v1/chat/completions that is read."""

    choices: Annotated[list[Choice], Meta(min_length=1, max_length=1)]


def question(stage: LlmJudgeStage, *, prompt: str, completion: str, reference: str) -> str:
    """Returns the stage's template with the texts in their places."""
    texts = {"prompt": prompt, "completion": completion, "reference": reference}
    return PLACES.sub(lambda place: texts[place[1]], stage.prompt)


def scores_of(body: bytes, stage: LlmJudgeStage) -> list[float]:
    """Returns the judge's number, or those of its criteria, moved and scaled to lie between 0 and 1.

    Raises CompletionUnjudged where the judge said something else, BatchFailed where the server did.
    """
    try:
        answer = msgspec.json.decode(body, type=ChatAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BatchFailed(f"the judge's answer is no chat completion: {error}") from error
    choice = answer.choices[0]
    if choice.message.refusal:
        raise _unjudged("refused", f"the judge refuses: {shown(choice.message.refusal)}")
    if choice.finish_reason not in (None, "stop"):
        raise _unjudged("no_answer", f"the judge's answer is cut: finish_reason is {shown(choice.finish_reason)}")
    text = choice.message.content or ""
    if stage.answer == "json":
        numbers = numbers_in_json(text, tuple(stage.criteria or (JSON_KEY,)))
    elif stage.answer == "number":
        numbers = [number_in(text)]
    else:
        numbers = [number_at(text, pattern=stage.answer)]
    for number in numbers:
        if not stage.lowest <= number <= stage.highest:
            problem = f"the judge's number {number:g} is not between {stage.lowest:g} and {stage.highest:g}"
            raise _unjudged("out_of_range", problem)
    return [(number - stage.lowest) / (stage.highest - stage.lowest) for number in numbers]


def number_in(text: str) -> float:
    """The one number of a text, in plain digits. Raises CompletionUnjudged where there is none, or more than that."""
    words = [word for word in text.split() if DIGIT.search(word)]
    if not words:
        raise _unjudged("no_answer", f"the judge's answer has no number: {shown(text)}")
    if len(words) > 1:
        raise _unjudged("no_answer", f"the judge's answer has several numbers: {shown(text)}")
    word = words[0].lstrip(BEFORE).rstrip(BEHIND)
    if not NUMBER.fullmatch(word):
        cure = "ask for a number alone, or set `answer`"
        raise _unjudged("no_answer", f"{shown(words[0])} in the judge's answer is no plain number", cure=cure)
    return float(word)


def number_at(text: str, *, pattern: str) -> float:
    """The number at the last place where a text has the pattern. Raises CompletionUnjudged where it has it nowhere."""
    numbers = _compiled(pattern).findall(text[-LOOKED_AT_CHARACTERS:])
    if not numbers:
        raise _unjudged("no_answer", f"the judge's answer has `{pattern}` nowhere: {shown(text)}")
    return float(numbers[-1])


def numbers_in_json(text: str, keys: tuple[str, ...]) -> list[float]:
    """The numbers under the keys of the last JSON object that has them all, of those that no other one holds.

    Raises CompletionUnjudged.
    """
    values = []
    # The end of the newest object: a brace before it belongs to that object.
    behind = 0
    for at in [place.start() for place in re.finditer("{", text)][-MOST_BRACES:]:
        if at < behind:
            continue
        json_object, behind = _object_at(text, at)
        if json_object.keys() >= set(keys):
            values = [json_object[key] for key in keys]
    try:
        if values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return list(map(float, values))
    except OverflowError:
        pass
    names = " and ".join(f'a number "{key}"' for key in keys)
    raise _unjudged("no_answer", f"the judge's answer has no JSON object with {names}: {shown(text)}")


def _object_at(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Returns the JSON object that begins there, and its end; an empty one where none does."""
    try:
        return OBJECTS.raw_decode(text, at)
    except (ValueError, RecursionError):
        return {}, at + 1


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Each part matches in one way alone, and none is repeated without a bound: the search is linear in its text."""
    before, behind = (re.escape(part) for part in pattern.split(NUMBER_PLACE))
    first = f"{before}{AROUND}" if before else NO_PART_BEFORE
    last = NO_PART_BEHIND
    if behind:
        last = f"{AROUND}{behind}"
        if behind[-1].isdigit():
            # A digit more would belong to another number.
            last += r"(?![0-9])"
    return re.compile(f"{first}({NUMBER.pattern}){last}")


def shown(text: str) -> str:
    """A part of a text from elsewhere, as a reason may show it: on one line, without control characters."""
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]}…"
    return repr(text)


def _unjudged(reason: StageReason, problem: str, *, cure: str | None = None) -> CompletionUnjudged:
    """Another question may have another answer."""
    return CompletionUnjudged(problem, reason=reason, lasts=False, cure=cure)
