"""Completion tokens become text, for rewards and people; training uses the token ids themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.encoding.arrays import unpack_int32
from contracts.rollouts import Completion
from contracts.settings import StackSettings
from contracts.spec import ModelSpec
from contracts.spec_tables.environment import EnvironmentSpec, RendererKind
from onbeat.rendering.base import Renderer
from onbeat.rendering.factory import make_renderer
from onbeat.weights.model_path import model_folder
from producer.engine.factory import preload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Detokenizer = Callable[[Sequence[Completion]], list[str]]
"""Texts of completions, in order, without special tokens; of several turns the last one's, which has the answer."""


class FolderDetokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, model: ModelSpec, *, settings: StackSettings) -> None:
        """Blocks for seconds (it imports transformers). Raises InvalidInput that names model.path."""
        preload()
        self._tokenizer = _tokenizer(model_folder(model, settings.spec_root))

    def __call__(self, completions: Sequence[Completion]) -> list[str]:
        # Cleaning up spaces would change what is scored: "1 ." is not "1.".
        turns = [unpack_int32(one.token_ids)[slice(*one.spans[-1])] for one in completions]
        return self._tokenizer.batch_decode(turns, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def folder_renderer(model: ModelSpec, environment: EnvironmentSpec, *, settings: StackSettings) -> Renderer:
    """Makes what writes a job's messages, by the tokenizer of its model's folder.

    Blocks for seconds. Raises InvalidInput that names the field of the spec.
    """
    return _renderer(model_folder(model, settings.spec_root), environment.renderer, environment.chat_format)


@functools.lru_cache(maxsize=4)
def _renderer(folder: Path, kind: RendererKind, chat_format: str) -> Renderer:
    return make_renderer(_tokenizer(folder), kind, chat_format)


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The one that was loaded last is kept: a job's detokenizer and its renderer read the same."""
    from onbeat.weights.model_folder import load_tokenizer

    return load_tokenizer(folder, needs_end=False)
