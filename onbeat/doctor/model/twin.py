"""A small twin of a model that isn't loaded: the same class with a few of its layers, and random weights.

    config.json ─▶ the first layers, one of each kind ─▶ few experts, a small vocabulary, narrow MLPs ─▶ random weights

A trainer's trials tell of an architecture and not of weights: which layers a class has, what its attention and its
cache take, which parameters a graph leads to. The width of heads and of hidden states is the model's own. What depends
on all its shapes, as whether a row's bits are its own, isn't asked of a twin.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from onbeat.weights.base_model.text_model import text_model

MOST_VOCABULARY = 512
MOST_INNER = 64
"""Width of an MLP, or of an expert."""
FEWEST_EXPERTS = 8
FEWEST_LAYERS = 2
MOST_ITEMS = 1_000_000_000
"""Parameters of the largest twin: random numbers for more take too long."""
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
FIRST_LAYERS = ("first_k_dense_replace", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_start_index")
"""Keys by which configs say from which layer on, or how often, there are experts."""
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
VECTORS = 32
"""A width of an MLP keeps its rest by it, which decides about `as_sampled`."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The config of a twin. `twin_of` creates it."""

    config: PreTrainedConfig
    says: str
    """The parts of the model that it has, in words."""

    def make(self, dtype: torch.dtype) -> PreTrainedModel:
        """Makes the twin with random weights, the same at each call."""
        chosen = text_model(self.config)
        # Towers are taken out before anything has memory.
        with torch.device("meta"):
            model = chosen.empty(dtype)
        cast(nn.Module, model).to_empty(device="cpu")
        model.tie_weights()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.initialize_weights()
        return model

    def num_parameters(self) -> int:
        """Counts its parameters, before it has memory."""
        with torch.device("meta"):
            model = text_model(self.config).empty(torch.float32)
        return sum(parameter.numel() for parameter in cast(nn.Module, model).parameters())


def twin_of(config: PreTrainedConfig) -> Twin:
    """Makes the config of a small twin. The given one is left as it is.

    Args:
        config: That of a folder; of a multi-modal one its text is made small.
    """
    config = copy.deepcopy(config)
    text: Any = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    num_kept = _num_layers(text)
    lists = _lists_by_layer(text)
    for key, values in lists.items():
        setattr(text, key, type(values)(values[:num_kept]))
    if "layers_block_type" not in lists:
        text.num_hidden_layers = num_kept
    says = [f"{num_kept} of {num_layers} layers"]
    num_experts = _few_experts(text)
    if num_experts:
        says.append(f"{num_experts} experts")
    for key in list(vars(text)):
        if key.startswith("vocab_size") and isinstance(vars(text)[key], int):
            setattr(text, key, min(vars(text)[key], MOST_VOCABULARY))
        if "intermediate_size" in key and isinstance(vars(text)[key], int):
            setattr(text, key, _narrow(vars(text)[key]))
    for key in SPECIAL_TOKENS:
        # An id above the vocabulary has no row.
        setattr(text, key, None)
    says.append(f"a vocabulary of {text.vocab_size}")
    return Twin(config=config, says=f"a twin with random weights: {', '.join(says)}, narrow MLPs")


def same_kind(names: Iterable[str], *, twins: Collection[str], reached_twins: Collection[str]) -> list[str]:
    """Returns the names of a model's parameters whose like in a twin is out of reach.

    Args:
        names: The model's parameters.
        twins: The twin's parameters that are out of reach.
        reached_twins: The others of the twin: a kind of which one is reached counts as reached.
    """
    kinds = {_kind(name) for name in twins} - {_kind(name) for name in reached_twins}
    return [name for name in names if _kind(name) in kinds]


def _kind(name: str) -> str:
    """Returns a name with each of its numbers as a star."""
    return NUMBER.sub("*", name)


def _narrow(width: int) -> int:
    if width <= MOST_INNER:
        return width
    return MOST_INNER + width % VECTORS


def _lists_by_layer(text: Any) -> dict[str, Any]:
    """Returns the keys of a config that say something of each layer."""
    num_layers = text.num_hidden_layers
    return {
        key: value for key, value in vars(text).items() if isinstance(value, list | tuple) and len(value) == num_layers
    }


def _num_layers(text: Any) -> int:
    """Returns how many of the first layers have one of each kind."""
    num_kept = FEWEST_LAYERS
    for values in _lists_by_layer(text).values():
        firsts = [position for position, value in enumerate(values) if value not in values[:position]]
        num_kept = max(num_kept, firsts[-1] + 1)
    for key in FIRST_LAYERS:
        number = getattr(text, key, None)
        if isinstance(number, int):
            # The first layer with experts is the one behind so many, or the last of so many.
            num_kept = max(num_kept, number + 1)
    return min(num_kept, text.num_hidden_layers)


def _few_experts(text: Any) -> int:
    """Leaves a config as few experts as its router can choose from; returns their number, 0 for none."""
    num_chosen = next((getattr(text, key) for key in CHOSEN_EXPERTS if getattr(text, key, None)), 1)
    # A group of experts has two at least: routers score a group by its best two.
    num_groups = getattr(text, "n_group", None) or 1
    fewest = max(FEWEST_EXPERTS, 2 * num_chosen, 2 * num_groups)
    # Each group has as many experts as the next.
    fewest = -(-fewest // num_groups) * num_groups
    num_experts = 0
    for key in NUMBERS_OF_EXPERTS:
        number = getattr(text, key, None)
        if isinstance(number, int) and number > 0:
            num_experts = min(number, fewest)
            setattr(text, key, num_experts)
    return num_experts
