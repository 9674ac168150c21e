"""A new term is one file and its line in the table: the loss, the gradient, the metric and its documentation follow."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.learner import Learner
from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import make_micro_batch
from consumer.gradient.statistics import Update, iteration_scaling
from consumer.gradient.terms import table
from consumer.gradient.terms.table import terms_of_job
from consumer.model.policy import Policy
from consumer.trainer.iteration import Iteration
from contracts.encoding.wire import decode_json, encode_json
from contracts.events import IterationMetrics, TrajectoryMetrics
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from docs.make_loss_terms import PAGE, ROOT, loss_terms_page
from gateway.run_files import columns_of
from onbeat.loop.window import AskedIteration
from tests.builders import DIGEST, job_spec
from tests.contract.test_streamed_gradient import (
    assert_same_bits_in_any_order,
    iteration_of,
    relative_error,
    streamed_gradient,
)
from tests.contract.test_streamed_losses import models
from tests.unit.consumer.gradient.terms.confidence_term import ConfidenceTerm

COEFFICIENT = 0.25


@pytest.fixture(name="spec")
def spec_with_the_new_term(monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    """A job of whose loss the new term is one, by its line in the table."""
    monkeypatch.setattr(table, "TERMS", (*table.TERMS, ConfidenceTerm))
    return job_spec(algorithm={"loss": "dapo"})


def logprobs_of(policy: Policy, batches: list[RolloutBatch]) -> Tensor:
    """Returns log pi of every sampled token of the batches, [N]."""
    found = []
    for batch in batches:
        micro_batch = make_micro_batch(batch, advantages=torch.zeros(len(batch.groups), batch.group_size).numpy())
        found.append(response_logprobs(policy.model, micro_batch, 1.0)[micro_batch.loss_mask])
    return torch.cat(found)


def learner_of(policy: Policy, spec: JobSpec, batches: list[RolloutBatch]) -> Learner:
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=len(batches))
    return Learner(spec=spec, policy=policy, optimizer=cast(Any, None), accumulator=accumulator, reference=None)


def test_its_gradient_is_added_to_the_others(tmp_path: Path, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batches = models(tmp_path, float64=True)[0], iteration_of()
    gradients = streamed_gradient(policy, batches, spec)
    logprobs = logprobs_of(policy, batches)
    # dapo divides by the tokens of the iteration.
    loss = COEFFICIENT * (logprobs.square() / 2.0).sum() / logprobs.numel()
    parameters = policy.trained_parameters()
    own = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    monkeypatch.undo()
    without = streamed_gradient(policy, batches, spec)
    assert relative_error(gradients, {name: without[name] + own[name] for name in own}) < 1e-8
    assert relative_error(gradients, without) > 0.01


def test_its_gradient_has_the_same_bits_in_any_order_of_the_batches(tmp_path: Path, spec: JobSpec) -> None:
    policy = models(tmp_path, float64=False)[0]
    assert_same_bits_in_any_order(lambda batches: streamed_gradient(policy, batches, spec), iteration_of(), orders=3)


def test_its_metric_is_in_the_iterations_line_and_among_the_curves_of_the_page(tmp_path: Path, spec: JobSpec) -> None:
    policy, batches = models(tmp_path, float64=False)[0], iteration_of()
    learner = learner_of(policy, spec, batches)
    asked = AskedIteration(number=0, weights_digest=DIGEST, batches=(), samplers={0: DIGEST})
    iteration = Iteration(asked, trainer_epoch=1)
    iteration.record(*(learner.train(batch) for batch in batches))
    scaling = iteration_scaling(iteration.stats, spec.algorithm)
    updates = [Update(stats=iteration.stats, scaling=scaling, grad_norm=1.0)]
    numbers = iteration.numbers(updates, scaling=scaling, terms=terms_of_job(spec))
    line = encode_json(iteration.metrics(updates, numbers, learning_rate=1e-3))
    metrics = decode_json(line, IterationMetrics)
    with torch.no_grad():
        expected = float(logprobs_of(policy, batches).mean())
    assert metrics.loss_metrics["mean_confidence"] == pytest.approx(expected, rel=1e-5)
    assert metrics.numbers()["mean_confidence"] == metrics.loss_metrics["mean_confidence"]
    assert columns_of([metrics])["mean_confidence"] == pytest.approx((expected,), rel=1e-4)


def test_its_docstring_and_the_meaning_of_its_metric_are_the_documentation(spec: JobSpec) -> None:
    page = loss_terms_page()
    assert "## `confidence`\n\nHalf the square of log π at each sampled token" in page
    assert "| `mean_confidence` | Mean of log π over the trained tokens, in nats. |" in page


def test_the_example_of_the_docs_is_this_term() -> None:
    assert f"```python\n{inspect.getsource(ConfidenceTerm)}```" in (ROOT / "docs" / "change.md").read_text()


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == loss_terms_page(), "python -m docs.make_loss_terms > docs/loss-terms.md"


def test_two_terms_with_one_name_for_a_sum_are_refused(
    tmp_path: Path, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "TERMS", (*table.TERMS, ConfidenceTerm))
    policy, batches = models(tmp_path, float64=False)[0], iteration_of()
    with pytest.raises(ValueError, match="two terms of the loss sum `confidence`"):
        learner_of(policy, spec, batches).train(batches[0])


def test_each_term_has_a_name_and_each_metric_one_meaning_and_no_other_number_of_an_iteration_has_its_name() -> None:
    names = [term.name for term in table.TERMS]
    assert len(names) == len(set(names))
    meanings: dict[str, str] = {}
    for term in table.TERMS:
        for metric in term.metrics:
            assert meanings.setdefault(metric.name, metric.meaning) == metric.meaning
            assert metric.name not in IterationMetrics.__struct_fields__
            assert metric.name not in TrajectoryMetrics.__struct_fields__
