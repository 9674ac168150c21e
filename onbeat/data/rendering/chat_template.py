"""A model's chat template: the text of conversations, written in a process of the template's own.

    messages, tools ─▶ ChatTemplate ═ template process ═▶ text
                                  └─ a bound ─▶ TemplateEnded      └─ its own refusal ─▶ TemplateRefuses

A template is the program of a model's author. Jinja's sandbox keeps it from Python, and bounds neither time nor memory:
one line multiplies a number with itself until the machine stands still, and nothing in the same process could stop it,
or run beside it. So none runs in a trainer, generator or stage worker; they wait for an answer, with a deadline, while
their other threads go on.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from contracts.encoding.wire import encode
from contracts.errors import InvalidInput, first_line
from onbeat.data.rendering.template_cage import TemplateEnded, TemplateProcess
from onbeat.data.rendering.template_process import OWN_VARIABLES, TemplateAnswer, TemplateTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

LONGEST_S = 5.0
"""Processor seconds of one conversation. Real templates take milliseconds, and are compiled in some tenths of a second.
The processor's time is counted, so that a loaded or a sleeping machine refuses none."""
MEAN_S = 0.1
"""Processor seconds that the conversations of one call may take on average, beside the longest one's."""
SLOW_S = 30.0
"""Wall time of a call from which on the log says that it is slow."""
TASK_BYTES = 2 * 2**20
TASK_CONVERSATIONS = 1024
"""A call is cut into tasks of at most about this size."""
COSTS_CURE = "use a model with another chat template, or correct the loop or product in this one"

Row = Mapping[str, Any]
"""A message as templates read it: role, content and others."""

_processes: weakref.WeakValueDictionary[str, TemplateProcess] = weakref.WeakValueDictionary()
"""By the text of the template: what refers to the same one in this process shares the template's process."""
_guard = Lock()


class TemplateRefuses(Exception):
    """The template doesn't take the messages, for the reason that its author or Jinja gives."""

    def __init__(self, problem: str, *, place: int = 0) -> None:
        """place: that of the conversation in a call of several."""
        self.place = place
        super().__init__(problem)


class ChatTemplate:
    """The chat template of a tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._used: dict[str, TemplateProcess] = {}
        """By the text of the template. While this refers to them they aren't ended."""

    def write(
        self,
        rows: Sequence[Row],
        *,
        tools: Sequence[Any] | None = None,
        opens_turn: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Returns one conversation as text. Arguments and errors are those of `write_all`."""
        (text,) = self.write_all([rows], tools=tools, opens_turn=opens_turn, variables=variables)
        return text

    def write_all(
        self,
        conversations: Sequence[Sequence[Row]],
        *,
        tools: Sequence[Any] | None = None,
        opens_turn: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[str]:
        """Returns the text of each conversation, as the tokenizer's own `apply_chat_template` writes it.

        Args:
            conversations: messages of each, in order.
            tools: those that the template is to show, as OpenAI's interface has them; None for none.
            opens_turn: whether the generation prompt of the assistant's turn follows.
            variables: of the template, beside the conversation.

        Raises:
            TemplateRefuses: the template, or the tokenizer without one, doesn't take a conversation.
            TemplateEnded: it went beyond a bound of time, memory or text.
            Unavailable: no process can be started.
        """
        shown = None if tools is None else list(tools)
        template = self._text(shown)
        texts: list[str] = []
        began_s = time.monotonic()
        for chunk in _chunks(conversations):
            task = TemplateTask(
                template=template,
                conversations=tuple(chunk),
                tools=shown,
                opens_turn=opens_turn,
                variables={**self._tokenizer.special_tokens_map, **variables},
                now=datetime.now().isoformat(),
                longest_s=LONGEST_S,
                total_s=LONGEST_S + MEAN_S * len(chunk),
            )
            for answer in self._ask(task):
                if answer.was_ended:
                    raise TemplateEnded(answer.problem)
                if answer.problem:
                    raise TemplateRefuses(answer.problem, place=len(texts))
                texts.append(answer.text)
        took_s = time.monotonic() - began_s
        if took_s > SLOW_S:
            log.warning("the model's chat template took %.0f s for %d conversations", took_s, len(texts))
        return texts

    def reads(self, name: str) -> bool:
        """Returns whether it has a variable of this name that is none of those each conversation gives it.

        Raises what `write_all` raises.
        """
        if name in OWN_VARIABLES or name in self._tokenizer.special_tokens_map:
            return False
        named = self._tokenizer.chat_template
        templates = list(named.values()) if isinstance(named, dict) else [named or ""]
        return any(name in self._variables(template) for template in templates)

    def _variables(self, template: str) -> tuple[str, ...]:
        task = TemplateTask(
            template=template, variables={}, now=datetime.now().isoformat(), longest_s=LONGEST_S, total_s=LONGEST_S
        )
        (answer,) = self._ask(task)
        if answer.was_ended:
            raise TemplateEnded(answer.problem)
        if answer.problem:
            raise TemplateRefuses(answer.problem)
        return answer.names

    def _text(self, tools: list[Any] | None) -> str:
        """Returns the template itself; of several, the one for conversations with or without tools."""
        try:
            return self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise TemplateRefuses(first_line(error)) from error

    def _ask(self, task: TemplateTask) -> list[TemplateAnswer]:
        process = self._process_of(task.template)
        try:
            return process.ask(task)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise TemplateRefuses(f"a text, number or object of it can't be written: {error}") from error

    def _process_of(self, template: str) -> TemplateProcess:
        with _guard:
            process = self._used.get(template) or _processes.get(template) or TemplateProcess()
            _processes[template] = process
            self._used[template] = process
        return process


def invalid(error: TemplateRefuses | TemplateEnded, *, where: str = "", cure: str = "") -> InvalidInput:
    """Says by model.path that a template wrote nothing.

    where: names the conversation, if its author may look for it. cure: for a template that refuses the messages.
    """
    named = f"{where}: " if where else ""
    if isinstance(error, TemplateEnded):
        return InvalidInput(
            f"{named}the model's chat template was stopped: {error}", field="model.path", cure=COSTS_CURE
        )
    problem = f"{named}the model's chat template refuses the messages: {error}"
    return InvalidInput(problem, field="model.path", cure=cure or "use another template")


def _chunks(conversations: Sequence[Sequence[Row]]) -> Iterator[list[bytes]]:
    """Yields the conversations encoded, in lists of about TASK_BYTES. Raises TemplateRefuses for what can't be sent."""
    chunk: list[bytes] = []
    num_bytes = 0
    for place, rows in enumerate(conversations):
        if not rows:
            raise TemplateRefuses("a conversation has one message or more", place=place)
        try:
            data = encode(list(rows))
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise TemplateRefuses(f"a text, number or object of it can't be written: {error}", place=place) from error
        if chunk and (num_bytes + len(data) > TASK_BYTES or len(chunk) == TASK_CONVERSATIONS):
            yield chunk
            chunk = []
            num_bytes = 0
        chunk.append(data)
        num_bytes += len(data)
    if chunk:
        yield chunk
