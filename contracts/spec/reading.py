"""JSON or plain values → a JobSpec: types, ranges and choices, with every key that is wrong.

`onbeat train/submit …`, `onbeat.train` ─▶ values ─▶ spec_of_values ─┐
POST /v1/jobs, /v1/jobs/check ──────────▶ JSON ───▶ spec_of_json ────┴─▶ JobSpec ─▶ contracts/spec/rules.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from contracts.encoding.wire import KEY_IN_PROBLEM, convert, decode_json
from contracts.errors import InvalidInput, Refusal, SpecRefused
from contracts.spec.job import JobSpec

MOST_REFUSALS = 16
"""Each reads the spec again, so that a hostile one costs no more than so many readings."""
STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
"""A step of a path: a key of a table, or a place in a list."""

NAMES_ELSEWHERE = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "adv_estimator": "algorithm.advantage",
    "beta": "algorithm.kl_coefficient",
    "bf16": "model.dtype",
    "clip_ratio_c": "algorithm.clip_max",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "delta": "algorithm.clip_max",
    "epsilon_high": "algorithm.clip_high",
    "kl_coef": "algorithm.kl_coefficient",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "logging_steps": "trackers",
    "loss_type": "algorithm.loss",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "mask_truncated_completions": "algorithm.on_truncated",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.sampling.max_new_tokens",
    "max_steps": "iterations",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_iterations": "algorithm.updates_per_iteration",
    "num_train_epochs": "iterations",
    "report_to": "trackers",
    "reward_weights": "reward.components[0].weight",
    "save_steps": "trainer.checkpoint_every_iterations",
    "scale_rewards": "algorithm.advantage",
    "total_epochs": "iterations",
    "warmup_steps": "optimizer.warmup_iterations",
}
"""Key of TRL or verl → the key that says it here, where no key here has the same name (docs/from-trl.md)."""


def spec_of_json(body: bytes) -> JobSpec:
    """Reads a spec from outside.

    Raises:
        SpecRefused: A key is unknown, missing, of another type or out of its range.
        InvalidInput: The body is no JSON.
    """
    try:
        return decode_json(body, JobSpec)
    except InvalidInput as error:
        if not isinstance(error.__cause__, msgspec.ValidationError):
            raise
        raise SpecRefused(_all_wrong_keys(lambda: msgspec.json.decode(body), error)) from error


def spec_of_values(values: Any) -> JobSpec:
    """Reads a spec from plain dicts and lists, as a TOML file has them. Raises SpecRefused as `spec_of_json` does."""
    try:
        return convert(values, JobSpec)
    except InvalidInput as error:
        raise SpecRefused(_all_wrong_keys(lambda: _copy(values), error)) from error


def _all_wrong_keys(values: Callable[[], Any], error: InvalidInput) -> list[Refusal]:
    """Returns a refusal for each wrong key; one alone of what is thousands of levels deep."""
    try:
        return _wrong_keys(values(), error)
    except (RecursionError, msgspec.DecodeError):
        return [_refusal(error)]


def _wrong_keys(values: Any, error: InvalidInput) -> list[Refusal]:
    """Returns a refusal for each wrong key: what is refused is left out, and the rest is read again.

    values: changed by this. error: what reading them raised.
    """
    refusals: list[Refusal] = []
    left_out: set[str] = set()
    while len(refusals) < MOST_REFUSALS:
        refusal = _refusal(error)
        if refusal.field in left_out:
            break  # a required key, which was refused already
        refusals.append(refusal)
        if not _leave_out(values, refusal.field):
            break
        left_out.add(refusal.field)
        try:
            convert(values, JobSpec)
            break
        except InvalidInput as following:
            error = following
    return refusals


def _refusal(error: InvalidInput) -> Refusal:
    """`model: object contains unknown field `pth`` → `model.pth: unknown key (did you mean path? …)`."""
    table = error.field or ""
    key = KEY_IN_PROBLEM.fullmatch(error.problem)
    if key is None:
        return Refusal.of(error)
    field = f"{table}.{key['key']}" if table else key["key"]
    if key["fault"] == "missing required":
        return Refusal(field=field, problem="is required", cure="docs/configuration.md explains it")
    elsewhere = NAMES_ELSEWHERE.get(key["key"])
    cure = f"did you mean {elsewhere}?" if elsewhere else error.cure
    return Refusal(field=field, problem="unknown key", cure=cure or "docs/configuration.md lists the keys")


def _leave_out(values: Any, field: str) -> bool:
    """Takes a key out of its table; False where it isn't in one, as an entry of a list, whose others would move."""
    target = values
    *tables, (key, _) = STEP.findall(field) or [("", "")]
    for name, place in tables:
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and place and int(place) < len(target):
            target = target[int(place)]
        else:
            return False
    if not isinstance(target, dict) or key not in target:
        return False
    del target[key]
    return True


def _copy(values: Any) -> Any:
    """Copies tables and lists, so that those of a program stay as they are."""
    if isinstance(values, dict):
        return {key: _copy(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_copy(value) for value in values]
    return values
