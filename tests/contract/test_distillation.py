"""On-policy distillation: the gradient of the divergence from the teacher, alone and beside every loss (I7).

The teacher's log-probs come as columns of the batch, as a stage makes them; the equation is that of
tests/loss_equations.py, written out token by token in float64.
"""

from __future__ import annotations

import math
import random
import struct
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from consumer.gradient.statistics import iteration_numbers, iteration_scaling
from consumer.gradient.terms.base import needs_every_row
from consumer.gradient.terms.distillation import reverse_kl
from consumer.gradient.terms.table import terms_of_job
from consumer.model import language_head
from consumer.model.language_head import Summary
from consumer.model.policy import Policy
from consumer.model.teachers import WholeVocabulary, bits_of, divergence_from, head_digest, likeliest, teacher_of
from contracts.encoding.arrays import pack_float32, unpack_float32
from contracts.encoding.wire import convert
from contracts.errors import ContractViolation, InvalidInput
from contracts.experience.columns import check_values, row_shapes
from contracts.rollouts import RolloutBatch
from contracts.sampling import SamplingParams
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.stages import NO_LOGPROB
from onbeat.stages.log_prob_model import frozen_values
from tests.builders import VOCABULARY, job_spec, judged_spec, rollout_batch
from tests.building.specs import SpecBuilder
from tests.chaos.short_job import long_variant
from tests.contract.test_kept_sets import END, PROCESSED, changed_by, kept_iteration
from tests.contract.test_lagged_losses import AS_SAMPLED, CORRECTIONS, Lagged, asked_again, lagged, updates_of  # noqa: F401
from tests.contract.test_streamed_gradient import (
    assert_same_bits_in_any_order,
    iteration_of,
    relative_error,
    streamed_gradient,
)
from tests.contract.test_streamed_losses import models
from tests.contract.test_updates import gradient_of_responses, moved_from, responses_of, two_updates
from tests.loss_equations import Response

TEACHER: dict[str, Any] = {"type": "teacher", "model": "teacher"}
BY_SOURCE: dict[str, Any] = {"type": "teacher", "models": {"sums": "teacher"}}
ALONE: dict[str, Any] = {"advantage": "none", "distillation_coefficient": 0.7}
ALONE_EQUATION: dict[str, Any] = {"advantage": "none", "distil": 0.7}
BESIDE: dict[str, Any] = {"distillation_coefficient": 0.3}
MIXTURE: dict[str, Any] = {
    "type": "mixture",
    "sources": [{"name": name, "dataset": {"type": "addition"}} for name in ("sums", "more")],
}
TOP: dict[str, Any] = {"name": "teacher_top", "type": "float32", "per": "token"}
MINE: dict[str, Any] = {
    "type": "external",
    "name": "mine",
    "inputs": ["prompt_ids", "completion_ids"],
    "outputs": [{"name": "teacher_logprobs", "type": "float32", "per": "token"}],
}
NARROW: dict[str, Any] = {"clip_low": 0.02, "clip_high": 0.03}
NARROW_EQUATION: dict[str, Any] = {"eps_low": 0.02, "eps_high": 0.03}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": (ALONE, ALONE_EQUATION),
    "alone, mean over tokens": (ALONE | {"loss": "dapo"}, ALONE_EQUATION | {"loss": "dapo"}),
    "alone, against the generator": (ALONE | {"old_policy": "generator"}, ALONE_EQUATION | {"old_is_generator": True}),
    "alone, tis": (ALONE | {"correction": "tis"}, ALONE_EQUATION | {"correction": "tis", "w_high": 2.0}),
    "beside grpo": (BESIDE | NARROW, {"distil": 0.3} | NARROW_EQUATION),
    "beside dr_grpo": (
        BESIDE | NARROW | {"loss": "dr_grpo", "advantage": "dr_grpo"},
        {"distil": 0.3, "loss": "dr_grpo", "advantage": "dr_grpo"} | NARROW_EQUATION,
    ),
    "beside gspo": (
        BESIDE | {"loss": "gspo", "clip_low": 0.005, "clip_high": 0.006},
        {"distil": 0.3, "loss": "gspo", "eps_low": 0.005, "eps_high": 0.006},
    ),
    "beside cispo and icepop": (
        BESIDE | NARROW | {"loss": "cispo", "correction": "icepop", "correction_low": 0.1, "correction_high": 9.0},
        {"distil": 0.3, "loss": "cispo", "correction": "icepop", "w_low": 0.1, "w_high": 9.0} | NARROW_EQUATION,
    ),
    "beside bnpo, KL and entropy": (
        BESIDE | NARROW | {"loss": "bnpo", "kl_coefficient": 0.1, "entropy_coefficient": 0.02},
        {"distil": 0.3, "loss": "bnpo", "beta": 0.1, "alpha": 0.02} | NARROW_EQUATION,
    ),
}


