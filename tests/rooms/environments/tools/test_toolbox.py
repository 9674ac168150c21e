"""What a model is told of a function, and what it is answered for its calls."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from contracts.environments.messages import Message, ToolCall
from onbeat.environments.tools.toolbox import Toolbox


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> Any:
    """Tells the weather.

    It is always fine.

    Args:
        city: Where,
            by name.
        days (int): For how long.

    Returns:
        A text.
    """
    if city == "nowhere":
        raise ValueError("no such city")
    return {"city": city, "days": days}


def ask(name: str, arguments: str) -> str:
    call = ToolCall(name=name, arguments=arguments, call_id="7")
    (answer,) = Toolbox([weather]).answer(Message(role="assistant", tool_calls=(call,)))
    assert (answer.role, answer.name, answer.call_id) == ("tool", name[:100], "7")
    return answer.content


def test_a_function_is_told_by_its_docstring_and_annotations() -> None:
    (tool,) = Toolbox([weather]).tools
    assert (tool.name, tool.description) == ("weather", "Tells the weather.\n\nIt is always fine.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where, by name."},
            "days": {"type": "integer", "description": "For how long."},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    }


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("weather", '{"city": "Oslo"}', '{"city": "Oslo", "days": 1}'),
        ("weather", "{", "error: the arguments are no JSON: "),
        ("weather", "[]", "error: the arguments are no JSON object"),
        ("weather", '{"town": "Oslo"}', "error: missing a required argument: 'city'"),
        ("weather", '{"city": "nowhere"}', "error: ValueError: no such city"),
        ("sunrise", "{}", "error: there is no tool `sunrise`; there are: weather"),
        ("s" * 1000, "{}", f"error: there is no tool `{'s' * 100}`; there are: weather"),
        ("weather", "[" * 100_000, "error: the arguments are no JSON: "),
    ],
)
def test_a_call_has_its_result_or_says_what_was_wrong(name: str, arguments: str, answer: str) -> None:
    assert ask(name, arguments).startswith(answer)


def test_an_error_that_is_no_answer_passes() -> None:
    def stuck() -> str:
        raise TimeoutError

    call = Message(role="assistant", tool_calls=(ToolCall(name="stuck"),))
    assert Toolbox([stuck]).answer(call)[0].content == "error: TimeoutError()"
    with pytest.raises(TimeoutError):
        Toolbox([stuck], passes=(TimeoutError,)).answer(call)


def test_of_very_many_calls_in_one_message_the_first_are_made() -> None:
    made: list[int] = []

    def note(number: int) -> str:
        made.append(number)
        return "noted"

    calls = tuple(ToolCall(name="note", arguments=f'{{"number": {one}}}', call_id=str(one)) for one in range(10))
    box = Toolbox([note])
    answers = box.answer(Message(role="assistant", tool_calls=calls))
    assert made == list(range(8))
    assert [(one.call_id, one.content) for one in answers[7:]] == [
        ("7", "noted"),
        ("8", "error: a message has 8 calls at most"),
        ("9", "error: a message has 8 calls at most"),
    ]
    assert box.calls.metrics() == {"tool_calls": 10.0, "refused_tool_calls": 2.0}
