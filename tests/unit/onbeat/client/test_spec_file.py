"""`--set key.path=value` on a spec file, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.errors import InvalidInput
from onbeat.client.spec_file import flag_settings, load_spec, parse_spec, parse_value


def values() -> dict[str, Any]:
    return {
        "name": "test",
        "iterations": 4,
        "model": {"path": "folder"},
        "dataset": {"type": "addition"},
        "reward": {"components": [{"type": "exact"}, {"type": "regex", "pattern": "x"}]},
        "trackers": ["tensorboard"],
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ('"quoted"', "quoted"),
        ("plain words", "plain words"),
        ("configs/models/x", "configs/models/x"),
        ("[1, 2]", [1, 2]),
        ("{ a = 1 }", {"a": 1}),
        ("", ""),
        ("1\nname = 2", "1\nname = 2"),
    ],
)
def test_a_value_is_toml_or_else_text(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_settings_change_tables_lists_and_keys_that_the_file_lacks() -> None:
    spec = parse_spec(
        values(),
        [
            "optimizer.learning_rate=1e-3",
            "reward.components.1.weight=2.5",
            "name=other",
            "rollout.sampling.max_new_tokens=7",
        ],
    )
    assert spec.optimizer.learning_rate == 1e-3
    assert spec.reward.components[1].weight == 2.5
    assert spec.name == "other"
    assert spec.rollout.sampling.max_new_tokens == 7


def test_a_later_setting_wins() -> None:
    assert parse_spec(values(), ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "model.pth=x",
            r"^model\.pth: unknown key \(did you mean path\? "
            r"One of path, dtype, cast_lm_head_to_fp32, matmul, file_digests\)$",
        ),
        ("colour=red", r"^colour: unknown key"),
        ("learning_rate=1e-3", r"^learning_rate: unknown key \(did you mean optimizer\.learning_rate\?\)$"),
        (
            "rollout.top_p=0.9",
            r"^rollout\.top_p: unknown key \(did you mean rollout\.sampling\.top_p or evaluation\.sampling\.top_p\?\)$",
        ),
        ("dataset.colour=red", r"^dataset\.colour: unknown key"),
        ("dataset.task=chess", r'^dataset\.task: unknown key \(only with type = "reasoning_gym"\)$'),
        ("reward.components.0.colour=red", r"^reward\.components\[0\]\.colour: unknown key"),
        ("reward.components.9.weight=1", r"^reward\.components\.9: `9` is not an entry of a list of 2"),
        ("iterations=many", r"^iterations: expected `int`, got `str`"),
        ("iterations=-1", r"^iterations: expected `int` >= 0"),
        ("iterations.deep=1", r"^iterations: is a value, not a table"),
        ("reward.components.0.type.more.yet=1", r"^reward\.components\.0\.type: is a value, not a table"),
        ("trackers.0.name=1", r"^trackers\.0: is a value, not a table"),
        ("trackers.0.name.more=1", r"^trackers\.0: is a value, not a table"),
        ("iterations", r"^--set: `iterations` is not key\.path=value"),
        ("=1", r"^--set: `=1` is not key\.path=value"),
        ("model..path=1", r"^--set: `model\.\.path=1` is not key\.path=value"),
        ("trainer.accumulation=float", r"^deterministic: needs"),
        ("trainer.sharding=fsdp", r"^trainer\.sharding: \"fsdp\" needs trainer\.world_size above 1"),
    ],
)
def test_a_bad_setting_names_its_path(setting: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_spec(values(), [setting])


def test_a_missing_key_is_named_in_full() -> None:
    incomplete = values()
    del incomplete["model"]["path"]
    with pytest.raises(InvalidInput, match=r"^model\.path: is required"):
        parse_spec(incomplete)


def test_a_file_that_is_missing_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"absent\.toml: does not exist"):
        load_spec(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(InvalidInput, match=r"bad\.toml: is not TOML"):
        load_spec(tmp_path / "bad.toml")


def test_flags_are_settings_and_absent_flags_change_nothing() -> None:
    assert flag_settings(schedule="synchronous", iterations=None, seed=0) == ["schedule=synchronous", "seed=0"]


@pytest.mark.parametrize("text", ["[" * 5000, "1" * 5000], ids=["too deep", "too many digits"])
def test_what_no_reader_can_hold_is_one_clear_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"iterations = {text}")
    with pytest.raises(InvalidInput):
        load_spec(file)
    with pytest.raises(InvalidInput):
        parse_spec(values(), [f"iterations={text}"])


@pytest.mark.parametrize("text", ["nan", "1e3", "2026-11-29", "true", 'run "7"', "π = 3"])
def test_a_key_that_takes_a_text_takes_what_toml_reads_as_something_else(text: str) -> None:
    assert parse_spec(values(), [f"name={text}", "seed=3"]).name == text
    with pytest.raises(InvalidInput, match=r"^seed: expected `int`, got `str`"):
        parse_spec(values(), [f"name={text}", "seed=three"])