def taught(
    batch: RolloutBatch, *, seed: int = 0, num_likely: int = 0, states_for: WholeVocabulary | None = None
) -> RolloutBatch:
    """The batch with log-probs of some teacher, and with as many likely tokens of it as are asked for, or states."""
    draw, lengths = random.Random(f"{batch.batch_id}/{seed}"), [one.num_sampled for one in row_shapes(batch)]
    columns = {"teacher_logprobs": tuple(pack_float32(draw.uniform(-4.0, -0.1) for _ in range(n)) for n in lengths)}
    if num_likely:
        logprobs = [-math.log(num_likely + 1)] * (num_likely + 1)
        ids = [[draw.sample(range(3, len(VOCABULARY)), num_likely) for _ in range(length)] for length in lengths]
        columns["teacher_top"] = tuple(pack_float32(n for of in row for n in (*of, *logprobs)) for row in ids)
    if states_for is not None:
        # bfloat16 of 15 bits at most: none has the exponent of what is no number.
        halves = [[draw.randrange(0x3F80) for _ in range(2 * states_for.width * length)] for length in lengths]
        columns["teacher_states"] = tuple(struct.pack(f"<{len(row)}H", *row) for row in halves)
        columns["teacher_head"] = tuple(next(iter(states_for.heads)).encode() for _ in lengths)
    return msgspec.structs.replace(batch, columns=columns)


def with_teacher(responses: list[Response], batches: list[RolloutBatch]) -> list[Response]:
    columns: list[bytes] = []
    for batch in batches:
        assert isinstance(batch.columns, dict)
        columns += batch.columns["teacher_logprobs"]
    found = [torch.tensor(unpack_float32(column), dtype=torch.float64) for column in columns]
    return [
        with_fields(response, teacher_logprobs=logprobs) for response, logprobs in zip(responses, found, strict=True)
    ]


distilled_job = SpecBuilder(stages=[TEACHER])


@pytest.mark.parametrize("case", CASES)
def test_both_updates_are_their_equation(tmp_path: Path, case: str) -> None:
    algorithm, equation = CASES[case]
    pair, batches = models(tmp_path, float64=True), [taught(batch) for batch in iteration_of()]
    before = with_teacher(responses_of(pair, batches), batches)
    expected = gradient_of_responses(pair, before, equation)
    first, second, stats = two_updates(pair, batches, algorithm, stages=[TEACHER])
    assert relative_error(first, expected) < 1e-8
    moved = moved_from(before, with_teacher(responses_of(pair, batches), batches))
    assert relative_error(second, gradient_of_responses(pair, moved, equation)) < 1e-8
    spec = distilled_job(algorithm=algorithm)
    scaling = iteration_scaling(stats, spec.algorithm)
    numbers = iteration_numbers(stats, scaling=scaling, terms=terms_of_job(spec))
    assert numbers.loss_metrics["kl_to_teacher"] == pytest.approx(mean_k3(moved), rel=1e-6)


