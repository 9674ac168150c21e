"""Whether what a renderer makes turn by turn is what the model's chat template makes of the whole conversation.

    open ∥ answer ∥ go_on            as a generator goes on
    template(messages so far)        as the template writes them at once
                                     equal ids, or InvalidInput that names model.path before the job starts

A template that rewrites history, as those that drop earlier reasoning or that count turns, is found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contracts.environments.messages import Message, Tool
from contracts.errors import InvalidInput, PrefixBroken
from onbeat.rendering import tool_calls
from onbeat.rendering.base import plain
from onbeat.rendering.template import FORMAT_CURE, TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """Plays a conversation from an opening of the job both ways. Raises InvalidInput that names model.path.

    end_ids: the tokens that end what the model samples.
    """
    ended = tokenizer.convert_tokens_to_ids(renderer.end)
    if ended not in end_ids:
        raise InvalidInput(
            f"the model's chat template ends an answer with {renderer.end}, which is no end-of-sequence token of it",
            field="model.path",
            cure="set eos_token_id in generation_config.json",
        )
    if tools and not _keeps(tokenizer, tool_calls.OPEN):
        raise InvalidInput(
            f"{tool_calls.OPEN} is a special token of the model, and so in no text",
            field="model.path",
            cure=FORMAT_CURE,
        )
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
    """Two turns: the first answer is still what it was when the second is answered."""
    made = renderer.open(messages, tools)
    said = list(messages)
    turn = list(tokenizer(answer + renderer.end, add_special_tokens=False).input_ids)
    for _ in range(2):
        try:
            made = [*made, *turn, *renderer.go_on(made, turn, reply, tools)]
        except PrefixBroken as error:
            raise InvalidInput(error.problem, field="model.path", cure=FORMAT_CURE) from error
        said += [Message(role="assistant", content=answer), *reply]
        whole = tokenizer(renderer.text(said, tools), add_special_tokens=False).input_ids
        if list(whole) != made:
            raise InvalidInput(
                "the model's chat template rewrites history: the tokens of an earlier turn change as the conversation "
                f"goes on, here from the {_first_difference(made, whole)}th on",
                field="model.path",
                cure=FORMAT_CURE,
            )


def _first_difference(made: Sequence[int], whole: Sequence[int]) -> int:
    same = (one == other for one, other in zip(made, whole, strict=False))
    return 1 + next((place for place, is_same in enumerate(same) if not is_same), min(len(made), len(whole)))


def _keeps(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
