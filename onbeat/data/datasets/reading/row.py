"""The parts of a row, and the problems of its author: each names the column, and has the cure that fits.

    {"prompt": …, "reference": …} ─▶ Row: prompt (a text or messages), completion, reference, task_entry

Messages are read as OpenAI's API and Hugging Face write them: roles system, user, assistant and tool, calls of tools,
content that is null where a call is, and content in parts of text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from msgspec import UNSET

from contracts.environments.messages import Message, Role, ToolCall
from contracts.spec.datasets import RowColumns
from onbeat.data.datasets.reading.prompt_template import filled_template
from onbeat.data.datasets.reading.row_refusals import RowFault, missing
from onbeat.data.prompts.file_rows import PlacedRow, value_at
from onbeat.data.rendering.tool_calls import content_of

READ_COLUMNS = ("prompt", "messages", "reference", "completion", "task_entry")
"""Keys of `dataset.columns` whose columns an example is made of."""
ROLES: tuple[Role, ...] = get_args(Role)
ROLE_CURES = {
    "developer": "write system, which is what chat templates call it",
    "function": "write tool",
    "human": "write user",
    "gpt": "write assistant",
    "bot": "write assistant",
    "model": "write assistant",
}
"""Roles of other formats → what to do."""
MESSAGE_CURE = 'a message is an object like {"role": "user", "content": "..."}'
CALL_CURE = 'a call is an object like {"type": "function", "function": {"name": "...", "arguments": {...}}}'


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row under our names."""

    prompt: str | tuple[Message, ...]
    """A text, or the messages before the answer."""
    completion: str
    """The completion that loss = "sft" learns; "" without one."""
    reference: str
    task_entry: str


def read_row(row: PlacedRow, columns: RowColumns, *, template: str = "", needs_reference: bool = True) -> Row:
    """Reads the columns that an example is made of; a column that is null counts as absent.

    Args:
        row: A row of a file.
        columns: What the columns are called in the file.
        needs_reference: False where a row without a reference is as good, unless `columns` renames it.
        template: Makes the prompt of several columns; "" where a column is the prompt.

    Raises:
        RowFault: The row lacks a column, or has something else in it than the column is for.
    """
    values: dict[str, Any] = {}
    for name in READ_COLUMNS:
        value = value_at(row.row, getattr(columns, name))
        if value is not None and value is not UNSET:
            values[name] = value
    if template:
        values["prompt"] = filled_template(template, row)
    prompt, completion = _prompt_and_completion(values, columns, row)
    needs_reference |= columns.reference != RowColumns().reference
    if "reference" not in values and not completion and needs_reference:
        raise missing(
            "reference", columns, row, instead='; rows that loss = "sft" learns have a completion in its place'
        )
    return Row(
        prompt=prompt,
        completion=completion,
        reference=_reference(values["reference"], columns) if "reference" in values else "",
        task_entry=_text_of(values.get("task_entry", ""), columns.task_entry),
    )


def _prompt_and_completion(
    values: Mapping[str, Any], columns: RowColumns, row: PlacedRow
) -> tuple[str | tuple[Message, ...], str]:
    """Returns the prompt, and the completion: messages that end with the assistant's have both."""
    completion = _completion(values.get("completion", ""), columns.completion)
    if "prompt" in values:
        prompt = values["prompt"]
        return prompt if isinstance(prompt, str) else _messages(prompt, columns.prompt), completion
    if "messages" not in values:
        raise missing("prompt", columns, row, instead=", or the column of conversations by dataset.columns.messages")
    messages = _messages(values["messages"], columns.messages)
    if len(messages) > 1 and messages[-1].role == "assistant":
        return messages[:-1], content_of(messages[-1])
    return messages, ""