def mean_k3(responses: list[Response]) -> float:
    values = []
    for response in responses:
        assert response.teacher_logprobs is not None
        gap = response.teacher_logprobs - response.logprobs.detach()
        values += (gap.exp() - gap - 1.0).tolist()
    return sum(values) / len(values)


@pytest.mark.parametrize("correction", ["tis", "decoupled_ppo", "decoupled_ppo by sequence", AS_SAMPLED])
def test_each_update_over_lagged_batches_is_its_equation(lagged: Lagged, correction: str) -> None:  # noqa: F811
    of_correction = CORRECTIONS[correction]
    batches = [taught(batch) for batch in lagged.batches]
    staged = with_fields(lagged, batches=batches)
    spec = job_spec(
        schedule="bounded",
        max_policy_lag=2,
        deterministic=False,
        algorithm=ALONE | of_correction[0] | {"updates_per_iteration": 2},
        stages=[TEACHER],
    )
    equation = ALONE_EQUATION | of_correction[1]
    for gradients, _ in updates_of(staged, spec):
        for mu, is_right in ((lagged.sampled_logprobs, True), (lagged.newest_logprobs, False)):
            responses = with_teacher(asked_again(staged, mu=mu), batches)
            error = relative_error(gradients, gradient_of_responses(lagged.pair, responses, equation))
            # float32 carries log mu: hence the tolerance. The newest version did not sample all of it.
            assert error < 1e-6 if is_right else error > 0.01


def reading(policy: Policy, spec: JobSpec) -> Policy:
    """The policy as a trainer has it that reads likely tokens."""
    return with_fields(policy, teacher=teacher_of(StackSettings(), spec, policy))


def told_by(teacher: Policy, batches: list[RolloutBatch], stage: dict[str, Any], **options: Any) -> list[RolloutBatch]:
    """The batches with the columns of a stage that asks the teacher."""
    spec, made = distilled_job(algorithm=ALONE | {"distillation_beta": 0.0}, stages=[stage], **options), []
    summaries: dict[str, Summary] = {
        "top_k": lambda one, *_: likeliest(one, stage["top_k"], num_tokens=len(VOCABULARY)),
        "hidden_size": lambda _, states, __: bits_of(states, torch.float32),
    }
    for batch in batches:
        values = frozen_values(teacher, batch, spec=spec, summary=summaries[[*stage][-1]])
        if "hidden_size" in stage:
            values = [(*of_row, head_digest(teacher.model).encode()) for of_row in values]
        columns = {
            column.name: of for column, of in zip(spec.stage_graph.outputs, zip(*values, strict=True), strict=True)
        }
        check_values(columns, spec.stage_graph.outputs, row_shapes(batch), of="the stage")
        made.append(msgspec.structs.replace(batch, columns=columns))
    return made


def has_head_of(teacher: Policy, policy: Policy, spec: JobSpec) -> Policy:
    """The policy as a trainer has it that holds the teacher's head."""
    reads = WholeVocabulary(
        beta=spec.algorithm.distillation_beta or 0.0,
        width=spec.stages[0].outputs[1].width or 0,
        dtype=torch.float32,
        heads={head_digest(teacher.model): teacher.model},
    )
    return with_fields(policy, teacher=reads)


