"""A model's chat template, applied: the only place that runs one, and it ends.

    messages, tools ─▶ the template, the program of a model's author ─▶ text
                                  └─ more than LONGEST_S of this thread's processor ─▶ TemplateTakesLong

Jinja's sandbox bounds one loop, and loops in one another have no bound: a template could hold a trainer, a generator or
a stage worker for years. The processor's time is counted, so that a loaded or a sleeping machine refuses none. Nothing
interrupts the power of two large numbers, so a template that has `**` is refused.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_S = 5.0
"""Real templates take milliseconds, and what Jinja makes of them once, some tenths of a second."""
LINES = 64
"""So many lines of a template's program pass between two looks at the clock."""
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""What `write` raises for messages that a template doesn't take, TemplateTakesLong among them."""


class TemplateTakesLong(TemplateError):
    """The template was ended."""


def write(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    opens_turn: bool,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The conversation as text. variables: of the template, beside the conversation. Raises one of REFUSALS."""
    template: Any = tokenizer.chat_template
    for one in template.values() if isinstance(template, dict) else [template]:
        _check_operators(one)
    with _within(LONGEST_S):
        written = tokenizer.apply_chat_template(
            list(rows),
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=opens_turn,
            **variables,
        )
    if not isinstance(written, str):
        raise TypeError(f"the chat template rendered {type(written).__name__}, not text")
    return written


def reads(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the template has a variable of this name that is none of what the library itself gives it."""
    template: Any = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template]
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    return name not in own and any(name in meta.find_undeclared_variables(Environment().parse(one)) for one in texts)


@functools.lru_cache(maxsize=64)
def _check_operators(template: str) -> None:
    if any(kind == "operator" and value == "**" for _, kind, value in Environment().lex(template)):
        raise TemplateError("it has the operator **")


@contextmanager
def _within(most_s: float) -> Iterator[None]:
    """Ends what this thread runs in the block, in Python, when it has had its time.

    A trace function sees each line, and raises where the line is: no signal and no other thread could do that to a
    thread which isn't the main one, at a known place.
    """
    ends_s = time.thread_time() + most_s
    left = LINES

    def trace(_frame: FrameType, _event: str, _arg: Any) -> Any:
        nonlocal left
        left -= 1
        if left <= 0:
            left = LINES
            if time.thread_time() > ends_s:
                raise TemplateTakesLong(f"it takes longer than {most_s:g} s of a processor")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
