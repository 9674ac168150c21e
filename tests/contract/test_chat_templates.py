"""A template process writes what transformers writes: the same bytes, and the same refusals."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from contracts.encoding.wire import encode
from onbeat.data.rendering import template_process
from onbeat.data.rendering.chat_template import ChatTemplate
from onbeat.data.rendering.template_cage import TemplateProcess
from onbeat.data.rendering.template_process import TemplateTask
from tests.unit.onbeat.data.rendering.chat_models import CHATML, COUNTING, FORGETFUL, WITH_TOOLS, chat_tokenizer

FOLDER = Path(__file__).parent / "chat_templates"
"""Templates in the way of Qwen3's, Llama 3.1's and Mistral's, and one of odd constructs."""
TEMPLATES = {
    "chatml": CHATML,
    "tools": WITH_TOOLS,
    "forgetful": FORGETFUL,
    "counting": COUNTING,
    **{path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))},
}
USER = {"role": "user", "content": " What is 6*7? <b>'é\u2028\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nForty-two. "}
CALL = {"name": "look_up", "arguments": {"word": "é <b>", "times": [1, 2.5, None, True]}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [{"role": "system", "content": "Short answers."}, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "No."}, ANSWER],
    "calls": [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": CALL}]}],
    "answers": [USER, ANSWER, {"role": "tool", "content": "42", "name": "look_up"}, {"role": "tool", "content": "43"}],
    "null": [{"role": "user", "content": None}],
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "é", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_kind_of_template_is_written_to_the_same_bytes(name: str, conversation: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[name])
    tokenizer.bos_token = "<|endoftext|>"
    template = ChatTemplate(tokenizer)
    rows = CONVERSATIONS[conversation]
    for tools in (None, TOOLS):
        for opens_turn in (True, False):
            variables: dict[str, Any] = {"enable_thinking": False} if opens_turn else {}
            today = datetime.now().date()
            options = {"tokenize": False, "add_generation_prompt": opens_turn, **variables}
            expected = outcome(tokenizer.apply_chat_template, rows, tools=tools, **options)
            written = outcome(template.write, rows, tools=tools, opens_turn=opens_turn, variables=variables)
            assert written == expected or datetime.now().date() != today


def outcome(write: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, str]:
    """Returns a text, or an error's."""
    try:
        return str(write(*arguments, **options)), ""
    except Exception as error:
        return "", str(error)


def test_its_environment_has_what_transformers_gives_a_template() -> None:
    theirs, ours = _compile_jinja_template("").environment, template_process.environment()
    assert ours.filters.keys() == theirs.filters.keys()
    assert ours.tests.keys() == theirs.tests.keys()
    assert ours.globals.keys() == theirs.globals.keys()
    for option in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "undefined", "policies"):
        assert getattr(ours, option) == getattr(theirs, option), option
    assert type(ours) is type(theirs)
    tags = [{tag for extension in made.extensions.values() for tag in extension.tags} for made in (ours, theirs)]
    assert tags[0] == tags[1]


def test_every_filter_and_function_works_where_no_file_can_be_opened() -> None:
    """What Python would import in the middle of a template is there before files are closed."""
    values = ("'a <b> http://c.de\\n'", "[3, 1, 2]", "{'b': 1, 'a': [2]}", "2.5", "none")
    filters = sorted(template_process.environment().filters.keys() - {"random"})
    templates = [
        f"{{% set made = {value} | {name} %}}{{{{ made | list if made is iterable else made }}}}"
        for name in filters
        for value in values
    ]
    functions = ("lipsum(1) | length > 9", "cycler(1, 2).next()", "joiner('x')()", "dict(a=1)", "range(3) | list")
    templates += [f"{{{{ {function} }}}}" for function in functions]
    process, tokenizer = TemplateProcess(), chat_tokenizer("")
    for template in templates:
        tokenizer.chat_template = template
        expected = outcome(tokenizer.apply_chat_template, [USER], tokenize=False)
        if " at 0x" in expected[0]:  # an address
            continue
        task = TemplateTask(
            template=template,
            conversations=(encode([USER]),),
            variables={},
            now=datetime.now().isoformat(),
            longest_s=5.0,
            total_s=5.0,
        )
        (answer,) = process.ask(task)
        assert (answer.text, answer.problem) == expected, template
