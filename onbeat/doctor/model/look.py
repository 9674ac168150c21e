"""The answers about a model's folder, in the order in which a job would meet them.

files ─▶ shapes, without memory ─▶ trials, on the loaded model or on a small twin ─▶ doors: shards, export, vLLM
                                                                                 └▶ bytes that a rank needs

Of a folder without weights, as of a model that is yet to be made or fetched, config.json alone gives the shapes. Then
nothing is tried, and all that follows from the shapes is answered.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import nn

from consumer.gradient.optimizer import groups_of
from consumer.model.adapters import chosen_layers, left_frozen
from consumer.ranks.fsdp.sharded_loading import check_dtypes, check_rows, sharded_layers
from contracts.engines import Engine
from contracts.errors import InvalidInput, first_line, kind_and_text
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.trainer import LoraSpec
from onbeat.base.process.host_memory import CONTROL_GROUP, left_bytes
from onbeat.doctor.finding import Finding, bad, in_bytes, ok, refused, warn
from onbeat.doctor.model.alternatives import alternatives
from onbeat.doctor.model.job import job_in_words, num_ranks
from onbeat.doctor.model.memory import ModelSizes, adapter_items, memory_of
from onbeat.doctor.model.report import QUESTIONS, Memory, ModelReport
from onbeat.doctor.model.shape import Shape, missing_tensors, shape_of, sizes_of
from onbeat.doctor.model.trials import Trials
from onbeat.doctor.model.twin import MOST_ITEMS, Twin, same_kind, twin_of
from onbeat.export.export import exported_names
from onbeat.weights.adapter.matrices import matrix_names
from onbeat.weights.base_model.checkpoint_names import names_of_family
from onbeat.weights.base_model.folder_check import check_config, check_folder, has_weights
from onbeat.weights.base_model.text_model import untrained_tensors
from onbeat.weights.layout import total_bytes
from onbeat.weights.model_folder import LOADING_ERRORS, context_tokens, load_tokenizer, model_config
from onbeat.weights.model_path import find_model
from producer.engine.vllm.text_config import text_overrides

MOST_LOADED_BYTES = 2 * 2**30
"""A model with more isn't loaded unless that is asked for: to read it takes longer than ten seconds."""
FREE_SHARE = 4
"""A model is loaded by itself only where so many of it would fit into the free memory."""
MOST_NAMED = 2
"""Tensors that a line names."""
OWN_WEIGHTS = "the folder's own weights"


def look(spec: JobSpec, settings: StackSettings, engine: Engine, *, load: bool | None = None) -> ModelReport:
    """Answers for a job's model. Nothing is written, and no weight is read where the model isn't loaded.

    Args:
        spec: The job.
        settings: The stack's; its model root is that of the job.
        engine: The engine of its generators.
        load: True loads the model, False tries a small twin of it; None decides by its size.
    """
    job = job_in_words(spec)
    folder = Path(spec.model.path)
    try:
        folder = find_model(spec.model, settings.spec_root)
        # A person who asks for it to be loaded takes it to be there.
        is_to_come = not load and not has_weights(folder)
        if is_to_come:
            check_config(folder)
        else:
            check_folder(folder)
        shape = shape_of(folder, getattr(torch, spec.model.dtype))
    except InvalidInput as error:
        return ModelReport(folder=str(folder), job=job, findings=(refused("files", error),))
    except LOADING_ERRORS as error:
        problem = f"transformers makes no model of its config.json: {first_line(error)}"
        return ModelReport(
            folder=str(folder), job=job, findings=(bad("files", problem, "docs/models.md lists models"),)
        )
    if is_to_come:
        tried = UNTRIED
    else:
        is_loaded = _is_small(shape) if load is None else load
        tried = _tried(shape, spec, settings, engine, is_loaded=is_loaded)
    lora = spec.trainer.lora
    findings = [
        *_of_job(shape, spec),
        *_of_optimizer(shape, tried, spec),
        _of_files(shape, is_to_come=is_to_come),
        *tried.findings,
        *_of_shards(shape, spec),
        # An export takes the names of the folder's own tensors.
        *([] if is_to_come else _of_export(shape)),
        *_of_vllm(shape),
    ]
    num_adapted, adapts = _adapted(shape, tried, lora)
    findings += adapts
    memory: Memory | None = None
    num_trained = 0
    sizes = _sizes(shape, tried, lora)
    if sizes is not None:
        memory = memory_of(sizes, spec, device=settings.device)
        findings.append(_of_memory(memory, spec))
        num_trained = sum(parameter.num_items for parameter in sizes.trained())
        if lora is not None:
            num_trained = adapter_items(sizes, lora.rank)
    return ModelReport(
        folder=str(folder),
        job=job,
        architecture=type(shape.model).__name__,
        num_parameters=shape.num_parameters,
        num_trained=num_trained,
        tried_on=tried.tried_on,
        packing=tried.packing,
        out_of_reach=tried.out_of_reach,
        num_adapted=num_adapted,
        num_exported_tensors=0 if is_to_come else _num_exported(shape),
        findings=tuple(sorted(findings, key=lambda finding: QUESTIONS.index(finding.subject))),
        kept_bytes=0 if memory is None else memory.kept_bytes,
        peak_bytes=0 if memory is None else memory.peak_bytes,
        memory=memory,
        alternatives=tuple(alternatives(spec, partial(_sizes, shape, tried), device=settings.device)),
    )


