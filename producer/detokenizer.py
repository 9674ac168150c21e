"""Completion tokens become text, for rewards and people; training uses the token ids themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from contracts.encoding.arrays import unpack_int32
from contracts.encoding.digests import Digest
from contracts.rollouts import Completion
from contracts.settings import StackSettings
from contracts.spec.environment import EnvironmentSpec, RendererKind
from contracts.spec.job import ModelSpec
from onbeat.data.named_files import model_digests, reading_model
from onbeat.data.rendering.base import Renderer
from onbeat.data.rendering.factory import make_renderer
from onbeat.weights.model_path import FIELD, find_model
from producer.engine.factory import engine_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Detokenizer = Callable[[Sequence[Completion]], list[str]]
"""Texts of completions, in order, without special tokens; of several turns the last one's, which has the answer."""


class FolderDetokenizer:
    """Turns token ids into texts by the tokenizer of a model folder. LoadedModel creates and calls it."""

    def __init__(self, model: ModelSpec, *, settings: StackSettings) -> None:
        """Blocks for seconds (it imports transformers). Raises InvalidInput that names model.path."""
        engine_class()  # imports transformers, one thread at a time
        self._tokenizer = _tokenizer(_named(model, settings))

    def __call__(self, completions: Sequence[Completion]) -> list[str]:
        # Cleaning up spaces would change what is scored: "1 ." is not "1.".
        turns = [unpack_int32(completion.token_ids)[slice(*completion.spans[-1])] for completion in completions]
        return self._tokenizer.batch_decode(turns, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def folder_renderer(model: ModelSpec, environment: EnvironmentSpec, *, settings: StackSettings) -> Renderer:
    """Makes what writes a job's messages, by the tokenizer of its model's folder.

    Blocks for seconds. Raises InvalidInput that names the field of the spec.
    """
    return _renderer(_named(model, settings), environment.renderer, environment.chat_format)


@dataclass(frozen=True, kw_only=True)
class _NamedFolder:
    """A model's folder and its files: a folder whose files have changed is another key of a cache."""

    folder: Path
    path: str
    """As the spec writes it."""
    files: frozenset[tuple[str, Digest]]
    """(path, digest) of each, as the job was accepted with it; of a job that no gateway accepted, as they are now."""


def _named(model: ModelSpec, settings: StackSettings) -> _NamedFolder:
    folder = find_model(model, settings.spec_root)
    digests = model.file_digests
    if digests is UNSET:
        digests = model_digests(folder, model.path, field=FIELD, weights=False)
    return _NamedFolder(folder=folder, path=model.path, files=frozenset(digests.items()))


@functools.lru_cache(maxsize=4)
def _renderer(named: _NamedFolder, kind: RendererKind, chat_format: str) -> Renderer:
    return make_renderer(_tokenizer(named), kind, chat_format)


@functools.lru_cache(maxsize=1)
def _tokenizer(named: _NamedFolder) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. The last one stays in a cache: a job's detokenizer and its renderer read the same.

    Raises:
        InvalidInput: The folder has other files than are named; the error names model.path.
    """
    from onbeat.weights.model_folder import load_tokenizer

    with reading_model(named.folder, named.path, dict(named.files), field=FIELD):
        return load_tokenizer(named.folder, needs_end=False)
