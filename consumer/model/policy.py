"""The policy: a local Hugging Face causal LM folder, loaded without network, remote code or pickle."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from consumer.model.adapters import Adapters, attach_adapters, base_name, is_adapter_name
from consumer.model.language_head import Teacher, output_head
from consumer.model.published_weights import PublishedWeights
from consumer.model.reached import guard
from consumer.model.rows import local_rows, stored_rows, stored_shape
from consumer.model.shared_prompt.passes import Passes
from contracts.errors import InvalidInput, first_line
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from contracts.spec.trainer import LoraSpec
from onbeat.base.routers import RouteShape, tap_routers
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.base_model.folder_check import check_folder, check_model_files, tokenizer_too_large
from onbeat.weights.base_model.text_model import text_model
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.model_folder import (
    LOADING_ERRORS,
    configure_computation,
    context_tokens,
    load_tokenizer,
    model_config,
    weight_tensors,
)
from onbeat.weights.model_path import find_model, opened_model
from onbeat.weights.publication import TensorSink

log = logging.getLogger(__name__)

FIELD = "model.path"
LoadModel = Callable[[Path, Any, torch.dtype], tuple[PreTrainedModel, dict[str, Any]]]
"""(folder, config, dtype) → the model and transformers' loading info."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The trained model with its tokenizer. Dropout is off: a pass is a function of weights and tokens alone.

    `make_learner` creates it for a rank. Optimizer steps and `load_state_tensors` change its weights; passes, published
    versions and checkpoints read them.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context_tokens: int
    """Upper bound of a prompt and its response together."""
    adapters: Adapters | None = None
    """The adapters in `model` where they alone are trained."""
    critic: PreTrainedModel | None = None
    """The model as the job found it, whose head makes the values of `advantage = "gae"`. No generator loads it: its
    parameters are trained next to the policy's, and a checkpoint has them with the optimizer's state."""
    teacher: Teacher | None = None
    """The reader of a teacher's distributions; None without `algorithm.distillation_beta`."""
    passes: Passes | None = None
    """The layout of its passes, and of those of its critic and its reference, as `choose_passes` chose it for the model
    as it was loaded; None: it is the spec's."""
    end_ids: frozenset[int] = frozenset()
    """The tokens that end the job's completions, where its sampling keeps them from the first ones."""
    out_of_reach: frozenset[str] = frozenset()
    """The names of the parameters, the critic's with `critic.`, that no gradient can reach (reached.py)."""
    route_shape: RouteShape | None = None
    """The numbers of the routes that the model's passes replay; None without `algorithm.routing_replay`."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this: rows of the input embedding."""
        embedding = self.model.get_input_embeddings()
        return cast(nn.Embedding, embedding).num_embeddings

    def with_adapters(self, spec: LoraSpec, *, seed: int) -> Policy:
        """Returns the same model with adapters in it. Raises as `attach_adapters`."""
        return replace(self, adapters=attach_adapters(self.model, spec, seed=seed, out_of_reach=self.out_of_reach))

    def with_taps(self) -> Policy:
        """Returns the same model with a tap at each router. Raises as `tap_routers`."""
        return replace(self, route_shape=tap_routers(self.model).shape)

    def with_critic(self) -> Policy:
        """Returns the same model with a critic: a copy whose head is a row of zeros, so that its first values are 0."""
        critic = copy.deepcopy(self.model)
        weight = output_head(critic).weight
        head = nn.Linear(weight.shape[1], 1, dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            # Zeros, or the first advantages would be those of random values.
            head.weight.zero_()
            head.bias.zero_()
        critic.set_output_embeddings(head)
        # It is the same architecture but for its head, which is reached.
        of_critic = {f"critic.{name}" for name in self.out_of_reach}
        policy = replace(self, critic=critic, out_of_reach=self.out_of_reach | of_critic)
        policy.guard_out_of_reach()
        return policy

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Returns each trained parameter once, by name: a tied head is its embedding. None is out of reach."""
        if self.adapters is not None:
            return self.adapters.parameters()
        # The order of the modules, which is the order of the sums and of the optimizer's groups.
        named = self.model.named_parameters(remove_duplicate=True)
        trained = {name: parameter for name, parameter in named if name not in self.out_of_reach}
        return trained | self.critic_parameters()

    def guard_out_of_reach(self) -> None:
        """Has a gradient of a parameter that is out of reach end a pass by the parameter's name."""
        named = dict(self.model.named_parameters())
        if self.critic is not None:
            named |= {f"critic.{name}": parameter for name, parameter in self.critic.named_parameters()}
        guard((name, parameter) for name, parameter in named.items() if name in self.out_of_reach)

    def critic_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the critic's trained parameters, by `critic.` and their names in it; {} without a critic."""
        if self.critic is None:
            return {}
        named = self.critic.named_parameters(remove_duplicate=True)
        trained = {f"critic.{name}": parameter for name, parameter in named}
        return {name: parameter for name, parameter in trained.items() if name not in self.out_of_reach}

    def embedding_names(self) -> frozenset[str]:
        """Returns the names of trained embeddings, of tokens or positions; a tied head is its embedding."""
        modules = itertools.chain.from_iterable(cast(nn.Module, network).modules() for network in self._networks)
        embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
        return frozenset(name for name, parameter in self.trained_parameters().items() if id(parameter) in embeddings)

    def head_names(self) -> frozenset[str]:
        """Returns the names of the output heads' trained weights; that of a tied head is its embedding's."""
        heads: set[int] = set()
        for network in self._networks:
            head = network.get_output_embeddings()
            if head:
                heads.add(id(head.weight))
        return frozenset(name for name, parameter in self.trained_parameters().items() if id(parameter) in heads)

    @property
    def _networks(self) -> Sequence[PreTrainedModel]:
        if self.critic is None:
            return (self.model,)
        return (self.model, self.critic)

    def weights(self) -> PublishedWeights:
        """Returns the tensors that a generator loads to be this policy (onbeat/weights/model_folder.py)."""
        return PublishedWeights(self.base_tensors(), trained=self.trained_parameters(), adapters=self.adapters)

    def base_tensors(self) -> dict[str, Tensor]:
        """Returns the published tensors without the adapters, under the names of the model as it was."""
        published = weight_tensors(cast(nn.Module, self.model))
        tensors = {base_name(name): tensor.detach() for name, tensor in published if not is_adapter_name(name)}
        if self.adapters is not None and self.adapters.merged_layers is not None:
            tensors |= {f"{layer}.weight": weight for layer, weight in self.adapters.merged_layers.base().items()}
        return tensors

    @functools.cached_property
    def base_digest(self) -> str:
        """The digest of `base_tensors`, which never move where there are adapters.

        Ranks that share them compute it at the same time.
        """
        return tensors_digest(PublishedWeights(self.base_tensors(), trained=()))

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that training moves: `base_tensors`, or the adapters alone."""
        if self.adapters is None:
            return self.base_tensors()
        return {name: parameter.detach() for name, parameter in self.adapters.parameters().items()}

    def adapter_source(self, base: Callable[[TensorSink], None]) -> AdapterSource | None:
        """Returns the source for a publisher of adapters alone; None without adapters.

        Args:
            base: Publishes the base, by `publish_base` on all ranks.
        """
        if self.adapters is None:
            return None
        return AdapterSource(scaling=self.adapters.scaling, matrices=self.state_tensors, base=base)

    def publish_base(self, sink: TensorSink) -> None:
        """Gives a sink each of `base_tensors`. Ranks that share them call it at the same time."""
        base = PublishedWeights(self.base_tensors(), trained=())
        for name, tensor_layout in base.layout.items():
            sink.make_room(tensor_layout.num_bytes)
            sink.add(name, base[name])

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies a full set of `state_tensors` in place; of a sharded tensor it copies this rank's rows.

        Raises InvalidInput where names or shapes differ.
        """
        own = self.state_tensors()
        # ^: names that one side has and the other lacks.
        differing = sorted(own.keys() ^ tensors.keys())
        if differing:
            raise InvalidInput(f"the saved tensors are not this model's: {', '.join(differing[:3])}", field=FIELD)
        for name, target in own.items():
            saved = stored_shape(tensors, name)
            if target.shape != saved:
                problem = f"{name} has shape {saved}, the model {tuple(target.shape)}"
                raise InvalidInput(problem, field=FIELD, cure="resume a run with the model that it was started with")
        with torch.no_grad():
            for name, target in own.items():
                local_rows(target).copy_(stored_rows(tensors, name, like=target))
        self.follow()

    def follow(self) -> None:
        """Brings the weights that passes go through up to the trained parameters, where they are other tensors."""
        if self.adapters is not None and self.adapters.merged_layers is not None:
            self.adapters.merged_layers.merge()

    def reference(self) -> PreTrainedModel:
        """Returns the reference of the KL term, whose passes are made inside `without_adapters`.

        It is a frozen copy of the model as it is now, or the model itself, which without its adapters is as it was.
        """
        if self.adapters is not None:
            return self.model
        reference = copy.deepcopy(self.model)
        reference.requires_grad_(False)
        return reference.eval()

    def beside(self) -> Policy:
        """Returns the same weights in modules and parameters of their own, whose gradients another thread takes.

        A step moves both, since they share the memory. A policy with adapters has none beside it.
        """
        if self.adapters is not None:
            raise AssertionError("the layers of adapters belong to one model")
        critic = self.critic
        if critic is not None:
            critic = with_own_parameters(critic)
        policy = replace(self, model=with_own_parameters(self.model), critic=critic)
        policy.guard_out_of_reach()
        return policy

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Makes the model's passes those of the base inside; changes nothing where there are no adapters."""
        if self.adapters is None:
            return contextlib.nullcontext()
        return self.adapters.disabled()


def with_own_parameters(model: PreTrainedModel) -> PreTrainedModel:
    """Copies the modules of a model and not their tensors: parameters are new ones over the same memory."""
    network = cast(nn.Module, model)
    # deepcopy takes what its memo holds for a thing that it meets; a tied parameter is met twice.
    memo: dict[int, Any] = {id(buffer): buffer for buffer in network.buffers()}
    for parameter in network.parameters():
        # detach() shares the memory: the gradient is the copy's own, the weight is not.
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def load_whole(folder: Path, config: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Reads all of a model; a `LoadModel`."""
    return text_model(config).load(folder, dtype)


def load_policy(
    model: ModelSpec, *, model_root: SpecRoot, gradient_checkpointing: bool, load: LoadModel = load_whole
) -> Policy:
    """Loads the policy of a job from its model's folder.

    Args:
        model: The spec's.
        model_root: The root that the model's path is below.
        gradient_checkpointing: True where the backward pass computes activations again.
        load: Loads a folder: whole, or this rank's rows.

    Raises:
        InvalidInput: Where the folder is missing, is not a causal LM, lacks weights, or has no usable tokenizer; it
            names `model.path`.
    """
    transformers_logging.disable_progress_bar()
    with opened_model(model, model_root) as folder:
        check_folder(folder)
        tokenizer = load_tokenizer(folder)
        config = model_config(folder)
    network = load_model(model, model_root=model_root, gradient_checkpointing=gradient_checkpointing, load=load)
    if text_model(config).is_multi_modal:
        log.warning(
            "%s: `%s` is multi-modal (%s): its text is trained; the rest stays as it is, and goes along in an export",
            FIELD,
            model.path,
            config.model_type,
        )
    policy = Policy(model=network, tokenizer=tokenizer, context_tokens=context_tokens(network.config))
    # A model may have more rows than its tokenizer has ids, for speed; the other way round an id has no row.
    largest = max(tokenizer.get_vocab().values())
    if largest >= policy.vocabulary_size:
        raise tokenizer_too_large(folder, largest, policy.vocabulary_size)
    return policy


def load_model(
    model: ModelSpec, *, model_root: SpecRoot, gradient_checkpointing: bool, load: LoadModel
) -> PreTrainedModel:
    """Loads the policy's model alone. Raises as `load_policy`."""
    folder = find_model(model, model_root)
    check_model_files(folder)
    try:
        with opened_model(model, model_root, weights=True):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if gradient_checkpointing:
                _clear_dropout(config.get_text_config())
            network, loading = load(folder, config, getattr(torch, model.dtype))
    except LOADING_ERRORS as error:
        raise InvalidInput(
            f"`{folder}` does not load as a causal LM: {first_line(error)}",
            field=FIELD,
            cure="it needs config.json of a causal LM and safetensors",
        ) from error
    _check_loading(folder, loading)
    configure_computation(network, model)
    network.eval()
    if gradient_checkpointing:
        checkpoint_activations(network)
    return network


def _check_loading(folder: Path, loading: Mapping[str, Any]) -> None:
    """Refuses a model whose tensors weren't all in the files: transformers fills them with random numbers, and only
    logs it.
    """
    # Of each its name and two shapes, which the log has: here a rank may have a part of a tensor's rows.
    mismatched = sorted(name for name, *_ in loading["mismatched_keys"])
    if mismatched:
        raise InvalidInput(
            f"config.json of `{folder}` doesn't fit its safetensors: {len(mismatched)} tensors have other shapes there "
            f"than it says, e.g. {mismatched[0]}",
            field=FIELD,
            cure="take both from the same model",
        )
    absent = sorted(loading["missing_keys"])
    if absent:
        raise InvalidInput(
            f"the safetensors of `{folder}` lack {len(absent)} tensors of the model, e.g. {absent[0]}",
            field=FIELD,
            cure="save the whole model with save_pretrained",
        )


def _clear_dropout(config: Any) -> None:
    """Sets each dropout of a config to 0.0: a layer in training mode would apply its own (`checkpoint_activations`)."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Has activations recomputed: transformers does so only in layers in training mode; their children stay in eval."""
    if not model.supports_gradient_checkpointing:
        raise InvalidInput(
            f"{type(model).__name__} cannot recompute activations",
            field="trainer.gradient_checkpointing",
            cure="turn it off",
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # This module alone: train() would reach its children, and their dropout.
            module.training = True