def _is_small(shape: Shape) -> bool:
    return total_bytes(shape.layout) <= min(MOST_LOADED_BYTES, free_bytes() / FREE_SHARE)


def free_bytes() -> float:
    """Returns the memory that this process may still take."""
    return min(psutil.virtual_memory().available, left_bytes(CONTROL_GROUP))


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """The outcome of the trials. `_tried` creates it."""

    findings: Sequence[Finding]
    tried_on: str
    packing: str
    out_of_reach: tuple[str, ...]
    """Names in the folder's model, also where a twin was tried."""
    takes_adapters: bool


UNTRIED = _Tried(findings=(), tried_on="", packing="", out_of_reach=(), takes_adapters=False)
"""The outcome where there is nothing to try."""


def _tried(shape: Shape, spec: JobSpec, settings: StackSettings, engine: Engine, *, is_loaded: bool) -> _Tried:
    twin: Twin | None = None
    findings: list[Finding] = []
    tried_on = OWN_WEIGHTS
    if not is_loaded:
        findings += _of_names(shape)
        twin, tried_on = _twin(shape)
    trials = Trials(spec=spec, settings=settings, engine=engine, twin=twin)
    if not is_loaded and twin is None:
        findings.append(warn("trains", f"was not tried: {tried_on}", "--load loads the model, where it has the memory"))
        return replace(UNTRIED, findings=findings)
    trials.make()
    unreached: list[str] = []
    if trials.unreached is not None:
        reached = trials.parameters - trials.unreached
        unreached = [name for name, _ in cast(nn.Module, shape.model).named_parameters() if name in trials.unreached]
        if twin is not None:
            names = [name for name, _ in cast(nn.Module, shape.model).named_parameters()]
            unreached = same_kind(names, twins=trials.unreached, reached_twins=reached)
        findings.append(_of_reach(shape, unreached))
    if is_loaded and trials.parameters:
        findings.append(ok("loads", f"all {len(shape.layout)} tensors are there; its own weights were tried"))
    elif trials.parameters:
        findings.append(ok("loads", f"its weights weren't read; the trials were made on {tried_on}"))
    findings += trials.findings
    return _Tried(
        findings=findings,
        tried_on=tried_on,
        packing=trials.packing,
        out_of_reach=tuple(unreached),
        takes_adapters=trials.takes_adapters,
    )


