"""What `python -m benchmarks trl` gives TRL is the job: its prompts in their order, its learning rates, its rewards.

TRL is no dependency of the project: `make test-trl` installs it beside it, and runs this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.gradient.optimizer import groups_of, learning_rate_at
from contracts.spec.root import SpecRoot
from contracts.spec.trainer import OptimizerSpec
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.source import PromptSource
from tests.builders import char_tokenizer, job_spec, tiny_model_folder
from tests.trl_cases import trl_trainer

pytest.importorskip("trl", reason="TRL is not installed: `make test-trl` runs this in an environment that has it")


def test_trl_trains_the_prompts_of_a_job_in_their_order_at_its_learning_rates(tmp_path: Path) -> None:
    from benchmarks._trl_trainer import Recorder, make_trainer

    model = tiny_model_folder(tmp_path, hidden_size=16, num_layers=1)
    spec = job_spec(model__path=str(model), iterations=3, optimizer={"learning_rate": 1e-3, "warmup_iterations": 2})
    asked: list[list[str]] = []
    rates: list[float] = []

    class Watching(Recorder):
        def rewards(self, prompts: list[str], *arguments: Any, **row: Any) -> list[float]:
            asked.append(prompts)
            return super().rewards(prompts, *arguments, **row)

        def on_optimizer_step(self, *_: Any, **given: Any) -> None:
            rates.append(given["optimizer"].param_groups[0]["lr"])

    recorder = Watching(spec)
    trainer = make_trainer(spec, tmp_path, recorder, {})
    trainer.train()

    examples = job_examples(spec, SpecRoot(model))
    source = PromptSource(examples, spec=spec, tokenizer=char_tokenizer(), context_tokens=64)
    ours = [[prompt.text for prompt in source.training_prompts(number)] for number in range(spec.iterations)]
    assert asked == [[text for text in texts for _ in range(spec.rollout.group_size)] for texts in ours]
    assert rates == pytest.approx([learning_rate_at(number, spec.optimizer, 3) for number in range(3)])
    assert [step["num_completions"] for step in recorder.steps] == [32, 32, 32]
    assert all(
        step["started_s"] < step["generated_s"] < step["ended_s"] and 32 <= step["num_tokens"] <= 32 * 5
        for step in recorder.steps
    )
    assert {str(parameter.dtype) for parameter in trainer.model.parameters()} == {"torch.float32"}


def test_adapters_of_a_job_are_trained_and_held_out_prompts_scored_on_the_way(tmp_path: Path) -> None:
    from benchmarks._trl_trainer import HeldOut, Recorder, make_trainer

    model = tiny_model_folder(tmp_path, hidden_size=16, num_layers=1)
    spec = job_spec(
        model__path=str(model),
        iterations=3,
        trainer__lora={"rank": 4, "alpha": 8.0},
        evaluation={"num_prompts": 6, "prompts_per_batch": 4, "every_iterations": 2},
    )
    held_out = HeldOut(spec, model)
    trainer = make_trainer(spec, tmp_path, Recorder(spec), {}, [held_out])
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert {name.rpartition("lora_")[2] for name in trained} == {"A.default.weight", "B.default.weight"}
    assert not [name for name in trained if "lm_head" in name or "embed" in name]
    assert {parameter.shape[0] for name, parameter in trainer.model.named_parameters() if "lora_A" in name} == {4}
    trainer.train()
    assert [score["version"] for score in held_out.scores] == [0, 2, 3]
    assert all(score["prompts"] == 6 and 0.0 <= score["sampled"] <= 1.0 for score in held_out.scores)


def test_what_is_trained_is_the_same_without_evaluations_on_the_way(tmp_path: Path) -> None:
    from benchmarks._trl_trainer import HeldOut, Recorder, make_trainer

    model = tiny_model_folder(tmp_path, hidden_size=16, num_layers=1)
    spec = job_spec(
        model__path=str(model),
        iterations=2,
        optimizer={"learning_rate": 1e-3},
        evaluation={"num_prompts": 6, "prompts_per_batch": 4, "every_iterations": 1},
    )
    sampled: list[list[tuple[float, float]]] = []
    for callbacks in ([], [HeldOut(spec, model)]):
        recorder = Recorder(spec)
        make_trainer(spec, tmp_path, recorder, {}, callbacks).train()
        sampled.append([(step["reward_mean"], step["num_tokens"]) for step in recorder.steps])
    assert sampled[0] == sampled[1]


def test_the_configuration_is_the_jobs_and_may_be_overridden(tmp_path: Path) -> None:
    from benchmarks._trl_trainer import config_of

    spec = job_spec(optimizer__beta2=0.95, seed=3, rollout__sampling__repetition_penalty=1.2)
    config = config_of(spec, tmp_path, json.loads('{"per_device_train_batch_size": 16}'))
    assert (config.seed, config.num_generations, config.max_completion_length, config.max_steps) == (3, 4, 5, 4)
    assert (config.epsilon, config.epsilon_high, config.beta, config.loss_type) == (0.2, 0.28, 0.0, "dapo")
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay) == (0.9, 0.95, 0.0)
    assert (config.temperature, config.top_p, config.top_k, config.repetition_penalty) == (1.0, 1.0, 0, 1.2)
    assert config.per_device_train_batch_size == 16
    assert config_of(spec, tmp_path, {}).per_device_train_batch_size == 32


SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"schedule": "linear"}, {"lr_scheduler_type": "linear"}),
    "cosine that ends above 0": (
        {"schedule": "cosine", "min_learning_rate": 1e-4},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
    ),
    "warm-up, stable, decay": (
        {"schedule": "wsd", "decay_iterations": 4, "min_learning_rate": 1e-4},
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 4, "decay_type": "linear", "min_lr_ratio": 0.1},
        },
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_its_trainer(tmp_path: Path, name: str) -> None:
    """From the end of the warm-up on: its own begins with a step of 0, or at the rate that a decay ends with."""
    ours, theirs = SCHEDULES[name]
    spec = job_spec(iterations=12, optimizer={"learning_rate": 1e-3, "warmup_iterations": 3} | ours)
    trainer = trl_trainer(
        tiny_model_folder(tmp_path, hidden_size=16, num_layers=1), learning_rate=1e-3, warmup_steps=3, **theirs
    )
    scheduler = trainer.create_scheduler(12, torch.optim.SGD([torch.zeros(1)], lr=1e-3))
    rates = []
    for _ in range(12):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    found = [learning_rate_at(number, spec.optimizer, 12) for number in range(12)]
    assert rates[3:] == pytest.approx(found[3:])
    assert len(set(found)) > 4


def test_weight_decay_acts_on_the_matrices_of_its_trainer_but_for_embeddings(tmp_path: Path) -> None:
    trainer = trl_trainer(tiny_model_folder(tmp_path, hidden_size=16, num_layers=1))
    tied = "model.embed_tokens.weight", "lm_head.weight"
    groups = groups_of(dict(trainer.model.named_parameters()), OptimizerSpec(weight_decay=0.1), embeddings=tied)
    decayed = {name for name, (_, decay) in groups.items() if decay}
    assert decayed == {*trainer.get_decay_parameter_names(trainer.model)}.difference(tied)
    assert len(decayed) > 4
