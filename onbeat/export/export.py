"""The trained model as a folder that Hugging Face's libraries load: complete and verified, or not there at all.

    kept_versions.py ─▶ tensors = the version's digest? ─▶ the folder's names ─▶ .DIR.hidden/model.safetensors ─▶ DIR/
    the job's model folder ─▶ names, config.json, tokenizer, generation config ─────┘     hashed again = as written?

Tensors have the names that the job's model folder has for them, so that whatever loaded that folder loads the export.
The towers of a multi-modal folder, which no job trains, are copied from it as they are.
With `--adapters`, adapter_model.safetensors and adapter_config.json as peft has them; what they make of their base has
the version's digest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from contracts.encoding.json_lines import json_lines
from contracts.errors import ContractViolation, InvalidInput, NotFound, OnbeatError, first_line
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.audit.weights import CountBytes, FileProgress, digest_of
from onbeat.data.named_files import check_model
from onbeat.export.exported import Exported
from onbeat.export.kept_versions import KeptVersion, Weights, kept_versions, read_version
from onbeat.export.target import check_target
from onbeat.weights.adapter.matrices import A_END, PREFIX
from onbeat.weights.base_model.checkpoint_names import CheckpointNames, names_of_folder
from onbeat.weights.base_model.text_model import text_model, untrained_tensors
from onbeat.weights.files.stored_tensors import StoredTensors
from onbeat.weights.files.tensor_folder import ScratchFolder
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.layout import Layout, TensorLayout, layout_of, published_dtype, split_into_shards, total_bytes
from onbeat.weights.model_folder import empty_model, model_config
from onbeat.weights.model_path import FIELD

SHARD_BYTES = 2 * 1024**3
"""A larger model has several files, and an index; so much of it is in memory."""
BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "chat_template.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"),
)
"""The files of a model folder that are copied: no code, and no weights."""
PROVENANCE = "onbeat.json"
SMALL_FILES_BYTES = 32 * 1024**2
"""Room for tokenizer, configs and the heads of weight files."""


def export(
    folder: RunFolder,
    spec: JobSpec,
    target: Path,
    *,
    model_folder: Path,
    versions: Mapping[int, str] | None,
    version: int | None = None,
    best: bool = False,
    adapters: bool = False,
    progress: FileProgress | None = None,
) -> Exported:
    """Exports a version of a run's model to a folder.

    Args:
        folder: The run folder.
        spec: The job.
        target: The folder that is written; it isn't there yet, or is empty.
        model_folder: The folder of the job's model, for its configuration and tokenizer.
        versions: Version → digest by the audit chain, as `kept_versions` takes it.
        version: The version; None takes the newest, or with `best` the version of the best sampled held-out score.
        best: True takes the best version.
        adapters: True writes the adapters without their base.
        progress: Counts the bytes of weights twice: as they are written, and as they are read again.

    Returns:
        The record of the export, which stands in the folder, too.

    Raises:
        OnbeatError: The disk has no room.
        InvalidInput: The target isn't empty, the job has no adapters, or the model's folder isn't as the job was
            accepted with it.
        NotFound: The version or the model isn't there.
        ContractViolation: A file is damaged; WeightsRejected for adapters that don't fit their base.
    """
    if best and version is not None:
        raise InvalidInput("it names another version than --best may", field="--version", cure="leave one of them out")
    check_target(target)
    config = _config(model_folder)
    _check_model(model_folder, spec)
    there = kept_versions(folder, versions)
    chosen = _choose(there, _best_of(there, folder) if best else version, folder)
    weights = read_version(chosen, folder, spec, model_folder=model_folder)
    if adapters and not weights.matrices:
        raise InvalidInput(
            f"{folder.relative(chosen.path)} holds no adapters", field="--adapters", cure="leave it out for the model"
        )
    scratch = ScratchFolder(target)
    try:
        scratch.create()
        with scratch.errors():
            if adapters:
                files_digest = _write_adapters(scratch.path, weights, chosen, spec, model_folder, progress)
                _copy_beside(model_folder, scratch.path, without=("config.json", "generation_config.json"))
            else:
                files_digest = _write_model(scratch.path, weights, chosen, model_folder, progress)
                _copy_beside(model_folder, scratch.path, without=("config.json",))
                _write_json(scratch.path / "config.json", config | {"dtype": spec.model.dtype})
            exported = Exported(
                job_id=folder.job_id,
                directory=str(target),
                policy_version=chosen.policy_version,
                weights_digest=chosen.weights_digest,
                files_digest=files_digest,
                adapters_digest=files_digest if adapters else "",
                base=str(model_folder),
                source=folder.relative(chosen.path),
                files=tuple(sorted({*(path.name for path in scratch.path.iterdir()), PROVENANCE})),
            )
            _write_json(scratch.path / PROVENANCE, _provenance(exported, spec))
        # Also after the copies were made of it.
        _check_model(model_folder, spec)
        scratch.put_in_empty_place()
    finally:
        scratch.remove()
    return exported


def _best_of(choices: list[KeptVersion], folder: RunFolder) -> int:
    """Returns the version that a trainer would call the best of these: of equal scores the oldest."""
    versions = {version.policy_version for version in choices}
    lines = (score for _, score in json_lines(folder.evaluations, EvaluationScore))
    scores = {score.policy_version: score.sampled for score in lines if score.policy_version in versions}
    scored = sorted(scores)
    if not scored:
        problem = f"no version of {folder.job_id} that is kept has a held-out score"
        raise NotFound(problem, field="--best", cure="leave it out for the newest, or name one by --version")
    return max(scored, key=lambda version: scores[version])


def _choose(choices: list[KeptVersion], version: int | None, folder: RunFolder) -> KeptVersion:
    numbers = sorted({choice.policy_version for choice in choices})
    wanted = version
    if wanted is None and numbers:
        wanted = numbers[-1]
    matching = [choice for choice in choices if choice.policy_version == wanted]
    if not matching:
        cure = "none is kept there"
        if numbers:
            cure = f"kept are {', '.join(map(str, numbers))}"
        missing = "no version" if version is None else f"no version {version}"
        raise NotFound(f"there is {missing} of {folder.job_id} in {folder.path}", field="--version", cure=cure)
    return matching[-1]


def _config(model_folder: Path) -> dict[str, Any]:
    path = model_folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise NotFound(
            f"the job's model has no config.json that can be read: {error}",
            field=str(model_folder),
            cure="give the folder that its relative path starts at by --model-root",
        ) from error
    if not isinstance(config, dict):
        raise ContractViolation("is no object", field=str(path))
    config.pop("torch_dtype", None)
    return config


def _check_model(model_folder: Path, spec: JobSpec) -> None:
    """Raises InvalidInput that names a file, weights apart, which isn't the one that the job was accepted with."""
    try:
        check_model(model_folder, spec.model.path, spec.model.file_digests, field=FIELD, weights=False)
    except InvalidInput as error:
        cure = "put it back, or give by --model-root where the folder is as it was"
        raise InvalidInput(error.problem, field=FIELD, cure=cure) from error


