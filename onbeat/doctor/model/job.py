"""The job that the answers about a model are for: a spec's, or one with the defaults; and the folder of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from contracts.errors import InvalidInput
from contracts.hub_names import is_hub_name, read_hub_name
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.client.spec_file import parse_spec, read_toml
from onbeat.hub.store import HubStore

MODEL_PATH = "model.path"
LEAST_SPEC: Mapping[str, Any] = {
    "name": "doctor",
    "iterations": 1,
    "dataset": {"type": "addition"},
    "reward": {"components": [{"type": "exact"}]},
}
"""The keys that each spec needs besides its model; none of them matters to a model's folder."""


def job_of(model: str | None, spec_file: Path | None, settings: Sequence[str]) -> JobSpec:
    """Makes the job that is asked about.

    Args:
        model: A folder, which takes the place of the spec's; None: the spec's own.
        spec_file: A job spec; None: a job with the defaults of all keys.
        settings: `key.path=value`, on top of it.

    Raises:
        InvalidInput: Neither of them is given, or the file can't be read.
        SpecRefused: The spec breaks rules.
    """
    values = dict(LEAST_SPEC) if spec_file is None else read_toml(spec_file)
    if model is not None:
        table = values.get("model")
        others = table if isinstance(table, dict) else {}
        values["model"] = {**others, "path": model}
    elif spec_file is None:
        raise InvalidInput("no model is named", field="MODEL", cure="name a model's folder, or a job spec by --spec")
    return parse_spec(values, settings)


def placed(spec: JobSpec, settings: StackSettings) -> tuple[JobSpec, StackSettings]:
    """Returns the job and the settings by which its model's folder is found.

    A relative path is one below the model root. An absolute path is taken as it is: the person who types it may read
    it. A name of the hub is the commit that was fetched last. Raises InvalidInput where none was.
    """
    if is_hub_name(spec.model.path):
        name = read_hub_name(spec.model.path, kind="model", field=MODEL_PATH)
        commit = HubStore(settings.hub_root_path).commit_of(name)
        if commit is None:
            raise InvalidInput(
                f"{name} isn't fetched",
                field=MODEL_PATH,
                cure=f"onbeat fetch {name}, or name a folder that has its config.json",
            )
        return replace(spec, model=replace(spec.model, path=str(name.at_commit(commit)))), settings
    path = Path(spec.model.path)
    if not path.is_absolute():
        return spec, settings
    folder = path.resolve()
    model = replace(spec.model, path=folder.name)
    return replace(spec, model=model), replace(settings, model_root=str(folder.parent), run_root="", weight_root="")


def job_in_words(spec: JobSpec) -> str:
    """Says in one line which keys of the job the answers depend on."""
    trainer = spec.trainer
    words = [spec.model.dtype, spec.optimizer.type, f'packing "{trainer.packing}"']
    words.append(f"{trainer.max_tokens_per_micro_batch} tokens a pass")
    if trainer.gradient_checkpointing:
        words.append("activations computed again")
    if trainer.frees_gradients:
        words.append("gradients freed")
    if spec.optimizer.offload is not UNSET:
        words.append(f"its state on the {spec.optimizer.offload}")
    if trainer.offloads_activations:
        words.append("activations on the host")
    if trainer.lora is not None:
        words.append(f"adapters of rank {trainer.lora.rank}")
    if num_ranks(spec) > 1:
        words.append(f"{num_ranks(spec)} ranks")
    if trainer.sharding != "none":
        words.append(f'sharding "{trainer.sharding}"')
    if spec.loads_reference:
        words.append("a reference")
    if spec.algorithm.advantage_kind.has_critic:
        words.append("a critic")
    return ", ".join(words)


def num_ranks(spec: JobSpec) -> int:
    """Returns the number of ranks; over hosts that of the smallest group, in which each rank has most."""
    hosts = spec.trainer.over_hosts
    if hosts is None:
        return spec.trainer.world_size
    return hosts.least * hosts.ranks


def tokens_of_a_pass(spec: JobSpec) -> int:
    """Returns the most tokens of one pass, padding included."""
    rollout = spec.rollout
    of_batch = rollout.prompts_per_batch * rollout.group_size * spec.longest_row
    # A row by itself always goes whole.
    return max(spec.longest_row, min(spec.trainer.max_tokens_per_micro_batch, of_batch))
