"""Completion tokens become text, for rewards and people; training uses the token ids themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contracts.encoding.arrays import unpack_int32
from contracts.errors import InvalidInput
from contracts.rollouts import Completion
from contracts.settings import StackSettings
from contracts.spec import ModelSpec
from producer.engine.factory import preload
from weight_store.model_path import FIELD, model_folder

Detokenizer = Callable[[Sequence[Completion]], list[str]]
"""Texts of completions, in order, without special tokens."""


class FolderDetokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, model: ModelSpec, *, settings: StackSettings) -> None:
        """Blocks for seconds (it imports transformers). Raises InvalidInput that names model.path."""
        preload()
        from transformers import AutoTokenizer

        folder = model_folder(model, settings.spec_root)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{folder} has no tokenizer: {error}", field=FIELD) from error

    def __call__(self, completions: Sequence[Completion]) -> list[str]:
        # Cleaning up spaces would change what is scored: "1 ." is not "1.".
        return self._tokenizer.batch_decode(
            [unpack_int32(completion.token_ids) for completion in completions],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