def _check_space(scratch: Path, layout: Layout) -> None:
    """Raises OnbeatError where the disk has too little room for the tensors: an export would fill it, and then fail."""
    needed = total_bytes(layout) + SMALL_FILES_BYTES
    free = shutil.disk_usage(scratch).free
    if free < needed:
        raise OnbeatError(
            f"has {free} bytes free, and the export takes {needed}",
            field=str(scratch.parent),
            cure="free space there, or export to another disk",
        )


def _write_model(
    scratch: Path, weights: Weights, version: KeptVersion, model_folder: Path, progress: FileProgress | None
) -> str:
    """Writes the weights in one file, or in several with an index, as from_pretrained looks for them.

    Returns:
        The digest of the files' tensors, by their names there.

    Raises:
        ContractViolation: The weights don't have the version's digest, or were not written as they are.
    """
    names = exported_names(model_folder, layout_of(weights.tensors))
    towers = untrained_tensors(model_folder, model_config(model_folder))
    stored = StoredTensors(sorted(set(towers.values())))
    is_as_published = names.are_those_of_versions and not towers
    tensors = weights.tensors
    expected = version.weights_digest
    if not is_as_published:
        _check_digest(tensors_digest(weights.tensors), version)
        # The towers of a multi-modal folder go along as they are, each read when its file is written.
        tensors = ChosenTensors(names.converted(weights.tensors), dict.fromkeys(towers, stored))
        expected = tensors_digest(tensors)
    layout = {**names.layout, **stored_layout(stored, towers)}
    _check_space(scratch, layout)
    shards = split_into_shards(layout, shard_bytes=SHARD_BYTES)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total_bytes(layout)}, "weight_map": weight_map}
        _write_json(scratch / "model.safetensors.index.json", index)
    if progress is not None:
        progress.expect(files=len(files), num_bytes=2 * total_bytes(layout))
    for file, shard in zip(files, shards, strict=True):
        _save({name: tensors[name].contiguous() for name in shard}, scratch / file)
        if progress is not None:
            progress.add(files=1, num_bytes=total_bytes(shard))
    digest = digest_of([scratch / file for file in files], count=_counter(progress))
    if is_as_published:
        _check_digest(digest, version)
    elif digest != expected:
        raise ContractViolation(
            "has other bytes than were written to it",
            field=str(scratch),
            cure="export again; if the error remains, check the disk",
        )
    return digest


