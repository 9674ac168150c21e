"""A chat template is a stranger's program: it ends, in any thread, and what it is given comes back as text."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from contracts.errors import InvalidInput
from contracts.spec_tables.datasets import ChatSpec
from onbeat.prompts.source import render_chat
from onbeat.rendering import chat_template
from onbeat.rendering.chat_template import TemplateTakesLong, write
from onbeat.rendering.template import TemplateRenderer
from tests.unit.onbeat.rendering.chat_models import CHATML, chat_tokenizer

ROWS = [{"role": "user", "content": "Hello."}]
LOOPS = "".join(f"{{% for i{depth} in range(99999) %}}" for depth in range(4)) + 4 * "{% endfor %}"
AGAIN = "{% for i in range(9) %}{{ again(n - 1) if n else '' }}{% endfor %}"
RECURSION = "{% macro again(n) %}" + AGAIN + "{% endmacro %}{{ again(99) }}"
FILTERS = "{% for i in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}"


@pytest.fixture(autouse=True)
def shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LONGEST_S", 0.2)


@pytest.mark.parametrize("template", [LOOPS, RECURSION, FILTERS], ids=["loops", "recursion", "filters"])
def test_a_template_without_an_end_is_ended(template: str) -> None:
    with pytest.raises(TemplateTakesLong, match=r"longer than 0\.2 s"):
        write(chat_tokenizer(template), ROWS, opens_turn=True)


def test_it_is_ended_in_a_thread_too_and_nothing_else_is_traced() -> None:
    ends: list[Any] = []

    def run() -> None:
        try:
            write(chat_tokenizer(LOOPS), ROWS, opens_turn=True)
        except TemplateTakesLong as error:
            ends.append(error)
        ends.append(sys.gettrace())

    before = sys.gettrace()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert isinstance(ends[0], TemplateTakesLong)
    assert ends[1] is None
    assert sys.gettrace() is before
    assert write(chat_tokenizer(CHATML), ROWS, opens_turn=False).endswith("user\nHello.<|im_end|>\n")


def test_a_power_that_nothing_could_interrupt_is_refused_and_two_stars_of_a_text_are_not() -> None:
    with pytest.raises(chat_template.REFUSALS, match=r"operator \*\*"):
        write(chat_tokenizer("{{ 9 ** 9 ** 9 ** 9 }}"), ROWS, opens_turn=True)
    assert write(chat_tokenizer("**{{ messages[0]['content'] }}**"), ROWS, opens_turn=True) == "**Hello.**"


@pytest.mark.parametrize("template", [LOOPS, "{{ raise_exception('no') }}"], ids=["loops", "raises"])
def test_a_job_whose_prompts_it_would_write_fails_by_the_models_name(template: str) -> None:
    with pytest.raises(InvalidInput) as of_questions:
        render_chat(chat_tokenizer(template), [("user", "Hello.")], ChatSpec())
    with pytest.raises(InvalidInput) as of_turns:
        TemplateRenderer(chat_tokenizer(template))
    assert (of_questions.value.field, of_turns.value.field) == ("model.path", "model.path")
