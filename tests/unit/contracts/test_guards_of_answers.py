"""What records and settings answer about themselves, in each of their cases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from contracts.jobs import MAX_SHOWN_CHARS, changes_in_words
from contracts.settings import StackSettings, usable_cores
from contracts.spec.algorithm import AlgorithmSpec, PluginLoss
from contracts.spec.conditions import read_by_loss
from contracts.spec.datasets import AdditionDataset
from contracts.spec.job import NOTHING_RECORDED
from contracts.spec.recording import RecordingSpec
from contracts.spec.rollout import EvaluationSet, EvaluationSpec
from contracts.spec.trainer import TrainerSpec, WiderSums
from contracts.versions import WeightFile
from tests.builders import job_spec, manifest

FILES = (WeightFile(name="a.safetensors", num_bytes=300),)


@pytest.mark.parametrize(("transport", "num_bytes"), [("file", 0), ("redis", 300)])
def test_only_a_version_that_travels_by_redis_has_bytes_there(transport: str, num_bytes: int) -> None:
    assert manifest(0, files=FILES, transport=transport).num_chunk_bytes == num_bytes


def test_a_value_that_changed_is_shown_whole_or_with_an_ellipsis_where_it_ends() -> None:
    short, long = "s" * MAX_SHOWN_CHARS, "l" * (MAX_SHOWN_CHARS + 1)
    (line,) = changes_in_words(job_spec(name=short), job_spec(name=long))
    assert line == f"name: {short} → {'l' * (MAX_SHOWN_CHARS - 1)}…"


def test_a_job_without_a_table_of_recording_records_a_batch_of_each_iteration() -> None:
    policy = job_spec(rollout={"batches_per_iteration": 4}).recording_policy
    assert (policy.share, policy.max_bytes, policy.max_version_bytes) == (0.25, 64 * 2**20, 0)
    assert job_spec(recording=None).recording_policy == NOTHING_RECORDED
    own = RecordingSpec(share=0.5)
    assert job_spec(recording=own).recording_policy == own


@pytest.mark.parametrize(
    ("keys", "reward"),
    [
        ({}, None),
        ({"on_truncated": "penalise"}, 0.0),
        ({"on_truncated": "penalise", "truncated_reward": -0.5}, -0.5),
    ],
)
def test_a_completion_that_was_cut_keeps_its_reward_unless_it_is_penalised(
    keys: dict[str, Any], reward: float | None
) -> None:
    assert AlgorithmSpec(**keys).reward_of_truncated == reward


def test_a_loss_is_named_by_its_kind_or_by_its_entry_point() -> None:
    assert AlgorithmSpec(loss="grpo").loss_name == "grpo"
    assert AlgorithmSpec(loss=PluginLoss(entry_point="mine")).loss_name == "mine"


def test_the_newest_widening_that_has_begun_holds() -> None:
    assert TrainerSpec().wider_bits(9) == 0
    trainer = TrainerSpec(wider_sums=(WiderSums(first_iteration=3, bits=2), WiderSums(first_iteration=6, bits=5)))
    assert [trainer.wider_bits(iteration) for iteration in (2, 3, 5, 6)] == [0, 2, 2, 5]


def test_the_columns_that_a_loss_reads_are_unknown_of_a_trainer_of_ones_own() -> None:
    assert read_by_loss(job_spec(trainer={"external": True})) == {}
    assert read_by_loss(job_spec())["reference_logprobs"] == (False, "kl_coefficient")


def test_a_held_out_set_is_evaluated_as_its_own_table_says_and_the_others_as_evaluation_says() -> None:
    evaluation = EvaluationSpec(sets=(EvaluationSet(name="hard", dataset=AdditionDataset()),))
    assert (evaluation.field_of("hard"), evaluation.field_of("easy")) == ("evaluation.sets[0]", "evaluation")


def test_weights_lie_in_the_run_root_unless_they_have_a_root_of_their_own(tmp_path: Path) -> None:
    assert StackSettings(run_root=str(tmp_path)).weight_root_path == tmp_path
    assert StackSettings(run_root=str(tmp_path), weight_root=str(tmp_path / "w")).weight_root_path == tmp_path / "w"


def test_what_is_fetched_lies_in_the_hubs_own_cache_unless_it_has_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert StackSettings().hub_root_path == tmp_path / "hf" / "onbeat"
    assert StackSettings(hub_root=str(tmp_path / "own")).hub_root_path == tmp_path / "own"


def test_the_usable_cores_are_those_of_the_process_where_the_system_tells_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 64
