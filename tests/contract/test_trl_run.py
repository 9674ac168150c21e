"""What TRL's trainer does around its loss, by transformers' own code: what it draws from, which version is best, when a
run ends, what an evaluation's score is, how 8-bit AdamW steps.

TRL is no dependency of the project: `make test-trl` installs it beside it, and runs this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from consumer.gradient.optimizer import PolicyOptimizer
from consumer.model.checkpoint import keep_newest_and_best
from contracts.encoding.wire import convert
from contracts.jobs import EvaluationScore
from contracts.run_folder import CHECKPOINT, numbered
from contracts.sampling import SamplingParams
from contracts.spec.trainer import OptimizerSpec
from onbeat.data.sampled_values import Contexts
from onbeat.loop.expected import evaluation_score
from onbeat.loop.health.history import LOST
from onbeat.loop.health.rules import Health
from producer.engine.sampling import log_distribution
from tests.builders import batch_of, job_spec, prompt_batch, rollout, step_on_grads, tiny_model_folder
from tests.contract.golden_files import iteration_metrics
from tests.trl_cases import trl_trainer

pytest.importorskip("trl", reason="TRL is not installed: `make test-trl` runs this in an environment that has it")

NUM_ROWS, NUM_TOKENS = 32, 50
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "all, with a penalty": {"temperature": 0.8, "top_k": 9, "top_p": 0.7, "repetition_penalty": 1.7},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("trl"), hidden_size=16, num_layers=1)


@pytest.mark.parametrize("case", SAMPLED)
def test_tokens_are_drawn_from_what_trl_draws_them_from(model_folder: Path, case: str) -> None:
    """The same kept set of each row, and the same log-probs over it."""
    trainer = trl_trainer(model_folder, **SAMPLED[case])
    draw = torch.Generator().manual_seed(7)
    logits = 3.0 * torch.randn((NUM_ROWS, NUM_TOKENS), generator=draw, dtype=torch.float64)
    before = torch.randint(NUM_TOKENS, (NUM_ROWS, 6), generator=draw)
    processors = trainer.model._get_logits_processor(
        trainer.generation_config, input_ids_seq_length=before.shape[1], device="cpu"
    )
    theirs = processors(before, logits.clone()).log_softmax(dim=-1).numpy()

    sampling = convert({"max_new_tokens": 5} | SAMPLED[case], SamplingParams)
    contexts = Contexts(
        sampling=sampling,
        end_ids=np.array([], dtype=np.int64),
        num_new=np.full(NUM_ROWS, 6),
        seen=lambda row: before[row].unique().numpy(),
    )
    ours = log_distribution(logits.numpy().copy(), sampling, contexts if sampling.processing else None)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    whole = logits.log_softmax(dim=-1).numpy()
    assert not np.allclose(ours, whole, atol=0.01)


SCORES = {
    "rises": (0.1, 0.2, 0.3, 0.4),
    "equal ones": (0.3, 0.5, 0.5, 0.4),
    "falls": (0.6, 0.5, 0.2, 0.1),
    "comes back": (0.1, 0.7, 0.2, 0.6),
}


@pytest.mark.parametrize("case", SCORES)
def test_the_best_version_is_that_of_its_trainer(model_folder: Path, tmp_path: Path, case: str) -> None:
    """`metric_for_best_model` of a reward: of equal scores the first."""
    trainer = trl_trainer(model_folder, metric_for_best_model="reward", greater_is_better=True)
    best = 0
    for version, score in enumerate(SCORES[case], start=1):
        if trainer._determine_best_metric({"eval_reward": score}, trial=None):
            best = version
        (tmp_path / f"{CHECKPOINT}{version - 1:06d}").mkdir()
    keep_newest_and_best(tmp_path, 1, scores=dict(enumerate(SCORES[case], start=1)))
    kept = {iteration + 1 for iteration, _ in numbered(tmp_path, CHECKPOINT)}
    assert kept == {best, len(SCORES[case])}


def ended_by_transformers(scores: list[float], *, patience: int) -> int | None:
    """The evaluation after which EarlyStoppingCallback ends a run; None where none is."""
    from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

    callback, state, control = EarlyStoppingCallback(patience), TrainerState(), TrainerControl()
    given = TrainingArguments(metric_for_best_model="reward", greater_is_better=True, report_to=[], use_cpu=True)
    for number, score in enumerate(scores):
        callback.on_evaluate(given, state, control, {"eval_reward": score})
        if state.best_metric is None or score > state.best_metric:
            state.best_metric = score
        if control.should_training_stop:
            return number
    return None


def ended_by_health(scores: list[float], *, num_prompts: int = 400) -> int | None:
    """The evaluation after which `stop_on = ["score_collapsed"]` ends a job; None where none is."""
    spec = job_spec(iterations=len(scores) + 1, evaluation__every_iterations=1)
    health = Health(spec)
    for number, score in enumerate(scores):
        health.score(EvaluationScore(iteration=number, policy_version=number, sampled=score, num_prompts=num_prompts))
        found = health.iteration(iteration_metrics(iteration=number, reward_mean=score, reward_std=0.2))
        if any(problem.rule == "score_collapsed" for problem in found):
            return number
    return None


def test_an_end_by_score_comes_where_transformers_would_end_and_never_of_noise() -> None:
    """A score that rises and then surely loses half ends both after the same evaluation. EarlyStoppingCallback
    also ends a run that no longer improves; ours does not."""
    rises = [0.1 + 0.02 * number for number in range(20)]
    collapsed = [*rises, LOST * rises[-1] - 0.05]
    assert ended_by_health(collapsed) == ended_by_transformers(collapsed, patience=1) == len(rises)
    assert ended_by_health(rises) is ended_by_transformers(rises, patience=1) is None
    draw = np.random.default_rng(3)
    noisy = (0.5 + 0.03 * draw.standard_normal(30)).tolist()
    assert ended_by_transformers(noisy, patience=3) is not None
    assert ended_by_health(noisy) is None
    assert ended_by_health([*noisy, 0.2]) == 30


@pytest.mark.parametrize("num_samples", [1, 4])
def test_the_score_of_an_evaluation_is_the_reward_that_trl_logs(model_folder: Path, num_samples: int) -> None:
    """TRL's mean over one batch of held-out completions under `num_generations_eval`."""
    draw = torch.Generator().manual_seed(2)
    rewards = torch.rand((8, num_samples), generator=draw, dtype=torch.float64)
    trainer = trl_trainer(model_folder, num_generations_eval=num_samples, per_device_eval_batch_size=8 * num_samples)
    trainer.model.eval()
    trainer._calculate_rewards = lambda *_: rewards.reshape(-1, 1)
    count = rewards.numel()
    trainer._generate = lambda prompts: ([[5]] * count, [[7]] * count, None, ["7"] * count, None, {}, None, None)
    trainer._generate_and_score_completions([{"prompt": "1+1="}] * count)

    asked = prompt_batch([[5]] * 8, batch_id="0/eval/0", purpose="eval", group_size=num_samples)
    arrived = batch_of([([5], [rollout([7], one) for one in row]) for row in rewards.tolist()], batch_id="0/eval/0")
    score = evaluation_score([asked], {asked.batch_id: arrived}, job_spec().evaluation)
    assert score is not None
    assert score.sampled == pytest.approx(trainer._metrics["eval"]["reward"][-1], rel=1e-6)
    assert 0.2 < score.sampled < 0.8


def test_8_bit_adamw_steps_as_its_trainers(model_folder: Path) -> None:
    """`optim = "adamw_8bit"` of transformers: the same bits after each step, of a matrix that is quantised and of one
    that is too small to be."""
    pytest.importorskip("bitsandbytes", reason="it is the extra adamw8bit")
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in (("large", (70, 100)), ("small", (10, 10)))}
    ours, theirs = ({name: nn.Parameter(one.clone()) for name, one in weights.items()} for _ in range(2))
    options: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1e9}
    optimizer = PolicyOptimizer(ours, OptimizerSpec(type="adamw_8bit", beta2=0.95, **options))
    trainer = trl_trainer(model_folder, optim="adamw_8bit", adam_beta2=0.95, **options)
    kind, given = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    other = kind([{"params": list(theirs.values()), "weight_decay": 0.1}], **given)
    for _ in range(6):
        for name, parameter in theirs.items():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.stepped[name].grad = parameter.grad.clone()
        step_on_grads(optimizer, 1e-2)
        other.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in weights)
    assert other.state[theirs["large"]]["state1"].dtype is torch.uint8
    assert not torch.equal(ours["large"], weights["large"])