PROCESSING: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.7} | PROCESSED["all, penalty"]
OF_MANY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "forward, 3 tokens": (ALONE | {"distillation_beta": 0.0}, ALONE_EQUATION | {"distil_beta": 0.0, "top_k": 3}),
    "reverse, 1 token, changed logits": (
        ALONE | {"distillation_beta": 1.0},
        ALONE_EQUATION | {"distil_beta": 1.0, "top_k": 1},
    ),
    "Jensen-Shannon, padded, in chunks": (
        ALONE | {"distillation_beta": 0.3, "loss": "dapo"},
        ALONE_EQUATION | {"distil_beta": 0.3, "top_k": 5, "loss": "dapo"},
    ),
    "the whole vocabulary beside cispo, icepop, KL and entropy, changed logits": (
        BESIDE
        | NARROW
        | {"loss": "cispo", "correction": "icepop", "kl_coefficient": 0.1, "entropy_coefficient": 0.02}
        | {"distillation_beta": 0.5},
        {"distil": 0.3, "distil_beta": 0.5, "top_k": len(VOCABULARY), "loss": "cispo", "beta": 0.1, "alpha": 0.02}
        | {"correction": "icepop", "w_low": 0.5, "w_high": 5.0, **NARROW_EQUATION},
    ),
    "forward, hidden states": (
        ALONE | {"distillation_beta": 0.0},
        ALONE_EQUATION | {"distil_beta": 0.0, "top_k": len(VOCABULARY)},
    ),
    "reverse, hidden states, changed logits": (
        ALONE | {"distillation_beta": 1.0},
        ALONE_EQUATION | {"distil_beta": 1.0, "top_k": len(VOCABULARY)},
    ),
    "Jensen-Shannon, hidden states, padded, in chunks, beside KL and entropy": (
        BESIDE | NARROW | {"kl_coefficient": 0.1, "entropy_coefficient": 0.02, "distillation_beta": 0.3},
        {"distil": 0.3, "distil_beta": 0.3, "top_k": len(VOCABULARY), "beta": 0.1, "alpha": 0.02} | NARROW_EQUATION,
    ),
}


@pytest.mark.parametrize(
    ("case", "is_truncated"),
    [
        # Each case has one of both; the other one is a long variant.
        pytest.param(case, is_truncated, marks=() if is_truncated == bool(number % 2) else long_variant)
        for number, case in enumerate(OF_MANY)
        for is_truncated in (False, True)
    ],
)
def test_a_divergence_of_distributions_is_its_equation_in_both_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, is_truncated: bool
) -> None:
    """The distributions are those that tokens were drawn from: over what was kept, of the changed logits."""
    algorithm, equation = OF_MANY[case]
    options: dict[str, Any] = {"rollout__sampling": PROCESSING} if "changed logits" in case else {}
    changed = changed_by(convert(PROCESSING, SamplingParams), END) if options else None
    if "in chunks" in case:
        options = {"trainer__packing": "padded", "trainer__max_tokens_per_micro_batch": 40}
        monkeypatch.setattr(language_head, "CHUNK_LOGITS", 3 * len(VOCABULARY))
    pair: Any = tuple(with_fields(one, end_ids=frozenset({END})) for one in models(tmp_path, float64=True))
    batches, stage = iteration_of(), TEACHER | {"top_k": equation["top_k"]}
    if "hidden states" in case:
        stage = TEACHER | {"hidden_size": pair[1].model.config.hidden_size}
    batches = told_by(pair[1], kept_iteration(batches) if is_truncated else batches, stage, **options)
    spec = distilled_job(algorithm=algorithm, stages=[stage], **options)
    pair = (has_head_of(pair[1], pair[0], spec) if "hidden states" in case else reading(pair[0], spec), pair[1])
    before = responses_of(pair, batches, changed)
    expected = gradient_of_responses(pair, before, equation)
    first, second, _ = two_updates(pair, batches, algorithm, stages=[stage], **options)
    # float32 carries the teacher's numbers: hence the tolerance.
    assert relative_error(first, expected) < 1e-6
    for eq, is_right in ((equation, True), (equation | {"top_k": 2, "distil_beta": 0.9}, False)):
        moved = moved_from(before, responses_of(pair, batches, changed))
        error = relative_error(second, gradient_of_responses(pair, moved, eq))
        assert error < 1e-6 if is_right else error > 0.01


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_it_is_that_of_the_whole_vocabulary_with_all_tokens_and_less_with_fewer(beta: float) -> None:
    draw = torch.Generator().manual_seed(1)
    policy, teacher = ((3.0 * torch.randn((6, 11), generator=draw, dtype=torch.float64)) for _ in range(2))
    policy[:, 7], teacher[:, 7] = -1e20, -1e20  # what may not be drawn yet
    policy.requires_grad_()
    p, q = policy.log_softmax(dim=-1), teacher.log_softmax(dim=-1)
    m = (beta * q.exp() + (1.0 - beta) * p.exp() + 1e-300).log()
    left = {0.0: q.exp() * (q - p), 1.0: p.exp() * (p - q)}
    whole = left.get(beta, beta * q.exp() * (q - m) + (1.0 - beta) * p.exp() * (p - m))
    expected = whole.masked_fill(torch.arange(11) == 7, 0.0).sum(dim=-1)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), policy, retain_graph=True)
    of_fewer = expected.detach()
    for k in range(11, 0, -1):
        found = divergence_from(p, likeliest(q, k, num_tokens=11), beta=beta)
        assert bool((found <= of_fewer + 1e-12).all())
        (gradient,) = torch.autograd.grad(found.sum(), policy, retain_graph=True)
        assert bool(gradient.isfinite().all())
        if k >= 10:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
        of_fewer = found.detach()
    assert bool((of_fewer < 0.9 * expected).any())
    agreeing = divergence_from(p, likeliest(p.detach(), 3, num_tokens=11), beta=beta)
    torch.testing.assert_close(agreeing, torch.zeros_like(agreeing), rtol=0.0, atol=1e-12)


