"""The model that is trained of a folder: a causal LM of text, also where the folder has towers for pictures or sound.

    config.json of a causal LM           ─▶ the class that transformers has for it
    config.json of text and towers       ─▶ the causal LM of its text config, where there is one (Gemma 3, Qwen3.5)
                                         ─▶ else the folder's own class, its towers taken out (Qwen3-VL)

Trainer, engines and the export all make their models here, so that the tensors of a version have the same names in
each. The towers are never in memory while a job trains: they are in no version, and an export takes them from the
folder as they are (`untrained_tensors`).
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from contracts.errors import InvalidInput
from onbeat.weights.model_path import FIELD, weights_index

MAKES_A_MODEL = threading.RLock()
"""Held while transformers makes or reads a model. Meanwhile it replaces functions of torch and of its own classes
(initial weights, ties of weights) for all threads of the process: two at once would leave them replaced."""
TEXT_NAMES: Mapping[str, str] = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Pattern of a tensor's name in the files of a multi-modal folder → its beginning in the causal LM of the text."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """The causal LM of a folder, and the way from the folder's tensors to it. `text_model` creates it."""

    auto: Any
    """The class of transformers that makes the model of `config`: AutoModelForCausalLM, or that of whole folders."""
    config: PreTrainedConfig
    names: Mapping[str, str] = field(default_factory=dict)
    """Patterns that change the names of the files' tensors before transformers' own; {} for none."""
    has_towers: bool = False
    """True where the class makes towers, too, which are taken out again."""

    def empty(self, dtype: torch.dtype) -> PreTrainedModel:
        """Makes the model with uninitialised weights, on torch's default device."""
        with MAKES_A_MODEL:
            with no_init_weights():
                model: PreTrainedModel = self.auto.from_config(self.config, dtype=dtype, trust_remote_code=False)
            widen_as_loaded(model, dtype)
            # Without initial weights transformers ties none, and FSDP2 would take a tied head for a parameter of its
            # own.
            model.tie_weights()
        if self.has_towers:
            take_towers_out(model)
        return model

    def load(self, folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
        """Reads the model from the folder's safetensors; returns it with transformers' loading info.

        Tensors that are missing, or of another shape than config.json says, have random values, and are in the info.
        Raises what transformers raises for a folder that it can't read.
        """
        options: dict[str, Any] = {}
        if self.names:
            options["key_mapping"] = dict(self.names)
        with MAKES_A_MODEL, self.towers_unreported():
            loaded = self.auto.from_pretrained(
                folder,
                config=self.config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                # They are in the loading info then: transformers' own error names none of them.
                ignore_mismatched_sizes=True,
                **options,
            )
        model, loading = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
        if self.has_towers:
            take_towers_out(model)
        return model, loading

    @property
    def is_multi_modal(self) -> bool:
        """True where the folder has towers beside the text that is trained."""
        return bool(self.names) or self.has_towers

    @contextlib.contextmanager
    def towers_unreported(self) -> Iterator[None]:
        """Keeps transformers from a warning of a line for each tensor of a tower that isn't read inside.

        What is missing is in the loading info, and an error of ours.
        """
        before = transformers_logging.get_verbosity()
        if self.is_multi_modal:
            transformers_logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(before)

    def conversions(self, model: PreTrainedModel) -> list[Any]:
        """Returns the transforms that lead from the files' tensors to the model's, in their order."""
        return get_model_conversion_mapping(model, key_mapping=dict(self.names) or None)


def widen_as_loaded(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Makes those tensors float32 that `from_pretrained` reads as float32 into a model of `dtype`.

    A family names them: a bias that chooses experts, whose rounding to bfloat16 would choose others (DeepSeek-V3,
    GLM-4.5, Nemotron-H). `from_config` makes them in the model's dtype.
    """
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    # As transformers does when it reads a folder: patterns that are found anywhere in a name, "*" for any letters.
    pattern, _, _ = build_glob_alternation(list(plan))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.to(torch.float32)


def text_model(config: PreTrainedConfig) -> TextModel:
    """Chooses the causal LM of a config.

    Raises:
        InvalidInput: transformers has no causal LM for it; the error names model.path and the cure.
    """
    text = config.get_text_config(decoder=True)
    if text is config:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise no_causal_lm(config)
        return TextModel(auto=AutoModelForCausalLM, config=config)
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return TextModel(auto=AutoModelForCausalLM, config=_tied_as_whole(text, config), names=TEXT_NAMES)
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return TextModel(auto=AutoModelForImageTextToText, config=config, has_towers=True)
    raise no_causal_lm(config)


def _tied_as_whole(text: PreTrainedConfig, whole: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the text config with a head that is tied to the embedding where the folder's own class ties it.

    Each of the two configs has a key for it. By which of them a class goes, only the class knows.
    """
    if getattr(text, "tie_word_embeddings", None) == getattr(whole, "tie_word_embeddings", None):
        return text
    if type(whole) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return text
    with MAKES_A_MODEL:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = AutoModelForImageTextToText.from_config(whole)
        model.tie_weights()
    head = model.get_output_embeddings()
    if head is None:
        return text
    text = copy.deepcopy(text)
    text.tie_word_embeddings = head.weight is cast(nn.Embedding, model.get_input_embeddings()).weight
    return text


def no_causal_lm(config: PreTrainedConfig) -> InvalidInput:
    """Returns the error for a config of which transformers makes no causal LM."""
    version = transformers.__version__
    return InvalidInput(
        f"`{config.name_or_path}` is a `{config.model_type}`, of which transformers {version} makes no language model",
        field=FIELD,
        cure="name a folder of a causal LM, or of a multi-modal model with a text; docs/models.md lists the families",
    )


def take_towers_out(model: PreTrainedModel) -> None:
    """Takes each part of a multi-modal model out that text doesn't pass through; the rest computes as before."""
    network = cast(nn.Module, model)
    needed = {id(module) for module in (model.get_decoder(), model.get_output_embeddings()) if module is not None}
    _take_out_of(network, needed)


def _take_out_of(module: nn.Module, needed: set[int]) -> None:
    for name, child in list(module.named_children()):
        if id(child) in needed:
            continue
        if any(id(part) in needed for part in child.modules()):
            _take_out_of(child, needed)
        else:
            # Its forward uses the part only for pictures or sound, and no input of a job has them.
            setattr(module, name, None)


def untrained_tensors(folder: Path, config: PreTrainedConfig) -> dict[str, Path]:
    """Returns the tensors of a multi-modal folder that are no part of its text model, by their names in its files.

    They are the towers' and what connects them to the text. {} for a folder of a causal LM: what transformers leaves
    unread there (as layers that predict further tokens) belongs to weights that training has moved away from.

    Args:
        folder: The folder.
        config: That of its config.json.

    Returns:
        Name → the file that holds it.
    """
    chosen = text_model(config)
    if not chosen.is_multi_modal:
        return {}
    with torch.device("meta"):
        model = chosen.empty(torch.float32)
    own = cast(nn.Module, model).state_dict()
    conversions = chosen.conversions(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    untrained: dict[str, Path] = {}
    for name, path in _stored(folder).items():
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if renamed not in own:
            untrained[name] = path
    return untrained


def _stored(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor in a folder's safetensors."""
    file_of = weights_index(folder, field=FIELD)
    if file_of is not None:
        return {name: folder / file for name, file in file_of.items()}
    path = folder / SAFE_WEIGHTS_NAME
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)