class ChosenTensors(Mapping[str, Tensor]):
    """Tensors of one mapping, and of others by name. `_write_model` creates it; nothing is read before it is asked."""

    def __init__(self, tensors: Mapping[str, Tensor], others: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._tensors = tensors
        self._others = others

    def __getitem__(self, name: str) -> Tensor:
        return self._others.get(name, self._tensors)[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._others

    def __len__(self) -> int:
        return len(self._tensors) + len(self._others)


def stored_layout(stored: StoredTensors, names: Iterable[str]) -> Layout:
    """Returns the layout of some stored tensors, of which none is read whole."""
    return {
        name: TensorLayout(dtype=getattr(torch, stored.dtype(name)), shape=stored.shape(name)) for name in sorted(names)
    }


def exported_names(model_folder: Path, layout: Layout) -> CheckpointNames:
    """Returns the names that the model's folder has for a version's tensors.

    Args:
        model_folder: The folder of the job's model.
        layout: The layout of a version.

    Raises:
        InvalidInput: The folder's config or its weights' index can't be read; the error names model.path.
    """
    model = empty_model(model_folder, dtype=getattr(torch, published_dtype(layout)), device="meta")
    key_mapping = text_model(model_config(model_folder)).names
    return names_of_folder(model_folder, model, layout, key_mapping=key_mapping or None)


def _check_digest(digest: str, version: KeptVersion) -> None:
    """Raises ContractViolation where weights aren't those of the version."""
    if digest != version.weights_digest:
        raise ContractViolation(
            f"holds the weights {digest[:12]}, version {version.policy_version} is {version.weights_digest[:12]}",
            field=str(version.path),
            cure="export another version",
        )


def _counter(progress: FileProgress | None) -> CountBytes | None:
    if progress is None:
        return None
    return lambda num_bytes: progress.add(num_bytes=num_bytes)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors makes files that only their owner reads; the others of the folder are as the umask says.
    path.chmod(0o644)


def _write_adapters(
    scratch: Path,
    weights: Weights,
    version: KeptVersion,
    spec: JobSpec,
    model_folder: Path,
    progress: FileProgress | None,
) -> str:
    """Writes the adapters, and returns the digest of their matrices."""
    digest = tensors_digest(weights.tensors)
    if digest != version.weights_digest:
        raise ContractViolation(
            f"makes the weights {digest[:12]} of its base, "
            f"version {version.policy_version} is {version.weights_digest[:12]}",
            field=str(version.path),
            cure="export another version, or give the job's model by --model-root",
        )
    lora = spec.trainer.lora
    assert lora is not None
    layers = sorted(name.removeprefix(PREFIX).removesuffix(A_END) for name in weights.matrices if name.endswith(A_END))
    _check_peft_reads(layers, rank=lora.rank, model_folder=model_folder)
    path = scratch / "adapter_model.safetensors"
    matrices = {name: tensor.contiguous() for name, tensor in weights.matrices.items()}
    layout = layout_of(matrices)
    _check_space(scratch, layout)
    if progress is not None:
        progress.expect(files=1, num_bytes=2 * total_bytes(layout))
    _save(matrices, path)
    if progress is not None:
        progress.add(files=1, num_bytes=total_bytes(layout))
    written = digest_of([path], count=_counter(progress))
    if written != tensors_digest(matrices):
        raise ContractViolation("has other bytes than were written to it", field=str(path))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_folder),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": layers,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    _write_json(scratch / "adapter_config.json", config)
    return written


def _check_peft_reads(layers: Sequence[str], *, rank: int, model_folder: Path) -> None:
    """Raises InvalidInput where peft would put the matrices elsewhere than they were trained.

    Of some mixtures of experts it takes the names of dense layers for those of the experts, whose parameters have three
    axes now. It is tried on the model without its weights; where peft isn't installed, it is not tried.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        return
    model = cast(nn.Module, empty_model(model_folder, dtype=torch.float32, device="meta"))
    try:
        inject_adapter_in_model(LoraConfig(r=rank, target_modules=list(layers)), model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise _unread_by_peft(first_line(error)) from error
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if adapted != set(layers):
        raise _unread_by_peft(f"it takes names of this model's layers for others: {min(adapted ^ set(layers))}")


def _unread_by_peft(problem: str) -> InvalidInput:
    return InvalidInput(
        f"peft would not load the adapters into the layers that they were trained in: {problem}",
        field="--adapters",
        cure="leave it out: the whole model, with the adapters merged, is exported",
    )


def _copy_beside(model_folder: Path, scratch: Path, *, without: tuple[str, ...]) -> None:
    for name in BESIDE_WEIGHTS:
        if name not in without and (model_folder / name).is_file():
            shutil.copyfile(model_folder / name, scratch / name)


def _provenance(exported: Exported, spec: JobSpec) -> dict[str, Any]:
    return {
        "job_id": exported.job_id,
        "job_name": spec.name,
        "policy_version": exported.policy_version,
        "weights_digest": exported.weights_digest,
        "digest_algorithm": "blake3-256",
        "files_digest": exported.files_digest,
        "adapters_digest": exported.adapters_digest,
        "model_path": spec.model.path,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