def _twin(shape: Shape) -> tuple[Twin | None, str]:
    """Returns a twin and what it has of the model, or None and the reason why there is none."""
    try:
        twin = twin_of(model_config(shape.folder))
        num_parameters = twin.num_parameters()
    except Exception as error:
        # A config may tie its keys to one another in any way.
        return None, f"no small twin of it can be made ({kind_and_text(error)})"
    if num_parameters > MOST_ITEMS:
        return None, f"its small twin of {num_parameters:,} parameters would take too long"
    if num_parameters * shape.model.dtype.itemsize > free_bytes() / FREE_SHARE:
        return None, f"there is too little free memory for its small twin of {num_parameters:,} parameters"
    return twin, twin.says


def _of_files(shape: Shape, *, is_to_come: bool) -> Finding:
    """Says what the model is. is_to_come: the folder has no weights."""
    name = type(shape.model).__name__
    says = f"{name}, {shape.num_parameters:,} parameters in {len(shape.layout)} tensors"
    if shape.chosen.is_multi_modal:
        says += "; of a multi-modal folder the text is trained"
    if is_to_come:
        return warn(
            "files",
            f"{says}, by config.json alone: the folder has no weights yet, so nothing is tried",
            "a job needs its *.safetensors and its tokenizer's files there, as save_pretrained writes them",
        )
    return ok("files", says)


def _of_names(shape: Shape) -> list[Finding]:
    """Compares the names in the files' heads with the model's, and loads the tokenizer."""
    try:
        load_tokenizer(shape.folder)
        missing = missing_tensors(shape)
    except InvalidInput as error:
        return [refused("loads", error)]
    if not missing:
        return []
    problem = f"the safetensors lack {len(missing)} tensors of the model, e.g. {missing[0]}"
    return [bad("loads", problem, "save the whole model with save_pretrained")]


def _of_job(shape: Shape, spec: JobSpec) -> list[Finding]:
    """Returns what of the job's sampling the model can't do."""
    findings: list[Finding] = []
    embedding: Any = shape.model.get_input_embeddings()
    unknown = spec.rollout.sampling.unknown_token(embedding.num_embeddings)
    if unknown is not None:
        key, problem = unknown
        findings.append(bad("job", f"rollout.sampling.{key}: {problem}", "name tokens of the model's own"))
    field, longest = spec.longest_completion()
    context = context_tokens(shape.model.config)
    if longest >= context:
        problem = f"{field}: {longest} tokens and a prompt don't fit into the model's context of {context}"
        findings.append(bad("job", problem, "lower it, or choose a model with a longer context"))
    return findings


def _of_optimizer(shape: Shape, tried: _Tried, spec: JobSpec) -> list[Finding]:
    """Returns what of the job's optimizer can't be had for the parameters that are trained."""
    if spec.optimizer.type == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        return [bad("job", "optimizer.type: bitsandbytes is not installed", 'pip install "onbeat[adamw8bit]"')]
    lora = spec.trainer.lora
    named = dict(cast(nn.Module, shape.model).named_parameters())
    trained = {name: parameter for name, parameter in named.items() if name not in tried.out_of_reach}
    try:
        if lora is not None:
            layers: dict[str, Any] = dict(chosen_layers(shape.model, lora, tried.out_of_reach))
            trained = {matrix: layer.weight for name, layer in layers.items() for matrix in matrix_names(name)}
        groups_of(trained, spec.optimizer, embeddings=(), critic=())
    except InvalidInput as error:
        # What is wrong with the adapters is a finding of theirs.
        return [refused("job", error)] if (error.field or "").startswith("optimizer") else []
    return []


def _of_reach(shape: Shape, unreached: Sequence[str]) -> Finding:
    if not unreached:
        return ok("trains", "a gradient reaches each tensor")
    parameters = dict(cast(nn.Module, shape.model).named_parameters())
    num_items = sum(parameters[name].numel() for name in unreached)
    named = ", ".join(unreached[:MOST_NAMED])
    if len(unreached) > MOST_NAMED:
        named += ", …"
    return ok("trains", f"no gradient reaches {len(unreached)} tensors ({num_items:,} parameters), which stay: {named}")


