"""The process that runs one chat template, which is a stranger's program: caged, and bounded in time, memory and text.

    ChatTemplate ── TemplateTask: the template, conversations ──▶ template process
                 ◀── TemplateAnswer for each of them, in order ──┘

The environment is the one that transformers makes for chat templates; tests/contract/test_chat_templates.py compares
the two. transformers itself would cost each such process seconds and hundreds of MiB.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.encoding.wire import Record, decode, encode
from onbeat.base.cage import nursery
from onbeat.base.cage.file_rules import close_all_files
from onbeat.base.cage.frames import Frames, Gone

MEMORY_MB = 1024
"""Address space of the process. It has some 150 MiB of it before it reads a template."""
MAX_TASK_BYTES = 256 * 2**20
MAX_TEXT_BYTES = 64 * 2**20
"""Longest text of one conversation. A million tokens, the longest context, are some 5 MB."""
MAX_PROBLEM_CHARACTERS = 500
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a template that each conversation gives, beside the tokenizer's special tokens."""


class TemplateTask(Record, frozen=True, kw_only=True):
    """A template and the conversations that it is to write; without any, the names of its variables are asked for."""

    template: str
    conversations: tuple[bytes, ...] = ()
    """MessagePack of each one's messages, as a list of objects, which is read within the conversation's own time."""
    tools: list[dict[str, Any]] | None = None
    opens_turn: bool = False
    """True where the generation prompt of the assistant's turn is written behind the messages."""
    variables: dict[str, Any]
    """Special tokens by their names, and what the job's spec gives the template."""
    now: str
    """The caller's local time in ISO 8601: the process has neither its environment nor a file of time zones."""
    longest_s: float
    """Processor seconds that one conversation may take."""
    total_s: float
    """Processor seconds after which no further conversation of the task is begun."""


class TemplateAnswer(Record, frozen=True, kw_only=True):
    """The text of a conversation, or the names of variables, or the reason why there is none."""

    text: str = ""
    names: tuple[str, ...] = ()
    problem: str = ""
    """Why there is no text, in the words of the template or of Jinja; "" where there is one."""
    was_ended: bool = False
    """True where the problem is a bound of this process, and not the template's own refusal."""


WARM_UP = (
    "{{ 'a\\n' | trim | tojson }} {{ [1] | pprint }} {{ lipsum(1) | length }} {{ 'http://a.b' | urlize }}"
    "{{ strftime_now('%d %b %Y') }} {{ 'x' | urlencode }} {{ '<b>' | striptags | wordwrap(3) }} {{ none.x.y }}"
)
"""Has Python and Jinja import what they import only when they first need it: afterwards no file can be opened."""


def main(control: int, rules: str) -> None:
    """Runs the keeper of a template's cage."""
    with contextlib.suppress(TemplateError):
        compiled(WARM_UP).render()
    nursery.main(control, rules, prepare=lambda payload: payload, serve=serve)


def serve(connection: socket.socket) -> None:
    """Answers tasks until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames = Frames(connection, max_bytes=MAX_TASK_BYTES)
    close_all_files()
    try:
        while True:
            for answer in answers(decode(frames.receive(), TemplateTask)):
                frames.send(encode(answer))
    except Gone:
        return


def answers(task: TemplateTask) -> Iterator[TemplateAnswer]:
    """Yields one for each conversation, in order. The kernel ends this process where one takes longer than it may."""
    if not task.conversations:
        yield _bounded(task, lambda: TemplateAnswer(names=tuple(sorted(_variables(task.template)))))
    began_s = time.process_time()
    for conversation in task.conversations:
        if time.process_time() - began_s > task.total_s:
            problem = f"{len(task.conversations)} conversations take longer than {task.total_s:g} s of a processor"
            yield TemplateAnswer(problem=problem, was_ended=True)
        else:
            yield _bounded(task, functools.partial(_write, task, conversation))


def _bounded(task: TemplateTask, work: Any) -> TemplateAnswer:
    """Runs what a template asks for. SIGPROF, whose default is to end the process, comes from the kernel: it stops a
    product of two large numbers as well as a loop, which nothing in Python could."""
    signal.setitimer(signal.ITIMER_PROF, task.longest_s)
    try:
        return work()
    except MemoryError:
        problem = f"it takes more memory than {MEMORY_MB} MiB"
        return TemplateAnswer(problem=problem, was_ended=True)
    except Exception as error:  # a stranger's program may raise anything, and each of it has the same answer
        problem = (str(error) or type(error).__name__)[:MAX_PROBLEM_CHARACTERS]
        return TemplateAnswer(problem=problem.encode(errors="replace").decode())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _write(task: TemplateTask, conversation: bytes) -> TemplateAnswer:
    template = compiled(task.template)
    template.globals["strftime_now"] = datetime.fromisoformat(task.now).strftime
    text = template.render(
        messages=decode(conversation, list),
        tools=task.tools,
        documents=None,
        add_generation_prompt=task.opens_turn,
        **task.variables,
    )
    num_bytes = len(text.encode())
    if num_bytes > MAX_TEXT_BYTES:
        problem = f"it writes a text of {num_bytes / 2**20:,.0f} MiB, the most are {MAX_TEXT_BYTES // 2**20}"
        return TemplateAnswer(problem=problem, was_ended=True)
    return TemplateAnswer(text=text)


def _variables(template: str) -> set[str]:
    return find_undeclared_variables(environment().parse(template))


@functools.lru_cache(maxsize=2)
def compiled(template: str) -> Template:
    """Compiles a template; two of one tokenizer may be in use, one of them for conversations with tools."""
    return environment().from_string(template)


def environment() -> ImmutableSandboxedEnvironment:
    """Makes the environment that transformers compiles chat templates in."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    jinja.filters["tojson"] = _tojson
    jinja.globals["raise_exception"] = _raise_exception
    jinja.globals["strftime_now"] = datetime.now().strftime
    return jinja


class GenerationBlock(Extension):
    """The tag `generation`, by which transformers marks what a model wrote: its block is written as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _as_it_is(self, context: nodes.EvalContext, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Writes JSON. Jinja's own filter escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
