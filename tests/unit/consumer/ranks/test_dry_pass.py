"""The largest micro-batch of a job: its shape, and what a pass of it leaves behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.model.memory import has_words_of_memory
from consumer.ranks import dry_pass
from consumer.ranks.dry_pass import UNKNOWN, LongestRow, largest_pass, longest_row, num_tokens, pass_dry
from contracts.settings import StackSettings
from tests.builders import job_spec, rollout_batch, tiny_model_folder

PADDED = {"trainer__packing": "padded"}
LARGE = {"rollout__prompts_per_batch": 8, "rollout__group_size": 8, "rollout__sampling": {"max_new_tokens": 21}}
"""64 rows of up to 10 + 21 tokens; the last one is never an input."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tiny_model_folder(path)
    return path


def learner_of(folder: Path, **changes: Any) -> Learner:
    return make_learner(StackSettings(model_root=str(folder)), job_spec(**changes))


def row_of(learner: Learner, prompt: int = 10) -> LongestRow:
    return longest_row(learner.spec, longest_prompt=prompt, context_tokens=learner.policy.context_tokens)


@pytest.mark.parametrize(
    ("changes", "pass_tokens", "tokens"),
    [
        (PADDED, 8192, 64 * 30),
        # Twenty rows of 30 are 600 of them.
        (PADDED, 600, 600),
        # Three rows of 30 are 90 of 119, four rows of 29 are 116.
        (PADDED, 119, 116),
        # A row is never cut.
        (PADDED, 16, 30),
        # A prompt goes through once for its eight completions.
        ({}, 8192, 8 * (10 + 8 * 20)),
        ({}, 170, 170),
        ({}, 16, 30),
    ],
)
def test_the_largest_pass_has_as_many_of_the_longest_rows_as_its_bound_takes(
    folder: Path, changes: dict[str, Any], pass_tokens: int, tokens: int
) -> None:
    learner = learner_of(folder, **LARGE, **changes, trainer__max_tokens_per_micro_batch=pass_tokens)
    assert num_tokens(largest_pass(learner.spec, learner.policy, row_of(learner))) == tokens


def test_a_row_is_as_long_as_the_spec_and_the_model_allow() -> None:
    spec = job_spec(rollout__sampling={"max_new_tokens": 21})
    assert longest_row(spec, longest_prompt=10, context_tokens=64).response_tokens == 21
    assert longest_row(spec, longest_prompt=50, context_tokens=64).response_tokens == 14
    played = job_spec(environment={"name": "calculator", "max_tokens": 4096})
    assert longest_row(played, longest_prompt=50, context_tokens=512).response_tokens == 462


@pytest.mark.parametrize("changes", [{}, {"trainer__free_gradients": True}, {"trainer__lora": {"rank": 2}}])
def test_a_dry_pass_between_two_batches_moves_neither_sums_nor_random_numbers(
    folder: Path, changes: dict[str, Any]
) -> None:
    sums: list[torch.Tensor] = []
    random: list[torch.Tensor] = []
    added: list[tuple[int, ...] | None] = []
    for passes_dry in (False, True):
        learner = learner_of(folder, **changes, rollout__batches_per_iteration=2)
        learner.train(rollout_batch(seed=1, batch_id="0/train/0"))
        if passes_dry:
            assert pass_dry(learner, row_of(learner)).num_tokens > 0
        learner.train(rollout_batch(seed=2, batch_id="0/train/1"))
        assert learner.accumulator.sums is not None
        sums.append(learner.accumulator.sums.clone())
        random.append(torch.get_rng_state())
        learner.step(OptimizerStep(iteration=0, divisor=2.0, learning_rate=1e-3, is_last=True))
        added.append(learner.accumulator.added)
    assert bool(sums[0].any())
    assert torch.equal(*sums)
    assert torch.equal(*random)
    assert added == [(1, 1), (1, 1)]


