"""A model folder gives the config and the end-of-sequence tokens, and a model the set of tensors that versions hold.

Neither weights nor code are read from the folder here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from contracts.errors import InvalidInput, first_line
from contracts.spec.job import ModelSpec
from onbeat.base.kernels import use_onednn
from onbeat.weights.base_model.text_model import text_model
from onbeat.weights.model_path import FIELD, check_tokenizer_files

LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
"""transformers raises these for a folder that it cannot read; it has no exception of its own."""
UNLIMITED_CONTEXT_TOKENS = 2**31 - 1
"""Context of an architecture without a position limit (ALiBi, state-space models)."""


def model_config(folder: Path) -> PreTrainedConfig:
    """Reads config.json.

    Raises:
        InvalidInput: It isn't a configuration that transformers itself implements; the error names model.path.
    """
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"{folder} is not a causal language model: {error}", field=FIELD) from error


def context_tokens(config: PreTrainedConfig) -> int:
    """Returns the longest sequence of an architecture; UNLIMITED_CONTEXT_TOKENS without a limit of positions."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or UNLIMITED_CONTEXT_TOKENS


def load_tokenizer(folder: Path, *, needs_end: bool = True) -> PreTrainedTokenizerBase:
    """Loads the tokenizer.

    Args:
        folder: The model's folder.
        needs_end: True where it must have an end-of-sequence token.

    Raises:
        InvalidInput: There is no tokenizer, or none that ends a text; the error names model.path.
    """
    check_tokenizer_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except LOADING_ERRORS as error:
        raise InvalidInput(
            f"the tokenizer of `{folder}` does not load: {first_line(error)}",
            field=FIELD,
            cure="save one that transformers has itself into the folder, by tokenizer.save_pretrained",
        ) from error
    if needs_end and tokenizer.eos_token_id is None:
        raise InvalidInput(
            f"the tokenizer of `{folder}` has no end-of-sequence token",
            field=FIELD,
            cure="set eos_token in tokenizer_config.json",
        )
    return tokenizer


def empty_model(folder: Path, *, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Makes the text model of config.json with uninitialised weights: a strict load fills every one of them.

    Args:
        folder: The model's folder.
        dtype: The weights' dtype.
        device: The weights' device; on "meta" they take no memory, and say which tensors a version of the model has.

    Raises:
        InvalidInput: The folder isn't a causal LM that transformers itself implements; the error names model.path.
    """
    config = model_config(folder)
    try:
        with torch.device(device):
            model = text_model(config).empty(dtype)
    except (ValueError, KeyError) as error:
        raise InvalidInput(f"{folder} is not a causal language model: {error}", field=FIELD) from error
    model.tie_weights()
    return model.eval().requires_grad_(False)


class Float32Head(nn.Linear):
    """An output head that is computed in float32, from weights of any dtype. Ranks, adapters and versions hold the same
    tensors as of a plain linear layer.

    MiniMax-M1 (arXiv 2506.13585) and ScaleRL (arXiv 2510.13786) have found most of the gap between engines there.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def cast_head(model: PreTrainedModel) -> PreTrainedModel:
    """Has a model compute logits in float32, and returns it. Raises InvalidInput for a head that is more than a
    product.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise InvalidInput(
            f"{type(model).__name__} has no plain output head", field="model.cast_lm_head_to_fp32", cure="leave it out"
        )
    head.__class__ = Float32Head
    return model


def configure_computation(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Sets a model up to compute as its job's spec says: the head's dtype, and the library of its products.

    Raises what `cast_head` raises.
    """
    if spec.cast_lm_head_to_fp32:
        cast_head(model)
    if spec.is_by_onednn:
        use_onednn(model)


def weight_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the published tensors, on which every digest of a version rests, in the order in which they are published.

    Each parameter comes once, a tied one under its first name, and then the buffers that `state_dict` saves: a buffer
    that the architecture computes itself, as the frequencies of a rotary embedding, is in no version.
    """
    yield from model.named_parameters(remove_duplicate=True)
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers(remove_duplicate=True):
        if name in persistent:
            yield name, buffer


def end_of_sequence_ids(
    folder: Path, config: PreTrainedConfig, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> frozenset[int]:
    """Returns the ids that end a completion: those of generation_config.json (else config.json), and the tokenizer's
    own.

    Chat models end a turn with the tokenizer's token, which their generation_config may leave out.

    Args:
        folder: The model's folder.
        config: The model's configuration.
        tokenizer: The folder's tokenizer, where it is loaded already.

    Raises:
        InvalidInput: There is no such id; the error names model.path.
    """
    tokenizer = tokenizer or load_tokenizer(folder, needs_end=False)
    if (folder / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        # A multi-modal config has it with its text.
        declared = getattr(config, "eos_token_id", None) or getattr(config.get_text_config(), "eos_token_id", None)
    end_ids = set(declared) if isinstance(declared, list) else {declared}
    end_ids.add(tokenizer.eos_token_id)
    ids = frozenset(token for token in end_ids if token is not None)
    if not ids:
        raise InvalidInput(
            f"{folder} has no end-of-sequence token",
            field=FIELD,
            cure="set eos_token_id in generation_config.json, or eos_token in tokenizer_config.json",
        )
    return ids


def text_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Returns what makes text of tokens, without special ones, as rewards see it."""
    # Cleaning up spaces would change what is scored: "1 ." is not "1.".
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
