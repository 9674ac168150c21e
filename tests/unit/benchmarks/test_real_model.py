"""The cases of `python -m benchmarks real-model`: what they name is shipped, and their curves are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import real_model
from onbeat.client.spec_file import load_spec


@pytest.mark.parametrize("case", real_model.CASES.values(), ids=[*real_model.CASES])
def test_a_case_names_shipped_specs_and_says_what_is_expected(case: real_model.Case) -> None:
    spec = load_spec(real_model.CONFIGS / case.spec, ())
    control = load_spec(real_model.CONFIGS / case.spec, real_model.JOBS["control"])
    assert case.expected
    assert (spec.algorithm.shuffle_rewards, control.algorithm.shuffle_rewards) == (False, True)
    if case.warm_up:
        warm_up = load_spec(real_model.CONFIGS / case.warm_up, ())
        assert warm_up.algorithm.loss == "sft"
        assert warm_up.model.dtype == spec.model.dtype
        assert spec.model.path not in {warm_up.model.path, ""}


def test_a_mixture_is_drawn_by_source_and_another_job_by_its_decoding(tmp_path: Path) -> None:
    def run(*scores: dict[str, Any]) -> dict[str, Any]:
        shared = {"sampled": 0.25, "greedy": 0.5, "prompts": 8}
        return {
            "evaluations": [{"version": 4 * i, **shared, **one} for i, one in enumerate(scores)],
            "reward": [0.1] * 8,
        }

    mixture = run({"by_source": {"a": 0.1, "b": 0.2}}, {"by_source": {"a": 0.3, "b": 0.4}})
    assert [label for label, _, _ in real_model.curves(mixture["evaluations"])] == ["a, sampled", "b, sampled"]
    assert [scores for _, _, scores in real_model.curves(mixture["evaluations"])] == [[0.1, 0.3], [0.2, 0.4]]
    path = tmp_path / "curve.png"
    real_model.draw({"trained": mixture, "control": mixture}, path, beside=run({}, {}, {}))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_run_is_of_a_spec_whatever_files_its_gateway_has_read() -> None:
    spec = load_spec(real_model.CONFIGS / "smollm2-sft.toml", ())
    accepted = msgspec.structs.replace(
        spec, model=msgspec.structs.replace(spec.model, file_digests={"models/a/config.json": "0" * 64})
    )
    assert accepted != spec
    assert real_model.as_submitted(accepted) == real_model.as_submitted(spec)
    other = load_spec(real_model.CONFIGS / "smollm2-sft.toml", ("seed=1",))
    assert real_model.as_submitted(accepted) != real_model.as_submitted(other)
