"""Specs that are made of others: to evaluate a model, to go on from a checkpoint, and for the jobs of a sweep."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.errors import InvalidInput
from onbeat.client.spec_file import parse_value

OF_EVALUATIONS = (
    "name",
    "tags",
    "model",
    "dataset",
    "environment",
    "reward",
    "seed",
    "deterministic",
    "rollout",
    "evaluation",
    "recording",
    "timeouts",
    "limits",
)
"""Keys of a spec that say how held-out prompts are sampled and scored; the others are about training."""
OF_SAMPLING = ("sampling", "max_prompt_tokens", "filter_overlong_prompts", "max_attempts", "on_failed_batch")
"""The same of table `rollout`."""
OF_TRAINING = ("every_iterations", "stop_when")
"""Keys of table `evaluation` that are about training all the same."""
OF_TRAINING_ORDER = ("curriculum", "difficulty_pools")
"""Keys of a data set that say in which order its prompts are trained."""
MOST_JOBS = 64
"""Jobs of one sweep."""
LONGEST_TAG = 40
LONGEST_NAME = 120
MOST_TAGS = 8


def evaluating(values: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Returns the spec of a job that evaluates a model as another job would, and trains nothing.

    Args:
        values: The spec of a job that trains.
        model: The path of the model's folder.
    """
    evaluation = {key: values[key] for key in OF_EVALUATIONS if key in values}
    evaluation["model"] = _without(evaluation.get("model", {}), "file_digests") | {"path": model}
    evaluation["iterations"] = 0
    evaluation["name"] = f"evaluation of {values.get('name', 'a spec')}"[:LONGEST_NAME]
    if "rollout" in evaluation:
        evaluation["rollout"] = {key: value for key, value in evaluation["rollout"].items() if key in OF_SAMPLING}
    if "evaluation" in evaluation:
        evaluation["evaluation"] = _without(evaluation["evaluation"], *OF_TRAINING)
    if "dataset" in evaluation:
        evaluation["dataset"] = _unordered(evaluation["dataset"])
    return evaluation


def _without(table: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def _unordered(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a data set, or each source of a mixture, without what orders its training prompts."""
    left = _without(dataset, *OF_TRAINING_ORDER)
    if isinstance(left.get("sources"), list):
        left["sources"] = [
            {**source, "dataset": _unordered(source["dataset"])} if isinstance(source.get("dataset"), dict) else source
            for source in left["sources"]
        ]
    return left


def forking(values: Mapping[str, Any], *, job: str, version: int, iterations: int) -> dict[str, Any]:
    """Returns the spec of a job that goes on from a version of another one.

    Args:
        values: The other job's spec.
        job: Its id.
        version: A version of which it has a checkpoint.
        iterations: How many the new job trains.
    """
    return {**values, "fork": {"job": job, "version": version}, "iterations": iterations}


def renamed(values: dict[str, Any], settings: Sequence[str]) -> None:
    """Names a fork after the keys that it changes, and drops tags that say what these keys were."""
    pairs = [setting.partition("=") for setting in settings]
    changes = {key.strip().rpartition(".")[2]: value.strip() for key, _, value in pairs}
    if "name" not in changes:
        shown = ", ".join(f"{key}={value}" for key, value in changes.items())
        values["name"] = f"{values['name']}, {shown}"[:LONGEST_NAME]
    values["tags"] = [tag for tag in values.get("tags", ()) if tag.partition("=")[0] not in changes]


def without_digests(values: dict[str, Any], settings: Sequence[str]) -> None:
    """Takes the digests of files out of each table that the settings change: they may name other files there.

    With another `file` of a reward or an environment goes the text of the one before.
    """
    for setting in settings:
        table: Any = values
        keys = setting.partition("=")[0].strip().split(".")
        for key in keys[:-1]:
            table = _entry(table, key)
            if isinstance(table, dict):
                table.pop("file_digests", None)
        if isinstance(table, dict) and keys[-1] == "file":
            table.pop("source", None)


def _entry(container: Any, key: str) -> Any:
    """Returns the entry of a table or a list of a spec that a part of a setting's key names; None where none is."""
    if isinstance(container, list):
        return container[int(key)] if key.isdecimal() and int(key) < len(container) else None
    return container.get(key) if isinstance(container, dict) else None


def swept(settings: Sequence[str]) -> list[list[str]]:
    """Returns the settings of each job of a sweep: every combination of the values that the settings list.

    `optimizer.learning_rate=1e-4,1e-3` lists two. Raises InvalidInput where no setting lists several, or there are more
    combinations than MOST_JOBS.
    """
    listed: list[list[str]] = []
    num_jobs = 1
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise InvalidInput(
                f"`{setting}` is not key.path=value,value", field="--set", cure="write it as --set seed=1,2,3"
            )
        values = values_in(text)
        num_jobs *= len(values)
        listed.append([f"{key.strip()}={value}" for value in values])
    if num_jobs == 1:
        raise InvalidInput(
            "gives one job, which is no sweep",
            field="--set",
            cure="list values, as in --set optimizer.learning_rate=1e-4,1e-3, or take onbeat submit",
        )
    if num_jobs > MOST_JOBS:
        raise InvalidInput(f"makes {num_jobs} jobs, at most {MOST_JOBS} are allowed", field="--set", cure="list fewer")
    return [list(combination) for combination in itertools.product(*listed)]


def varied_keys(combinations: Sequence[Sequence[str]]) -> list[str]:
    """Returns the keys of which the jobs of a sweep have several values."""
    values: dict[str, set[str]] = {}
    for changes in combinations:
        for change in changes:
            key, _, value = change.partition("=")
            values.setdefault(key, set()).add(value)
    return [key for key, of_key in values.items() if len(of_key) > 1]


def values_in(text: str) -> list[str]:
    """Splits values at the commas between them; those within brackets, braces and quotes belong to a value."""
    values: list[str] = []
    pending = ""
    for part in text.split(","):
        pending = f"{pending},{part}" if pending else part
        if _is_whole(pending):
            values.append(pending.strip())
            pending = ""
    if pending:
        values.append(pending.strip())
    return values


def _is_whole(text: str) -> bool:
    """Returns False for the beginning of a list, a table or a quoted text."""
    if text.strip()[:1] not in ("[", "{", '"', "'"):
        return True
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def named_after(values: dict[str, Any], changes: Sequence[str], *, tag: str) -> None:
    """Gives a job of a sweep its name and tags, by which the page shows and groups it.

    Jobs that differ by their seeds alone have the same tags, so that the page can draw their mean.
    """
    pairs = [change.partition("=") for change in changes]
    short = [f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs]
    values["name"] = f"{values.get('name', 'sweep')}, {', '.join(short)}"[:LONGEST_NAME]
    of_values = [change[:LONGEST_TAG] for change in short if not change.startswith("seed=")]
    values["tags"] = list(dict.fromkeys([*values.get("tags", ()), tag, *of_values]))[:MOST_TAGS]


def shown_values(changes: Sequence[str]) -> dict[str, Any]:
    """Returns key → value of a job of a sweep, as JSON shows it."""
    pairs = (change.partition("=") for change in changes)
    return {key: parse_value(value) for key, _, value in pairs}