def _completion(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    *before, answer = _messages(value, name)
    if before:
        raise RowFault(
            f"`{name}` has {len(before) + 1} messages, and one is learnt",
            cure="put those before the last into the prompt",
        )
    if answer.role != "assistant":
        raise RowFault(f"`{name}` is a message of the role {answer.role}", cure="give the assistant's answer")
    return content_of(answer)


def _reference(value: Any, columns: RowColumns) -> str:
    """Returns what stands behind the last `reference_after`, without white space; all of it where that isn't set."""
    text = _answer(value, columns.reference)
    marker = columns.reference_after
    if marker is UNSET:
        return text
    _, is_there, answer = text.rpartition(marker)
    if not is_there:
        raise RowFault(
            f"column `{columns.reference}` has no `{marker}`, which dataset.columns.reference_after names",
            "add it before the answer, leave the row out, or leave reference_after out",
        )
    return answer.strip()


def _answer(value: Any, name: str) -> str:
    """Returns a text as it is, and a number as JSON writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return msgspec.json.encode(value).decode()
    cures = {
        list: "name one answer; where several are right, name the column in dataset.metadata_columns and compare it in "
        'a reward of type "plugin", which sees it as `metadata`',
        dict: f'name what is in it: dataset.columns.reference = "{name}.KEY"',
        bool: 'write it as text: "true"',
    }
    cure = next((cure for kind, cure in cures.items() if isinstance(value, kind)), "write it as text")
    raise RowFault(f"`{name}` is {_kind(value)}, and a reference is one text or number", cure=cure)


def _text_of(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowFault(f"`{name}` is {_kind(value)}, and not text", cure="write the JSON of the entry as a text")
    return value


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple):
        raise RowFault(
            f"`{name}` is {_kind(value)}, and neither a text nor a list of messages",
            cure="dataset.columns says which column is which; " + MESSAGE_CURE,
        )
    if not value:
        raise RowFault(f"`{name}` has no messages", cure="remove the row, or give it one message or more")
    return tuple(_message(message, f"{name}[{place}]") for place, message in enumerate(value))


def _message(value: Any, name: str) -> Message:
    """name: where it stands, as `prompt[1]`."""
    if not isinstance(value, Mapping):
        raise RowFault(f"`{name}` is {_kind(value)}, and no message", cure=MESSAGE_CURE)
    message: Mapping[str, Any] = {key: item for key, item in value.items() if item is not None}
    role = _role(message, name)
    if "function_call" in message:
        raise RowFault(f"`{name}` has a function_call, the older form of a call", cure="write it under tool_calls")
    calls = _calls(message.get("tool_calls", ()), f"{name}.tool_calls")
    if calls and role != "assistant":
        raise RowFault(
            f"`{name}` is a message of the role {role} with tool_calls", cure="only the assistant calls tools"
        )
    if "content" not in message and not calls:
        raise RowFault(
            f"`{name}` has no content and calls no tool" if role == "assistant" else f"`{name}` has no content",
            cure='leave the message out, or write "" for an empty one',
        )
    is_tool = role == "tool"
    return Message(
        role=role,
        content=_content(message.get("content", ""), f"{name}.content"),
        tool_calls=calls,
        name=_text_of(message.get("name", ""), f"{name}.name") if is_tool else "",
        call_id=_text_of(message.get("tool_call_id", ""), f"{name}.tool_call_id") if is_tool else "",
    )


def _role(message: Mapping[str, Any], name: str) -> Role:
    if "role" not in message and "from" in message:
        raise RowFault(
            f"`{name}` has the keys from and value",
            cure="call them role and content, with the roles user for human and assistant for gpt",
        )
    if "role" not in message:
        raise RowFault(f"`{name}` has no role", cure=MESSAGE_CURE)
    role = message["role"]
    if role not in ROLES:
        shown = role[:40] if isinstance(role, str) else _kind(role)
        raise RowFault(
            f"messages of the role {shown} aren't read: `{name}` is one",
            cure=ROLE_CURES.get(shown, f"roles are {', '.join(ROLES)}"),
        )
    return role


def _content(value: Any, name: str) -> str:
    """Returns a text, or the texts of its parts one after the other."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise RowFault(f"`{name}` is {_kind(value)}, and neither text nor parts of text", cure=MESSAGE_CURE)
    texts: list[str] = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            shown = "without a text"
            if isinstance(kind, str) and kind != "text":
                shown = f"of the type {kind[:40]}"
            raise RowFault(
                f"`{name}[{place}]` is a part {shown}: only text is read",
                cure='leave it out, or write it as {"type": "text", "text": "..."}',
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(value: Any, name: str) -> tuple[ToolCall, ...]:
    if not isinstance(value, list | tuple):
        raise RowFault(f"`{name}` is {_kind(value)}, and no list of calls", cure=CALL_CURE)
    return tuple(_call(call, f"{name}[{place}]", number=place) for place, call in enumerate(value))


def _call(value: Any, name: str, *, number: int) -> ToolCall:
    """Reads a call in OpenAI's form, or what stands in its `function` alone, as some sets have it."""
    call = value.get("function") or value if isinstance(value, Mapping) else value
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise RowFault(f"`{name}` has no name of a function", cure=CALL_CURE)
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):
        raise RowFault(f"`{name}` has arguments that are {_kind(arguments)}", cure=CALL_CURE)
    call_id = value.get("id")
    return ToolCall(
        name=call["name"], arguments=arguments, call_id=call_id if isinstance(call_id, str) else f"call_{number}"
    )


def _kind(value: Any) -> str:
    """Names what JSON would call a value."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    kinds = {str: "a text", Mapping: "an object", int | float: "a number", type(None): "null"}
    return next((noun for kind, noun in kinds.items() if isinstance(value, kind)), type(value).__name__)
