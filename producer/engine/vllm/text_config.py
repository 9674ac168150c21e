"""The config that vLLM gets of a folder of which only the text is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from onbeat.weights.model_folder import empty_model, model_config


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Takes the text's config out of a multi-modal folder's. vLLM calls it, in each of its processes."""

    architecture: str
    """The class of transformers that is trained, e.g. Qwen3_5ForCausalLM; vLLM has its own by the same name."""
    has_tied_head: bool
    """The folder says that at one of two places."""

    def __call__(self, config: PreTrainedConfig) -> PreTrainedConfig:
        text = config.get_text_config(decoder=True)
        # vLLM asks first with a config that has no parts, and only reads its model_type.
        if text is not config:
            text.architectures = [self.architecture]
            text.tie_word_embeddings = self.has_tied_head
        return text


def text_overrides(folder: Path) -> Any:
    """Returns vLLM's `hf_overrides` for a folder: {} where vLLM reads the folder as Onbeat does."""
    model = empty_model(folder, dtype=torch.float32, device="meta")
    if type(model.config) is type(model_config(folder)):
        return {}
    return TextConfig(architecture=type(model).__name__, has_tied_head=model.config.tie_word_embeddings)