@pytest.mark.parametrize(
    "stage", [{"model": "qwen3", "top_k": 4}, {"model": "qwen3", "hidden_size": 32}], ids=["top_k", "hidden_size"]
)
def test_a_teacher_s_distributions_are_made_up_and_count(
    folder: Path, stage: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(
        folder,
        algorithm__distillation_coefficient=0.5,
        algorithm__distillation_beta=0.5,
        stages=[{"type": "teacher", **stage}],
    )
    teacher = learner.policy.teacher
    assert teacher is not None
    divergence = type(teacher).divergence
    num_told = 0

    def counting(self: Any, distribution: torch.Tensor, known: torch.Tensor, drawn: Any) -> torch.Tensor:
        nonlocal num_told
        num_told += len(known)
        values = divergence(self, distribution, known, drawn)
        assert values.requires_grad
        assert bool(values.isfinite().all())
        return values

    monkeypatch.setattr(type(teacher), "divergence", counting)
    row = row_of(learner)
    passed = pass_dry(learner, row)
    # Two groups of four completions, of five tokens each.
    assert (passed.problem, num_told >= 8 * row.response_tokens) == ("", True)
    assert passed.peak_bytes > 0
    assert learner.accumulator.sums is None or not bool(learner.accumulator.sums.any())
    assert all(parameter.grad is None for parameter in learner.policy.trained_parameters().values())
    columns = {name: (value,) * 8 for name, value in teacher.made_up(row.response_tokens).items()}
    teacher.check(replace(rollout_batch(batch_id="0/train/0"), columns=columns))


def test_the_moments_that_the_first_step_will_make_count_and_then_are_there(folder: Path) -> None:
    learner = learner_of(folder, rollout__batches_per_iteration=1)
    numbers = sum(parameter.numel() for parameter in learner.policy.trained_parameters().values())
    steps = 4 * len(learner.policy.trained_parameters())
    assert learner.optimizer.first_step_bytes == 8 * numbers + steps
    learner.train(rollout_batch(batch_id="0/train/0"))
    learner.step(OptimizerStep(iteration=0, divisor=2.0, learning_rate=1e-3, is_last=True))
    assert learner.optimizer.first_step_bytes == 0


def test_a_pass_without_room_says_so_and_leaves_no_gradient_and_another_error_leaves_it_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(folder)

    def raising(error: Exception) -> Any:
        def pass_without_gradient(policy: Any, *_: Any, **__: Any) -> None:
            parameter = next(iter(policy.trained_parameters().values()))
            parameter.grad = torch.ones_like(parameter)
            raise error

        return pass_without_gradient

    monkeypatch.setattr(dry_pass, "pass_without_gradient", raising(RuntimeError("can't allocate memory: 8 GiB")))
    assert pass_dry(learner, row_of(learner)).problem == "RuntimeError: can't allocate memory: 8 GiB"
    assert all(parameter.grad is None for parameter in learner.policy.trained_parameters().values())
    monkeypatch.setattr(dry_pass, "pass_without_gradient", raising(KeyError("layers")))
    assert pass_dry(learner, row_of(learner)) == UNKNOWN
    assert all(parameter.grad is None for parameter in learner.policy.trained_parameters().values())


def test_a_model_that_is_no_number_any_more_has_no_memory_and_no_error(folder: Path) -> None:
    learner = learner_of(folder)
    with torch.no_grad():
        next(iter(learner.policy.trained_parameters().values())).fill_(torch.nan)
    assert pass_dry(learner, row_of(learner)) == UNKNOWN


FORETOLD = {
    "rollout__prompts_per_batch": 32,
    "rollout__group_size": 16,
    "rollout__sampling": {"max_new_tokens": 54},
    "trainer__packing": "padded",
    "trainer__max_tokens_per_micro_batch": 32_768,
}
"""512 rows of 63 tokens."""


def test_on_a_cpu_a_pass_is_refused_before_the_system_would_kill_the_process_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(folder, **FORETOLD)
    passes: list[int] = []
    go_through = dry_pass._go_through

    def counting(learner: Learner, micro_batch: Any) -> None:
        passes.append(num_tokens(micro_batch))
        go_through(learner, micro_batch)

    monkeypatch.setattr(dry_pass, "_go_through", counting)
    monkeypatch.setattr(dry_pass, "room_bytes", lambda: 16 * 2**20)
    passed = pass_dry(learner, row_of(learner))
    assert passed.problem.startswith("not enough memory: by a pass of 4095 tokens it takes some ")
    assert has_words_of_memory(passed.problem), "other ranks tell it by its words"
    assert (passes, passed.peak_bytes) == ([4095], 0), "the whole pass was not tried"
    # With what it says that it takes it has room.
    needs = re.search(r"it takes some ([0-9.e-]+) GiB", passed.problem)
    assert needs is not None
    passes.clear()
    monkeypatch.setattr(dry_pass, "room_bytes", lambda: 1.2 * float(needs[1]) * 2**30)
    passed = pass_dry(learner, row_of(learner))
    assert (passed.problem, passes) == ("", [4095, 512 * 63])


def test_a_small_job_makes_one_pass_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_pass, "room_bytes", lambda: 0)
    learner = learner_of(folder, **FORETOLD | {"trainer__max_tokens_per_micro_batch": 4095})
    assert pass_dry(learner, row_of(learner)).num_tokens == 4095
