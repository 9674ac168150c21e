"""A spec without its defaults decodes to the same spec, and has only what was set."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.encoding.wire import decode_json, encode_json
from contracts.encoding.without_defaults import without_defaults
from contracts.spec.job import JobSpec
from onbeat.client.spec_file import load_spec
from tests.builders import job_spec

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_spec_comes_back_equal(path: Path) -> None:
    spec = load_spec(path)
    assert decode_json(encode_json(without_defaults(spec)), JobSpec) == spec


def test_only_what_was_set_is_left_and_tags_and_required_keys_stay() -> None:
    values = without_defaults(load_spec(CONFIGS[0].parent / "demo.toml"))
    assert values["dataset"] == {"type": "addition"}
    assert values["model"] == {"path": "configs/models/two-digit-addition", "matmul": "onednn"}
    assert values["rollout"]["sampling"] == {"max_new_tokens": 5}
    assert values["iterations"] == 150
    assert "deterministic" not in values


def test_a_value_of_its_type_that_is_not_the_default_of_its_field_stays() -> None:
    assert without_defaults(job_spec(deterministic=False))["deterministic"] is False
