"""A job spec from a TOML file, with `--set key.path=value` on top.

`--set optimizer.learning_rate=1e-3` sets a number, `--set name=quick` a string (what is not a TOML value is taken as
text), `--set reward.components.0.weight=2.0` an entry of a list.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.spec.job import JobSpec
from contracts.spec.reading import SpecReading, read_values
from contracts.spec.rules import judged
from onbeat.base.shipped import SPECS, own_or_shipped, shipped_root


def load_spec(path: Path, settings: Sequence[str] = ()) -> JobSpec:
    """Raises InvalidInput that names the file, the key and the cure."""
    return parse_spec(read_toml(path), settings)


def parse_spec(values: dict[str, Any], settings: Sequence[str] = ()) -> JobSpec:
    """Makes a JobSpec of plain values, changed by `key.path=value` settings.

    Raises SpecRefused with all wrong keys, and all rules that the rest breaks.
    """
    return judged(read_spec(values, settings))


def read_spec(values: dict[str, Any], settings: Sequence[str] = ()) -> SpecReading:
    """Reads plain values, changed by `key.path=value` settings. Raises InvalidInput for what is no such setting."""
    for setting in settings:
        apply_setting(values, setting)
    reading = read_values(values)
    if _set_texts(values, settings, reading):
        reading = read_values(values)
    return reading


def _set_texts(values: dict[str, Any], settings: Sequence[str], reading: SpecReading) -> bool:
    """Sets the text itself where a key that takes one was set to what TOML reads as a number, as `name=nan`.

    Returns False where no setting is so.
    """
    fields = {refusal.field for refusal in reading.refusals if refusal.problem.startswith("expected `str`")}
    texts = [setting for setting in settings if setting.partition("=")[0].strip() in fields]
    for setting in texts:
        dotted, _, text = setting.partition("=")
        apply_setting(values, f"{dotted}={json.dumps(text.strip(), ensure_ascii=False)}")
    return bool(texts)


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a spec's file, or the shipped one of the name `configs/…` where the working folder has none of it."""
    try:
        return tomllib.loads(own_or_shipped(path).read_text())
    except FileNotFoundError as error:
        specs = shipped_root() / SPECS
        raise InvalidInput(
            "does not exist",
            field=str(path),
            cure=f"`onbeat init` writes a project with one; those that come with Onbeat are in {specs}",
        ) from error
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}", field=str(path)) from error
    except (ValueError, RecursionError) as error:  # of its grammar or encoding; too many digits; too deep
        raise InvalidInput(f"is not TOML: {error}", field=str(path)) from error


def apply_setting(values: dict[str, Any], setting: str) -> None:
    """Changes `values` by one `key.path=value`; tables that are missing on the way are made."""
    dotted, equals, text = setting.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise InvalidInput(
            f"`{setting}` is not key.path=value", field="--set", cure="write it as --set optimizer.learning_rate=1e-3"
        )
    target: Any = values
    for depth, key in enumerate(keys[:-1]):
        target = _child(target, key, path=".".join(keys[: depth + 1]))
    target[_key(target, keys[-1], path=dotted.strip())] = parse_value(text.strip())


def parse_value(text: str) -> Any:
    """Returns a TOML value, or the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"is not a value: {error}", field="--set") from error
    return parsed["value"] if len(parsed) == 1 else text


def _child(container: Any, key: str, *, path: str) -> Any:
    place = _key(container, key, path=path)
    child = container.setdefault(key, {}) if isinstance(container, dict) else container[place]
    if not isinstance(child, dict | list):
        raise InvalidInput("is a value, not a table", field=path, cure="set it directly, without a further key")
    return child


def _key(container: Any, key: str, *, path: str) -> Any:
    """Returns the key of an entry as its container takes it: a table's key, or a position in a list."""
    if isinstance(container, dict):
        return key
    if not key.isdecimal() or int(key) >= len(container):
        raise InvalidInput(f"`{key}` is not an entry of a list of {len(container)}", field=path, cure="count from 0")
    return int(key)


def flag_settings(
    *,
    schedule: str | None = None,
    max_policy_lag: int | None = None,
    correction: str | None = None,
    iterations: int | None = None,
    seed: int | None = None,
) -> list[str]:
    """The flags of `onbeat demo`, `submit` and `chaos` that are short for `--set`."""
    chosen: Mapping[str, object | None] = {
        "schedule": schedule,
        "max_policy_lag": max_policy_lag,
        "algorithm.correction": correction,
        "iterations": iterations,
        "seed": seed,
    }
    return [f"{key}={value}" for key, value in chosen.items() if value is not None]
