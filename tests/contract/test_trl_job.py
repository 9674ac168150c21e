"""What `onbeat bench trl` gives TRL is the job: its prompts in their order, its learning rates, its rewards.

TRL is no dependency of the project: `make test-trl` installs it beside it, and runs this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from consumer.gradient.optimizer import learning_rate_at
from contracts.spec_tables.root import SpecRoot
from onbeat.prompts.source import prompt_source
from tests.builders import char_tokenizer, job_spec, tiny_model_folder

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

    source = prompt_source(spec, root=SpecRoot(model), tokenizer=char_tokenizer(), context_tokens=64)
    ours = [[prompt.text for prompt in source.training_prompts(number)] for number in range(spec.iterations)]
    assert asked == [[text for text in texts for _ in range(spec.rollout.group_size)] for texts in ours]
    assert rates == pytest.approx([learning_rate_at(number, spec.optimizer, 3) for number in range(3)])
    assert [step["num_completions"] for step in recorder.steps] == [32, 32, 32]
    assert all(
        step["started_s"] < step["generated_s"] < step["ended_s"] and 32 <= step["num_tokens"] <= 32 * 5
        for step in recorder.steps
    )
    assert {str(parameter.dtype) for parameter in trainer.model.parameters()} == {"torch.float32"}


def test_the_configuration_is_the_jobs_and_may_be_overridden(tmp_path: Path) -> None:
    from benchmarks._trl_trainer import config_of

    spec = job_spec(algorithm__clip_high=0.28, optimizer__beta2=0.95, seed=3, rollout__sampling__repetition_penalty=1.2)
    config = config_of(spec, tmp_path, json.loads('{"per_device_train_batch_size": 16}'))
    assert (config.seed, config.num_generations, config.max_completion_length, config.max_steps) == (3, 4, 5, 4)
    assert (config.epsilon, config.epsilon_high, config.beta, config.loss_type) == (0.2, 0.28, 0.0, "grpo")
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay) == (0.9, 0.95, 0.0)
    assert (config.temperature, config.top_p, config.top_k, config.repetition_penalty) == (1.0, 1.0, 0, 1.2)
    assert config.per_device_train_batch_size == 16
    assert config_of(spec, tmp_path, {}).per_device_train_batch_size == 32