def _of_shards(shape: Shape, spec: JobSpec) -> list[Finding]:
    try:
        sharded_layers(shape.model)
        check_rows(shape.model, shape.chosen.conversions(shape.model))
        check_dtypes(shape.model)
    except InvalidInput as error:
        finding = refused("shards", error)
        if spec.trainer.sharding == "none":
            finding = warn("shards", finding.says, "ranks with a copy each train it")
        return [finding]
    return [ok("shards", 'ranks can share it by rows (trainer.sharding = "fsdp")')]


def _of_export(shape: Shape) -> list[Finding]:
    try:
        names = exported_names(shape.folder, shape.layout)
        num_towers = len(untrained_tensors(shape.folder, model_config(shape.folder)))
    except InvalidInput as error:
        return [refused("exports", error)]
    says = f"{len(names.layout)} tensors by the folder's own names"
    if not names.are_those_of_versions:
        says += f", converted from the {len(shape.layout)} of a version"
    if num_towers:
        says += f"; {num_towers} tensors of pictures or sound go along unchanged"
    return [ok("exports", says)]


def _num_exported(shape: Shape) -> int:
    try:
        towers = untrained_tensors(shape.folder, model_config(shape.folder))
        return len(exported_names(shape.folder, shape.layout).layout) + len(towers)
    except InvalidInput:
        return 0


def _of_vllm(shape: Shape) -> list[Finding]:
    overrides: Any = text_overrides(shape.folder)
    names = names_of_family(shape.model, shape.layout)
    says = f"is asked for {type(shape.model).__name__}"
    if overrides:
        says += ", with the config of the text"
    says += f", and loads {len(names.layout)} tensors by the names of the family; vLLM itself wasn't started"
    return [ok("vLLM", says)]


def _adapted(shape: Shape, tried: _Tried, lora: LoraSpec | None) -> tuple[int, list[Finding]]:
    """Returns the parameters of the job's adapters, or of those by default, and what they leave frozen."""
    wanted = lora or LoraSpec()
    try:
        chosen = chosen_layers(shape.model, wanted, tried.out_of_reach)
    except InvalidInput as error:
        has_finding = any(finding.subject == "adapts" for finding in tried.findings)
        finding = refused("adapts", error)
        if lora is None:
            finding = warn("adapts", finding.says, "train the model whole")
        return 0, [] if has_finding else [finding]
    layers: list[Any] = list(chosen.values())
    num_items = sum(wanted.rank * (layer.in_features + layer.out_features) for layer in layers)
    if any(finding.subject == "adapts" for finding in tried.findings):
        return num_items, []
    says = f"{len(layers)} layers take adapters, of {num_items:,} parameters at rank {wanted.rank}"
    frozen = left_frozen(shape.model, chosen)
    if frozen:
        says += f"; {frozen}"
    if not tried.takes_adapters:
        says += "; it was not tried"
    return num_items, [ok("adapts", says)]


def _sizes(shape: Shape, tried: _Tried, lora: LoraSpec | None) -> ModelSizes | None:
    try:
        return sizes_of(shape, out_of_reach=tried.out_of_reach, lora=lora)
    except InvalidInput:
        # Its adapters are refused, and a finding says so.
        return None


def _of_memory(memory: Memory, spec: JobSpec) -> Finding:
    ranks = "the trainer" if num_ranks(spec) == 1 else f"each of {num_ranks(spec)} ranks"
    says = f"{ranks} keeps {in_bytes(memory.kept_bytes)}, and needs about {in_bytes(memory.peak_bytes)} at its peak"
    free = free_bytes()
    is_here = spec.trainer.over_hosts is None
    if is_here and memory.peak_bytes * num_ranks(spec) > free:
        cures = [f"take a machine with more than the {in_bytes(free)} that are free here"]
        if spec.trainer.lora is None:
            cures.append("set trainer.lora.rank = 16")
        if spec.trainer.sharding == "none":
            cures.append('share it among ranks by trainer.sharding = "fsdp"')
        return warn("memory", says, ", or ".join(cures))
    return ok("memory", says)
