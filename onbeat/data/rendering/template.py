"""Renderer `chat` by the model's own chat template, for every template that leaves what was said as it is.

The initial observation is what the template writes. An observation is what it writes after the model's turn: it is
given a conversation of one question, one answer of its own making and the reply, and what follows the answer's end is
taken. Whether that is what the template would write in a real conversation, `prove` finds out when the job starts: a
template that rewrites history, as those that drop earlier reasoning or that count turns, is refused.

A template that knows no tools has them described in the system message, and their answers in a user's message.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contracts.environments.messages import Message, Tool, ToolCall
from contracts.errors import InvalidInput, PrefixBroken
from contracts.spec.datasets import no_chat_template
from onbeat.data.rendering import tool_calls
from onbeat.data.rendering.base import plain
from onbeat.data.rendering.chat_template import ChatTemplate, TemplateEnded, TemplateRefuses, invalid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "An answer\u2063 of the model."
"""Stands for what was sampled; its invisible character keeps it apart from what a template says by itself."""
FORMAT_CURE = "name a renderer of the package `renderers` as environment.chat_format, or use another chat template"


class TemplateRenderer:
    """A Renderer over the template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises InvalidInput that names model.path where the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise no_chat_template("model.path", 'choose a chat model, or set environment.renderer = "text"')
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self.knows_tools = shows_tools(self._template)
        self.end = self._end_of_turn()

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        text = self.text(plain(self._tokenizer, messages), tools)
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def parse(self, prompt: Sequence[int], turn: Sequence[int], tools: Sequence[Tool]) -> Message:
        text = self._tokenizer.decode(list(turn), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if tools:
            return tool_calls.read(str(text))
        return Message(role="assistant", content=str(text))

    def go_on(
        self, prompt: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int]:
        question, answer = Message(role="user", content="?"), Message(role="assistant", content=ANSWER)
        whole = self.text([question, answer, *plain(self._tokenizer, messages)], ())
        _, separator, after = whole.partition(ANSWER)
        if not separator or not after.startswith(self.end):
            raise PrefixBroken("the model's chat template changes an answer once it is answered", cure=FORMAT_CURE)
        ended = self._tokenizer.convert_tokens_to_ids(self.end)
        # A turn that ended by another token of the model's keeps it, and is closed as the template closes turns.
        follows = after
        if turn and turn[-1] == ended:
            follows = after.removeprefix(self.end)
        return list(self._tokenizer(follows, add_special_tokens=False).input_ids)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opens_turn: bool = True) -> str:
        """Writes a conversation as the template does. Raises InvalidInput that names model.path where it refuses."""
        tools = plain(self._tokenizer, tools)
        if tools and not self.knows_tools:
            messages = _described(messages, tools)
        rows = rows_of(messages, knows_tools=self.knows_tools)
        shown = [tool_calls.as_function(tool) for tool in tools if self.knows_tools]
        try:
            return self._template.write(rows, tools=shown or None, opens_turn=opens_turn)
        except (TemplateRefuses, TemplateEnded) as error:
            raise invalid(error, cure=FORMAT_CURE) from error

    def _end_of_turn(self) -> str:
        """Returns the token that the template ends an answer with, which the model has to end its turn with."""
        question, answer = Message(role="user", content="?"), Message(role="assistant", content=ANSWER)
        written = self.text([question, answer], (), opens_turn=False)
        _, _, after = written.partition(ANSWER)
        for token in sorted(self._tokenizer.all_special_tokens, key=len, reverse=True):
            if after.startswith(token):
                return token
        raise InvalidInput(
            f"the model's chat template ends an answer with {after[:40]!r}, which is no special token",
            field="model.path",
            cure=FORMAT_CURE,
        )


def shows_tools(template: ChatTemplate) -> bool:
    """Returns whether the template writes tools, and has their calls written as `tool_calls` reads them.

    Raises InvalidInput that names model.path where it goes beyond a bound.
    """
    tool = Tool(name="look_up", description="Looks a word up.")
    question = {"role": "user", "content": "?"}
    try:
        written = template.write([question], tools=[tool_calls.as_function(tool)], opens_turn=True)
    except TemplateEnded as error:
        raise invalid(error) from error
    except TemplateRefuses:
        return False
    return tool.name in written and tool_calls.OPEN in written


def rows_of(messages: Sequence[Message], *, knows_tools: bool) -> list[dict[str, Any]]:
    """Returns messages as chat templates read them: calls are text of the assistant's message, and tools' answers are
    messages of a user to a template that knows no tools."""
    rows = [_as_template(message) for message in messages]
    return rows if knows_tools else _without_tool_role(rows)