def test_of_equally_likely_tokens_the_lower_ones_are_the_likeliest_and_outputs_of_no_token_are_the_rest() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 9.0], [0.0] * 6])
    top = likeliest(logits.log_softmax(dim=-1), 3, num_tokens=5)
    assert top[:, :3].tolist() == [[0, 1, 3], [0, 1, 2]]
    assert top[1, 3:].exp().tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert top[:, 3:].exp().sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    kept = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf, -torch.inf, -torch.inf]]).log_softmax(dim=-1)
    assert likeliest(kept, 3, num_tokens=5)[0, [0, 1, 2, 5, 6]].tolist() == pytest.approx(
        [0, 2, -1, NO_LOGPROB, NO_LOGPROB]
    )


THIRDS = [-math.log(3.0)] * 3


@pytest.mark.parametrize(
    ("top", "problem"),
    [
        ([7, 7, *THIRDS], "token 0 has no different ids"),
        ([7.5, 8, *THIRDS], "token 0 has no different ids"),
        ([-1, 7, *THIRDS], "token 0 has no different ids"),
        ([7, -1, *THIRDS], "token 0 has no different ids"),
        ([7, 8, -0.7, NO_LOGPROB, -0.7], "token 0 has no different ids"),
        ([7, 8, -3.0, -3.0, -3.0], "add up to 1"),
        ([7, 1000, *THIRDS], "outside the vocabulary"),
    ],
)
def test_what_is_no_distribution_is_refused(tmp_path: Path, top: list[float], problem: str) -> None:
    batch = taught(rollout_batch())
    assert isinstance(batch.columns, dict)
    column = {"teacher_top": tuple(pack_float32(top * one.num_sampled) for one in row_shapes(batch))}
    spec = distilled_job(algorithm=ALONE | {"distillation_beta": 1.0}, stages=[TEACHER | {"top_k": 2}])
    policy = reading(models(tmp_path, float64=False)[0], spec)
    with pytest.raises(ContractViolation, match=problem):
        streamed_gradient(policy, [msgspec.structs.replace(batch, columns=batch.columns | column)], spec)
    with pytest.raises(ContractViolation, match="came without the column teacher_top"):
        streamed_gradient(policy, [batch], spec)


