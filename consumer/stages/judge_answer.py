"""A judge's question and answer as values: the template is filled by plain replacement, the number is read strictly.

    prompt of the spec + texts ─▶ question ─▶ server ─▶ answer ─▶ number, or the reason why there is none

No text is ever evaluated. {prompt}, {completion} and {reference} are replaced in the spec's template alone, at once:
braces of a completion, also ones that spell a place, stay as they are.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from contracts.errors import BatchFailed
from contracts.spec_tables.stages import LlmJudgeStage

PLACES = re.compile(r"\{(prompt|completion|reference)\}")
DIGIT = re.compile(r"[0-9]")
BEFORE, BEHIND = "*_`'\"([{", "*_`'\")]}.,:;!?"
"""Marks that may stand around the number, as in **7**. or "7"; a point or comma before it would be a part of it."""
NUMBER = re.compile(r"[-+]?[0-9]{1,15}(?:\.[0-9]{1,15})?")
SHOWN_CHARACTERS = 200
"""Longest part of an answer in a reason."""


class Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class Choice(msgspec.Struct):
    message: Message
    finish_reason: str | None = None


class ChatAnswer(msgspec.Struct):
    """What is read of the body of an answer to POST /v1/chat/completions."""

    choices: Annotated[list[Choice], Meta(min_length=1, max_length=1)]


def question(stage: LlmJudgeStage, *, prompt: str, completion: str, reference: str) -> str:
    """The stage's template with the texts in their places."""
    texts = {"prompt": prompt, "completion": completion, "reference": reference}
    return PLACES.sub(lambda place: texts[place[1]], stage.prompt)


def score_of(body: bytes, stage: LlmJudgeStage) -> float:
    """The judge's number, moved and scaled to lie between 0 and 1. Raises BatchFailed where the answer isn't one."""
    try:
        answer = msgspec.json.decode(body, type=ChatAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BatchFailed(f"the judge's answer is no chat completion: {error}") from error
    choice = answer.choices[0]
    if choice.message.refusal:
        raise BatchFailed(f"the judge refuses: {shown(choice.message.refusal)}")
    if choice.finish_reason not in (None, "stop"):
        raise BatchFailed(f"the judge's answer is cut: finish_reason is {shown(choice.finish_reason)}")
    number = number_in(choice.message.content or "")
    if not stage.lowest <= number <= stage.highest:
        raise BatchFailed(f"the judge's number {number:g} is not between {stage.lowest:g} and {stage.highest:g}")
    return (number - stage.lowest) / (stage.highest - stage.lowest)


def number_in(text: str) -> float:
    """The one number of a text, in plain digits. Raises BatchFailed where there is none, or more than that."""
    words = [word for word in text.split() if DIGIT.search(word)]
    if not words:
        raise BatchFailed(f"the judge's answer has no number: {shown(text)}")
    if len(words) > 1:
        raise BatchFailed(f"the judge's answer has several numbers: {shown(text)}")
    word = words[0].lstrip(BEFORE).rstrip(BEHIND)
    if not NUMBER.fullmatch(word):
        raise BatchFailed(f"{shown(words[0])} in the judge's answer is no plain number", cure="ask for a number alone")
    return float(word)


def shown(text: str) -> str:
    """A part of a text from elsewhere, as a reason may show it: on one line, without control characters."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…")
