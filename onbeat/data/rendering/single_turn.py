"""Prompts of rows that the model answers in one turn: messages to text by its chat template.

    rows' messages ─ control tokens broken ─▶ chat template ─▶ text ─▶ tokens, in which only the template wrote controls

A row is data, and so it can't end its own turn and begin another. The end of the template's answers ends sampling, or
no completion would ever end where the model was taught to end it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contracts.environments.messages import Message
from contracts.errors import InvalidInput
from onbeat.data.rendering.base import control_texts, without_controls
from onbeat.data.rendering.chat_template import ChatTemplate, TemplateEnded, TemplateRefuses, invalid
from onbeat.data.rendering.template import ANSWER, rows_of, shows_tools
from onbeat.data.rendering.tool_calls import content_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class RowMessages:
    """Writes the messages of one tokenizer's rows, and counts those that spell tokens of control."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, end_ids: Sequence[int] = ()) -> None:
        """end_ids: the tokens that end what the model samples; () where they aren't known."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._controls = control_texts(tokenizer, end_ids=end_ids)
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._controls, key=len, reverse=True))) or r"(?!)")
        ids: Any = tokenizer.convert_tokens_to_ids(self._controls)
        # Text that no token has becomes the unknown one, which tells a model nothing.
        unknown: Any = tokenizer.unk_token_id
        self._control_ids = {*ids} - {unknown}
        self._knows_tools: bool | None = None
        self._num_written = 0
        self._num_spelled = 0
        """Prompts whose text spells a token of control, and has it as text."""
        self._spelled = ""
        """A token of control that the first of them spells."""
        self._num_forged = 0
        """Prompts in which the tokenizer reads one nevertheless, as one that folds letters into each other may."""

    def prompts(
        self, conversations: Sequence[Sequence[Message]], *, system: str, variables: Mapping[str, Any]
    ) -> list[str]:
        """Returns each conversation as text, with the generation prompt of the assistant's turn behind it.

        Args:
            conversations: messages of each, which are data.
            system: what the job's spec has as the system message of those that have none; "" for none. It is the
                spec's own text, in which a control token is one.
            variables: of the template.

        Raises:
            TemplateRefuses, with the place of the conversation; TemplateEnded.
        """
        self._num_written += len(conversations)
        return self._template.write_all(
            [self._rows(messages, system=system, counts=True) for messages in conversations],
            opens_turn=True,
            variables=variables,
        )

    def answered(self, messages: Sequence[Message], answer: str, *, system: str, variables: Mapping[str, Any]) -> str:
        """Returns a conversation with the assistant's answer, in which a control token is one. Raises as `prompts`."""
        rows = self._rows(messages, system=system, counts=False)
        return self._template.write(
            [*rows, {"role": "assistant", "content": answer}], opens_turn=False, variables=variables
        )

    def reads(self, name: str) -> bool:
        """Returns whether the template has a variable of this name. Raises TemplateRefuses, TemplateEnded."""
        return self._template.reads(name)

    def check_tokens(self, texts: Sequence[str], token_rows: Sequence[Sequence[int]]) -> None:
        """Counts the prompts that have more tokens of control than their text spells: all that it spells is the
        template's."""
        for text, token_ids in zip(texts, token_rows, strict=True):
            num_controls = sum(map(self._control_ids.__contains__, token_ids))
            self._num_forged += num_controls > len(self._pattern.findall(text))

    def report(self) -> None:
        """Logs how many of the rows spelled tokens of control."""
        if self._num_spelled:
            log.warning(
                "%d of %d prompts spell a control token of the model, as %s: there it is text, and no token",
                self._num_spelled,
                self._num_written,
                self._spelled,
            )
        if self._num_forged:
            log.warning(
                "in %d of %d prompts the tokenizer reads a control token that the chat template didn't write: such a "
                "row may end its turn; look for letters like those of the model's control tokens in them",
                self._num_forged,
                self._num_written,
            )

    def check_end(self, *, end_ids: Sequence[int], variables: Mapping[str, Any]) -> None:
        """Checks that sampling ends where the template ends an answer. Raises InvalidInput that names model.path.

        Where the template ends an answer with no control token, the log says that only the model's own ends count.

        end_ids: the tokens that end what is sampled.
        """
        question = Message(role="user", content="?")
        try:
            written = self.answered([question], ANSWER, system="", variables=variables)
        except TemplateEnded as error:
            raise invalid(error) from error
        except TemplateRefuses as error:
            log.warning("the end of the chat template's answers isn't known: it refuses a question alone: %s", error)
            return
        end = written.partition(ANSWER)[2]
        ids = self._tokenizer(end, add_special_tokens=False).input_ids if end else []
        if set(ids) & set(end_ids):
            return
        added = self._tokenizer.added_tokens_decoder
        control = next((token for token in ids if token in added), None)
        if control is None:
            log.warning(
                "the model's chat template ends an answer with %r, which is no control token: completions end at the "
                "model's own end-of-sequence tokens alone",
                end[:40],
            )
            return
        name = self._tokenizer.convert_ids_to_tokens(control)
        raise InvalidInput(
            f"the model's chat template ends an answer with {name}, which is no end-of-sequence token of it: "
            "completions would go on behind it",
            field="model.path",
            cure=f"add {control} to eos_token_id in generation_config.json, or set "
            f"rollout.sampling.stop_token_ids = [{control}]",
        )

    def _rows(self, messages: Sequence[Message], *, system: str, counts: bool) -> list[dict[str, Any]]:
        plain = [without_controls(message, self._controls) for message in messages]
        if counts and plain != list(messages):
            self._num_spelled += 1
            text = "\n".join(map(content_of, messages))
            self._spelled = self._spelled or next(iter(self._pattern.findall(text)), "")
        if system and messages[0].role != "system":
            plain = [Message(role="system", content=system), *plain]
        has_tools = any(message.role == "tool" for message in messages)
        return rows_of(plain, knows_tools=not has_tools or self._shows_tools())

    def _shows_tools(self) -> bool:
        if self._knows_tools is None:
            self._knows_tools = shows_tools(self._template)
        return self._knows_tools