def test_its_mean_over_what_was_sampled_is_the_gradient_of_the_reverse_kl() -> None:
    """Every token of a small vocabulary by the probability that it was sampled with, in a later update."""
    draw = torch.Generator().manual_seed(0)
    logits, old, teacher = (torch.randn(7, generator=draw, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    old, teacher = old.log_softmax(0), teacher.log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    losses = reverse_kl(logprobs - old, logprobs, teacher)
    (sampled,) = torch.autograd.grad((old.exp() * losses).sum(), logits)
    torch.testing.assert_close(sampled, exact, rtol=1e-12, atol=1e-14)


def test_arrival_orders_give_the_same_bits(tmp_path: Path) -> None:
    pair, batches = models(tmp_path, float64=False), [taught(batch, num_likely=3) for batch in iteration_of()]
    spec = distilled_job(algorithm=BESIDE | {"distillation_beta": 0.5}, stages=[TEACHER | {"top_k": 3}])
    policy = reading(pair[0], spec)
    assert_same_bits_in_any_order(lambda batches: streamed_gradient(policy, batches, spec), batches, orders=4)


def test_a_teacher_that_agrees_teaches_nothing_and_one_that_does_not_teaches_every_row(tmp_path: Path) -> None:
    pair, batch = models(tmp_path, float64=False), rollout_batch(rewards=(1.0,))
    policy_logprobs = [pack_float32(response.logprobs.detach().tolist()) for response in responses_of(pair, [batch])]
    agreeing = msgspec.structs.replace(batch, columns={"teacher_logprobs": tuple(policy_logprobs)})
    gradients = streamed_gradient(pair[0], [agreeing], distilled_job(algorithm=ALONE))
    assert max(gradient.abs().max().item() for gradient in gradients.values()) < 1e-5
    gradients = streamed_gradient(pair[0], [taught(batch)], distilled_job(algorithm=ALONE))
    assert max(gradient.abs().max().item() for gradient in gradients.values()) > 1e-3


def test_a_batch_without_the_column_is_refused_and_never_trained_without_its_term(tmp_path: Path) -> None:
    pair = models(tmp_path, float64=False)
    with pytest.raises(ContractViolation, match="came without the column teacher_logprobs"):
        streamed_gradient(pair[0], [rollout_batch()], distilled_job(algorithm=BESIDE))
    with pytest.raises(ContractViolation, match="came without the column reference_logprobs"):
        streamed_gradient(
            pair[0], [rollout_batch()], job_spec(algorithm={"kl_coefficient": 0.1}, stages=[{"type": "reference"}])
        )


DIVERGES: dict[str, Any] = ALONE | {"distillation_beta": 0.0}
WIDE: dict[str, Any] = TEACHER | {"hidden_size": 4096}
LONG: dict[str, Any] = {"rollout__sampling": {"max_new_tokens": 1000}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"algorithm": BESIDE}, "distillation_coefficient: needs a stage that makes teacher_logprobs"),
        (
            {"stages": [TEACHER]},
            "makes teacher_logprobs, which nothing reads without algorithm.distillation_coefficient (set algorithm",
        ),
        (
            {"algorithm": ALONE, "stages": [TEACHER | {"top_k": 2}]},
            "without algorithm.distillation_beta (set algorithm",
        ),
        (
            {"algorithm": ALONE, "stages": [TEACHER | {"hidden_size": 8}]},
            "makes teacher_states, which nothing reads without",
        ),
        ({"algorithm": DIVERGES, "stages": [TEACHER | {"top_k": 2, "hidden_size": 8}]}, "leave top_k out"),
        (
            {"algorithm": DIVERGES, "stages": [WIDE], **LONG},
            "makes 131,072,000 bytes for the 8,000 tokens of a batch, more than limits.max_batch_bytes = 16,777,216",
        ),
        ({"algorithm": DIVERGES, "stages": [WIDE], **LONG, "model__dtype": "bfloat16"}, "makes 65,536,000 bytes"),
        (
            {"algorithm": DIVERGES, "stages": [WIDE], **LONG},
            "take top_k, use smaller batches, or raise limits.max_batch_bytes",
        ),
        (
            {
                "algorithm": DIVERGES,
                "stages": [TEACHER | {"top_k": 2}, MINE | {"outputs": [TOP | {"name": "teacher_states"}]}],
            },
            "without algorithm.distillation_beta and a teacher's hidden_size",
        ),
        (
            {"algorithm": BESIDE | {"distillation_beta": 0.0}, "stages": [TEACHER]},
            'makes teacher_top (add [[stages]] of type "teacher" with top_k or hidden_size',
        ),
        ({"algorithm": {"distillation_beta": 0.5}}, "distillation_beta: has no effect with distillation_coefficient"),
        ({"algorithm": ALONE, "stages": [BY_SOURCE]}, "stages[0].models: names `"),
        (
            {"algorithm": ALONE, "stages": [BY_SOURCE], "dataset": MIXTURE},
            "has no model for the source `more` of dataset.sources",
        ),
        (
            {"algorithm": ALONE, "stages": [BY_SOURCE | TEACHER], "dataset": MIXTURE},
            "or models has to name the teacher, and not both",
        ),
        ({"algorithm": ALONE, "stages": [{"type": "teacher"}]}, "or models has to name the teacher, and not both"),
        (
            {
                "algorithm": ALONE | {"distillation_beta": 0.0},
                "stages": [TEACHER | {"top_k": 4096}],
                "rollout__sampling": {"max_new_tokens": 1000},
            },
            "lower top_k, use smaller batches, or raise limits.max_batch_bytes",
        ),
        (
            {"algorithm": ALONE | {"distillation_beta": 0.0}, "stages": [TEACHER, MINE | {"outputs": [TOP]}]},
            'makes "teacher_top", which is read by the loss, in another form (make it a float32 of width 2 k + 1',
        ),
        (
            {"algorithm": ALONE, "stages": [MINE | {"outputs": [TOP | {"name": "teacher_logprobs", "width": 3}]}]},
            'makes "teacher_logprobs", which is read by the loss, in another form (make it a float32 per token',
        ),
        ({"algorithm": {"advantage": "none"}}, 'algorithm.advantage: "none" leaves nothing to learn from'),
        ({"algorithm": ALONE | {"clip_low": 0.1}, "stages": [TEACHER]}, "clip_low: has no effect with advantage"),
        ({"algorithm": ALONE | {"shuffle_rewards": True}, "stages": [TEACHER]}, "shuffle_rewards: has no effect"),
        (
            {"algorithm": ALONE | {"kl_coefficient": 0.1, "kl_placement": "reward"}, "stages": [TEACHER]},
            'kl_placement: has no effect with advantage = "none"',
        ),
        (
            {"algorithm": BESIDE | {"advantage": "reinforce++_baseline"}, "stages": [TEACHER]},
            "be divided by the deviation",
        ),
        (
            {
                "algorithm": BESIDE,
                "stages": [
                    {
                        "type": "external",
                        "name": "mine",
                        "inputs": ["text"],
                        "outputs": [{"name": "teacher_logprobs", "type": "float32"}],
                    }
                ],
            },
            'makes "teacher_logprobs", which is read by the loss, in another form (make it a float32 per token',
        ),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        judged_spec(**fields)
    assert words in str(refused.value)


def test_a_teacher_needs_no_group_and_may_be_a_process_of_ones_own() -> None:
    spec = job_spec(algorithm=ALONE, stages=[MINE], rollout__group_size=1)
    assert needs_every_row(terms_of_job(spec))
    assert not spec.loads_reference
    outputs = [*MINE["outputs"], TOP | {"width": 9}]
    job_spec(algorithm=ALONE | {"distillation_beta": 0.5}, stages=[MINE | {"outputs": outputs}])