def _as_template(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": tool_calls.content_of(message)}
    if message.name:
        row["name"] = message.name
    return row


def _described(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Returns the messages with a system message that describes the tools, behind what it says already."""
    system, rest = "", list(messages)
    if rest and rest[0].role == "system":
        system = rest.pop(0).content + "\n\n"
    return [Message(role="system", content=system + tool_calls.describe(tools)), *rest]


def _without_tool_role(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools' messages that follow each other become one user's message."""
    written: list[dict[str, Any]] = []
    for is_tool, group in itertools.groupby(rows, key=lambda row: row["role"] == "tool"):
        if not is_tool:
            written += group
            continue
        answers = [f"<tool_response>\n{row['content']}\n</tool_response>" for row in group]
        written.append({"role": "user", "content": "\n".join(answers)})
    return written


CALL = ToolCall(name="look_up", arguments="{}")
"""A call that each model has to be able to write, if its job has tools."""
ANSWERS = ("Let me see.", "<think>\nIt is seven.\n</think>\n\nSeven.")
"""Many templates drop the thoughts of earlier answers, which the model's later turns then never see."""
REPLY = Message(role="user", content="No.\nTry again, please.")
TOOL_REPLIES = (Message(role="tool", content="42", name="look_up"), Message(role="tool", content="43", name="look_up"))


def prove(
    renderer: TemplateRenderer,
    tokenizer: PreTrainedTokenizerBase,
    *,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    end_ids: Sequence[int],
) -> None:
    """Plays a conversation from an initial observation of the job both ways. Raises InvalidInput that names model.path.

        open ∥ answer ∥ go_on            as a generator goes on
        template(messages so far)        as the template writes them at once: equal ids

    end_ids: the tokens that end what the model samples.
    """
    ended = tokenizer.convert_tokens_to_ids(renderer.end)
    if ended not in end_ids:
        raise InvalidInput(
            f"the model's chat template ends an answer with {renderer.end}, which is no end-of-sequence token of it",
            field="model.path",
            cure="set eos_token_id in generation_config.json",
        )
    if tools:
        _check_calls(tokenizer)
    for reply in ((REPLY,), TOOL_REPLIES):
        for answer in ANSWERS:
            _compare(renderer, tokenizer, plain(tokenizer, messages), tools, answer=answer, reply=reply)


def _compare(
    renderer: TemplateRenderer,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: Sequence[Tool],
    *,
    answer: str,
    reply: Sequence[Message],
) -> None:
    """Plays two turns: the first answer is still what it was when the second is answered."""
    token_ids = renderer.open(messages, tools)
    conversation = list(messages)
    turn = list(tokenizer(answer + renderer.end, add_special_tokens=False).input_ids)
    for _ in range(2):
        try:
            token_ids = [*token_ids, *turn, *renderer.go_on(token_ids, turn, reply, tools)]
        except PrefixBroken as error:
            raise InvalidInput(error.problem, field="model.path", cure=FORMAT_CURE) from error
        conversation += [Message(role="assistant", content=answer), *reply]
        whole = tokenizer(renderer.text(conversation, tools), add_special_tokens=False).input_ids
        if list(whole) != token_ids:
            raise InvalidInput(
                "the model's chat template rewrites history: the tokens of an earlier turn change as the conversation "
                f"goes on, here from the {_first_difference(token_ids, whole)}th on",
                field="model.path",
                cure=FORMAT_CURE,
            )


def _first_difference(token_ids: Sequence[int], whole: Sequence[int]) -> int:
    same = (left == right for left, right in zip(token_ids, whole, strict=False))
    return 1 + next((place for place, is_same in enumerate(same) if not is_same), min(len(token_ids), len(whole)))


def _check_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises InvalidInput that names model.path where a call that the model writes can't be read from its tokens."""
    written = tool_calls.write(CALL)
    text = _decoded(tokenizer, written)
    if _is_read(text):
        return
    if _is_read(_decoded(tokenizer, written, skips_special=False)):
        raise InvalidInput(
            f"{tool_calls.OPEN} is a special token of the model, and so in no text",
            field="model.path",
            cure=FORMAT_CURE,
        )
    # What the tokenizer has no token for it drops, or replaces by its token for the unknown.
    lacks = [sign for sign in dict.fromkeys(written) if not sign.isspace() and sign not in _decoded(tokenizer, sign)]
    problem = f"it makes {text!r} of it"
    if lacks:
        problem = f"it has no token for {' '.join(lacks)}"
    raise InvalidInput(
        f"the model's tokenizer can't write a call of a tool, {' '.join(written.split())}: {problem}",
        field="model.path",
        cure="choose a model whose tokenizer has them, as those of chat models do, or an environment without tools",
    )


def _is_read(text: str) -> bool:
    """Returns True where the call is read from the text as it was written."""
    return [call.name for call in tool_calls.read(text).tool_calls] == [CALL.name]


def _decoded(tokenizer: PreTrainedTokenizerBase, text: str, *, skips_special: bool = True) -> str:
    """Returns a text as it is after it was tokens."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return str(tokenizer.decode(ids, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False))
