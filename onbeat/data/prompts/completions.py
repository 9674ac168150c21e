"""Completions that a data set gives, as the tokens that sampling would have answered: `loss = "sft"` learns them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from contracts.errors import InvalidInput
from onbeat.data.prompts.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def given_ids(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    *,
    prompt: str,
    write: Callable[..., str] | None,
    end_ids: Sequence[int],
    most_tokens: int,
) -> list[int]:
    """Returns the tokens of an answer up to its end-of-sequence token, which is put behind one that has none. It is
    tokenised by itself, since what is sampled begins there, too.

    prompt: what the answer stands behind. write: makes the prompt with its `answer`, where a chat template does.
    end_ids: tokens that end what the model samples. Raises InvalidInput for none, and for more than `most_tokens`.
    """
    where = example.origin or example.example_id
    if not example.completion:
        raise InvalidInput(f"{where} has no completion", field=example.field, cure='loss = "sft" learns completions')
    answer = answer_behind(prompt, write(answer=example.completion)) if write else example.completion
    ends = {*end_ids, *([tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else [])}
    ids: list[int] = list(tokenizer(answer, add_special_tokens=False).input_ids)
    length = next((place for place, token in enumerate(ids, start=1) if token in ends), len(ids))
    # A chat template writes more behind the end of a turn, which no model samples.
    ids = ids[:length] if ids and ids[length - 1] in ends else [*ids, _end_of(tokenizer)]
    if len(ids) > most_tokens:
        raise InvalidInput(
            f"the completion of {where} has {len(ids)} tokens, the limit is {most_tokens}",
            field="rollout.sampling.max_new_tokens",
            cure="raise the limit, or shorten the completion",
        )
    return ids


def answer_behind(prompt: str, whole: str) -> str:
    """Returns what a chat template wrote behind the generation prompt of the assistant's turn. Raises InvalidInput
    where it writes an answered turn in another way than it opens one."""
    if not whole.startswith(prompt):
        raise InvalidInput(
            "the model's chat template opens a turn in another way than it writes one that was answered",
            field="model.path",
            cure="use another template, or leave dataset.chat out",
        )
    return whole.removeprefix(prompt)


def _end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    if not isinstance(tokenizer.eos_token_id, int):
        raise InvalidInput(
            "the model's tokenizer has no end-of-sequence token", field="model.path", cure="name one in its files"
        )
    return tokenizer.eos_token_id
