"""Losses and corrections over batches that older versions sampled: every choice is its equation, in every update.

    version 0 ─ step ─▶ version 1 ─ step ─▶ version 2, which iteration 2 trains
        │                   │                   │
        └ samples a batch   └ samples a batch   └ samples a batch
          (lag 2)             (lag 1)             (lag 0)

mu of a batch is the policy that sampled it, which the test keeps and asks again, apart from what the batch carries;
pi_prox is version 2 in every update; pi is where the update before has left it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.losses.base import BatchSizes
from consumer.gradient.micro_step import pass_loss, train_micro_batch
from consumer.gradient.statistics import iteration_numbers, iteration_scaling
from consumer.gradient.terms.base import LossSpec, TokenOutputs
from consumer.gradient.terms.table import terms_of, terms_of_job
from consumer.model.policy import Policy
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from tests.builders import batch_of, give_totals, job_spec, rollout
from tests.building.pairs import few_of
from tests.building.specs import SpecBuilder
from tests.contract.test_streamed_gradient import relative_error, taken_gradients
from tests.contract.test_streamed_losses import models
from tests.contract.test_updates import first_update, later_update, responses_of, total
from tests.loss_equations import Equation, Response, iteration_loss

NEWEST = 2
LAGS = (2, 1, 0)
GROUP_SIZE = 3
VERSION_STEP = 0.003
"""So far that a third of the weights leave their bounds."""
UPDATE_STEP = 0.0008
"""So far that some ratios leave the clips, and some do not."""
PROMPTS = (([5, 9, 31], [12, 6, 44, 7, 20]), ([40, 8], [17, 3, 29, 50]), ([33, 14, 15, 60], [9, 9]))
LENGTHS = (4, 1, 6, 3, 5, 2)
REWARDS = (0.0, 1.0, 0.25, 1.0, 0.0, 0.5)
NARROW: dict[str, Any] = {"clip_low": 0.02, "clip_high": 0.03}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss": "grpo"} | NARROW, {"loss": "grpo", "eps_low": 0.02, "eps_high": 0.03}),
    "dr_grpo": ({"loss": "dr_grpo"} | NARROW, {"loss": "dr_grpo", "budget": 6, "eps_low": 0.02, "eps_high": 0.03}),
    "dapo": ({"loss": "dapo"} | NARROW, {"loss": "dapo", "eps_low": 0.02, "eps_high": 0.03}),
    "bnpo": ({"loss": "bnpo"} | NARROW, {"loss": "bnpo", "eps_low": 0.02, "eps_high": 0.03}),
    "gspo": (
        {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.06},
        {"loss": "gspo", "eps_low": 0.05, "eps_high": 0.06},
    ),
    "cispo": ({"loss": "cispo"} | NARROW, {"loss": "cispo", "eps_low": 0.02, "eps_high": 0.03}),
}
AS_SAMPLED = "none, against the generator"
SEQUENCE: dict[str, Any] = {"correction_level": "sequence"}
CORRECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"correction": "none"}, {}),
    AS_SAMPLED: ({"correction": "none", "old_policy": "generator"}, {"old_is_generator": True}),
    "tis": ({"correction": "tis", "correction_high": 1.1}, {"correction": "tis", "w_high": 1.1}),
    "icepop": (
        {"correction": "icepop", "correction_low": 0.8, "correction_high": 1.3},
        {"correction": "icepop", "w_low": 0.8, "w_high": 1.3},
    ),
    "decoupled_ppo": (
        {"correction": "decoupled_ppo", "correction_high": 1.2},
        {"correction": "decoupled_ppo", "w_high": 1.2},
    ),
    "tis by sequence": (
        {"correction": "tis", "correction_high": 1.1} | SEQUENCE,
        {"correction": "tis", "w_high": 1.1, "of_sequence": True},
    ),
    "icepop by sequence": (
        {"correction": "icepop", "correction_low": 0.7, "correction_high": 1.6} | SEQUENCE,
        {"correction": "icepop", "w_low": 0.7, "w_high": 1.6, "of_sequence": True},
    ),
    "icepop by geometric sequence": (
        {"correction": "icepop", "correction_low": 0.93, "correction_high": 1.08, "correction_level": "geometric"},
        {"correction": "icepop", "w_low": 0.93, "w_high": 1.08, "of_mean": True},
    ),
    "icepop by geometric sequence, with verl's lower bound": (
        {"correction": "icepop", "correction_high": 1.05, "correction_level": "geometric"},
        {"correction": "icepop", "w_low": 1.0 / 1.05, "w_high": 1.05, "of_mean": True},
    ),
    "decoupled_ppo by sequence": (
        {"correction": "decoupled_ppo", "correction_high": 1.3} | SEQUENCE,
        {"correction": "decoupled_ppo", "w_high": 1.3, "of_sequence": True},
    ),
}
CASES = [
    (loss, correction, packing)
    for loss, correction, packing in itertools.product(LOSSES, CORRECTIONS, ("shared_prompt", "padded"))
    # gspo has one ratio a response: a weight for each token is refused.
    if (loss != "gspo" or "sequence" in correction or correction.startswith("none"))
    # A loss doesn't see the packing: one of each level is enough.
    and (packing == "shared_prompt" or loss in ("dapo", "gspo"))
]


TIS: dict[str, Any] = {"correction": "tis", "correction_high": 1.1}
TIS_EQUATION: dict[str, Any] = {"correction": "tis", "w_high": 1.1}
AGAINST_SAMPLER = {"correction": "none", "old_policy": "generator"}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dual clip": (
        AGAINST_SAMPLER | NARROW | {"loss": "grpo", "clip_max": 1.05},
        {"loss": "grpo", "old_is_generator": True, "eps_low": 0.02, "eps_high": 0.03, "c": 1.05},
    ),
    "off-policy mask": (
        TIS | {"loss": "dapo", "off_policy_mask_threshold": 0.02},
        TIS_EQUATION | {"loss": "dapo", "eps_high": 0.28, "far": 0.02},
    ),
    "KL weighed by the ratio and the correction": (
        TIS | {"kl_coefficient": 0.3},
        TIS_EQUATION | {"beta": 0.3},
    ),
    "KL weighed by the ratio alone": (
        AGAINST_SAMPLER | {"kl_coefficient": 0.3, "kl_estimator": "k1", "use_bias_correction_kl": True},
        {"old_is_generator": True, "beta": 0.3, "kl": "k1"},
    ),
}
"""Options that bound or weigh what is off-policy: (algorithm, equation)."""


@dataclass(frozen=True, kw_only=True)
class Lagged:
    """Iteration 2 of a job whose batches have lags of 2, 1 and 0."""

    pair: tuple[Policy, Policy]
    newest: dict[str, Tensor]
    """The weights of version 2, which the policy is put back to."""
    batches: list[RolloutBatch]
    sampled_logprobs: list[Tensor]
    """log mu of every response in float64, as the version that sampled it answers when it is asked again."""
    newest_logprobs: list[Tensor]
    """log pi_prox of every response."""


@pytest.fixture(scope="module")
def lagged(tmp_path_factory: pytest.TempPathFactory) -> Lagged:
    pair = models(tmp_path_factory.mktemp("lagged"), float64=True)
    batches, sampled_logprobs = [], []
    for version, lag in enumerate(LAGS):
        batch = sampled_batch(pair[0], number=version, version=version)
        assert lag == NEWEST - version
        batches.append(batch)
        sampled_logprobs += logprobs_of(pair, [batch])
        if version < NEWEST:
            train_one_step(pair, batch)
    newest = {name: values.clone() for name, values in pair[0].model.state_dict().items()}
    return Lagged(
        pair=pair,
        newest=newest,
        batches=batches,
        sampled_logprobs=sampled_logprobs,
        newest_logprobs=logprobs_of(pair, batches),
    )


def sampled_batch(policy: Policy, *, number: int, version: int) -> RolloutBatch:
    """Draws each token from the policy as it is now; log mu goes into the batch as a generator sends it, in float32."""
    draw = torch.Generator().manual_seed(100 + version)
    groups = []
    for place, prompt in enumerate(PROMPTS[number]):
        rollouts = []
        for sample in range(GROUP_SIZE):
            tokens, logprobs = drawn(policy, prompt, LENGTHS[GROUP_SIZE * place + sample], draw)
            reward = REWARDS[(GROUP_SIZE * place + sample + number) % len(REWARDS)]
            rollouts.append(rollout(tokens, reward, logprobs=logprobs))
        groups.append((prompt, rollouts))
    return batch_of(groups, batch_id=f"{NEWEST}/train/{number}", iteration=NEWEST, policy_version=version)


@torch.no_grad()
def drawn(policy: Policy, prompt: list[int], length: int, draw: torch.Generator) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(length):
        logits = policy.model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
        distribution = torch.log_softmax(logits, dim=-1)
        tokens.append(int(torch.multinomial(distribution.exp(), 1, generator=draw)))
        logprobs.append(distribution[tokens[-1]].item())
    return tokens, logprobs


def train_one_step(pair: tuple[Policy, Policy], batch: RolloutBatch) -> None:
    """Makes the next version, far enough from the last that weights leave their bounds."""
    spec, policy = job_spec(algorithm__loss="grpo"), pair[0]
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=2)
    stats, _ = train_micro_batch(policy, batch, reference=None, spec=spec, accumulator=accumulator)
    move(policy, total(policy, [stats], spec, accumulator), VERSION_STEP)


def move(policy: Policy, gradients: dict[str, Tensor], size: float) -> None:
    with torch.no_grad():
        for name, parameter in policy.trained_parameters().items():
            parameter.sub_(size * gradients[name].sign())


def logprobs_of(pair: tuple[Policy, Policy], batches: list[RolloutBatch]) -> list[Tensor]:
    return [response.logprobs.detach() for response in responses_of(pair, batches)]


lagged_job = SpecBuilder(
    schedule="bounded", max_policy_lag=NEWEST, deterministic=False, rollout__sampling__max_new_tokens=6
)


def asked_again(lagged: Lagged, *, mu: list[Tensor], now: list[Response] | None = None) -> list[Response]:
    """What the equation takes: pi with gradient at the weights of now, pi_prox of version 2, mu as given."""
    responses = now or responses_of(lagged.pair, lagged.batches)
    return [
        replace(response, old_logprobs=old, generator_logprobs=of_sampler)
        for response, old, of_sampler in zip(responses, lagged.newest_logprobs, mu, strict=True)
    ]


def equation_gradient(
    lagged: Lagged, equation: Equation, *, mu: list[Tensor], now: list[Response] | None = None
) -> dict[str, Tensor]:
    """Returns the gradient of an equation. now: the responses at the weights of now, where they are known already."""
    iteration_loss(asked_again(lagged, mu=mu, now=now), equation).backward(retain_graph=now is not None)
    return taken_gradients(lagged.pair[0])


def updates_of(lagged: Lagged, spec: JobSpec) -> Iterator[tuple[dict[str, Tensor], list]]:
    """Yields gradient and numbers of each update, with the policy where the update found it; then it steps on."""
    policy = lagged.pair[0]
    policy.model.load_state_dict(lagged.newest)
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=len(lagged.batches))
    trained = first_update(lagged.pair, lagged.batches, spec, accumulator)
    stats = trained[0]
    for update in range(spec.algorithm.updates_per_iteration):
        if update:
            stats = later_update(policy, trained, spec, accumulator)
        scaling = iteration_scaling(stats, spec.algorithm)
        give_totals(accumulator, scaling.divisor)
        gradients = taken_gradients(policy)
        yield gradients, stats
        move(policy, gradients, UPDATE_STEP)


@pytest.mark.parametrize(("loss", "correction", "packing"), few_of(CASES))
def test_each_update_over_lagged_batches_is_its_equation(
    lagged: Lagged, loss: str, correction: str, packing: str
) -> None:
    of_loss, of_correction = LOSSES[loss], CORRECTIONS[correction]
    spec = lagged_job(algorithm=of_loss[0] | of_correction[0] | {"updates_per_iteration": 2}, trainer__packing=packing)
    equation = Equation(**(of_loss[1] | of_correction[1]))
    for update, (gradients, stats) in enumerate(updates_of(lagged, spec)):
        now = responses_of(lagged.pair, lagged.batches)
        # float32 carries log mu: hence the tolerance.
        expected = equation_gradient(lagged, equation, mu=lagged.sampled_logprobs, now=now)
        assert relative_error(gradients, expected) < 1e-6
        if correction != "none":
            # As if version 2 had sampled everything, and the gap were that of the engines, which is none here.
            unlagged = equation_gradient(lagged, equation, mu=lagged.newest_logprobs, now=now)
            assert relative_error(gradients, unlagged) > 0.01
        scaling = iteration_scaling(stats, spec.algorithm)
        numbers = iteration_numbers(stats, scaling=scaling, terms=terms_of_job(spec))
        # In the first update pi is pi_prox; only a ratio against the generator can leave the clips there.
        assert (0.0 < numbers.loss_metrics.get("clip_share", 0.0) < 1.0) == (update > 0 or correction == AS_SAMPLED)
        if spec.algorithm.correction_name != "none":
            assert 0.0 < numbers.loss_metrics["corrected_share"] < 1.0


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_over_lagged_batches_is_its_equation(lagged: Lagged, option: str) -> None:
    algorithm, equation = OPTIONS[option]
    spec = lagged_job(algorithm=algorithm | {"updates_per_iteration": 2})
    without = {name: value for name, value in equation.items() if name not in ("c", "far")}
    plain = Equation(**without, weighs_kl=False)
    for gradients, stats in updates_of(lagged, spec):
        now = responses_of(lagged.pair, lagged.batches)
        expected = equation_gradient(lagged, Equation(**equation), mu=lagged.sampled_logprobs, now=now)
        assert relative_error(gradients, expected) < 1e-6
        without_option = equation_gradient(lagged, plain, mu=lagged.sampled_logprobs, now=now)
        assert relative_error(gradients, without_option) > 0.01
        scaling = iteration_scaling(stats, spec.algorithm)
        numbers = iteration_numbers(stats, scaling=scaling, terms=terms_of_job(spec))
        assert 0.0 <= numbers.loss_metrics.get("clip_high_share", 0.0) < 1.0
        assert (numbers.loss_metrics["corrected_share"] > 0.0) == (spec.algorithm.old_policy == "trainer")
        assert 0.0 < numbers.effective_sequence_share < 1.0


@pytest.mark.parametrize(
    ("keys", "weighs"),
    [({}, True), ({"use_bias_correction_kl": True}, True), ({"use_bias_correction_kl": False}, False)],
)
def test_a_kl_is_weighed_by_the_correction_unless_the_spec_says_no(lagged: Lagged, keys: dict, weighs: bool) -> None:
    """In an iteration's one step, in which the policy ratio is 1 and the correction alone weighs."""
    gradients, _ = next(updates_of(lagged, lagged_job(algorithm=TIS | {"kl_coefficient": 0.3} | keys)))
    of_each = {
        way: equation_gradient(lagged, Equation(**TIS_EQUATION, beta=0.3, weighs_kl=way), mu=lagged.sampled_logprobs)
        for way in (True, False)
    }
    assert relative_error(gradients, of_each[weighs]) < 1e-6
    assert relative_error(gradients, of_each[not weighs]) > 0.01


@pytest.mark.parametrize("advantage", ["reinforce++_baseline", "rloo"])
def test_each_advantage_is_corrected_by_the_same_weight(lagged: Lagged, advantage: str) -> None:
    of_loss, of_correction = LOSSES["cispo"], CORRECTIONS["decoupled_ppo"]
    spec = lagged_job(algorithm=of_loss[0] | of_correction[0] | {"advantage": advantage})
    gradients, _ = next(updates_of(lagged, spec))
    options: dict[str, Any] = of_loss[1] | of_correction[1] | {"advantage": advantage}
    equation = Equation(**options)
    assert relative_error(gradients, equation_gradient(lagged, equation, mu=lagged.sampled_logprobs)) < 1e-6


def test_a_batch_that_is_split_into_passes_is_weighed_as_a_whole_one(lagged: Lagged) -> None:
    algorithm = LOSSES["dapo"][0] | CORRECTIONS["decoupled_ppo by sequence"][0] | {"updates_per_iteration": 2}
    whole = updates_of(lagged, lagged_job(algorithm=algorithm))
    expected = [gradients for gradients, _ in whole]
    split = updates_of(lagged, lagged_job(algorithm=algorithm, trainer__max_tokens_per_micro_batch=12))
    for (gradients, _), of_whole in zip(split, expected, strict=True):
        assert relative_error(gradients, of_whole) < 1e-10


def test_the_gap_of_a_lagged_batch_is_how_far_the_policy_has_moved(lagged: Lagged) -> None:
    _, stats = next(updates_of(lagged, lagged_job(algorithm={"correction": "none", "entropy_coefficient": 0.01})))
    start = 0
    for lag, of_batch in zip(LAGS, stats, strict=True):
        rows = slice(start, start + len(of_batch.rewards))
        start = rows.stop
        gaps = torch.cat(
            [new - old for new, old in zip(lagged.newest_logprobs[rows], lagged.sampled_logprobs[rows], strict=True)]
        )
        assert of_batch.lag == lag
        k3 = (gaps.exp() - gaps - 1.0).sum().item()
        assert of_batch.mismatch.k3_sum == pytest.approx(k3, rel=1e-5, abs=1e-12)
        assert (k3 > 1e-3) == (lag > 0)


AREAL_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
AREAL_ADVANTAGES = torch.tensor([1.2, -0.8, 0.5], dtype=torch.float64)
PI = [[-0.9, -1.6, -0.35, -2.4], [-1.25, -0.55, -1.95, 0.0], [-0.7, -2.2, 0.0, 0.0]]
PROXIMAL = [[-1.1, -1.5, -0.75, -2.4], [-1.3, -0.85, -1.9, 0.0], [-0.4, -2.1, 0.0, 0.0]]
BEHAVIOUR = [[-1.3, -1.2, -2.15, -2.3], [-1.2, -0.8, -3.9, 0.0], [-0.65, -1.4, 0.0, 0.0]]
AREAL: dict[str, tuple[dict[str, Any], float, list[list[float]]]] = {
    "decoupled_ppo, first update": (
        {"correction": "decoupled_ppo", "correction_high": 3.0},
        -0.31621352665954167,
        [
            [-0.162853686, -0.0987757683, 0.0, -0.120644975],
            [0.080429999, 0.0845537239, 0.0, 0.0],
            [-0.0713347461, -0.0275880744, 0.0, 0.0],
        ],
    ),
    "decoupled_ppo, later update": (
        {"correction": "decoupled_ppo", "correction_high": 3.0},
        -0.28805040670926957,
        [
            [-0.198909941, -0.0893760111, 0.0, -0.120644975],
            [0.0845537333, 0.114135589, 0.0, 0.0],
            [-0.0528460797, -0.024962722, 0.0, 0.0],
        ],
    ),
    "icepop, later update": (
        {"correction": "icepop", "correction_low": 0.6, "correction_high": 3.0},
        -0.2630876846951714,
        [
            [-0.198909941, -0.0893760111, 0.0, -0.120644975],
            [0.0845537333, 0.114135589, 0.0, 0.0],
            [-0.0528460797, 0.0, 0.0, 0.0],
        ],
    ),
    "tis, later update": (
        {"correction": "tis", "correction_high": 1.2},
        -0.3844422502912732,
        [
            [-0.195424449, -0.0893760111, 0.0, -0.120644975],
            [0.0845537333, 0.114135589, 0.101464476, 0.0],
            [-0.0493878833, -0.024962722, 0.0, 0.0],
        ],
    ),
}
"""Loss and gradient that AReaL's ppo_actor_loss_fn (areal/utils/functional/functional.py, commit 4aef98d8) has answered
to these log-probs, with eps_clip 0.2 and 0.28. The bounds are those of its RejectionSamplingConfig: masked above 3.0,
masked outside 0.6 to 3.0, clamped at 1.2. Its weights are float32. It divides by the number of tokens, as dapo does."""


@pytest.mark.parametrize("case", AREAL)
def test_loss_and_gradient_are_those_of_areals_decoupled_objective(case: str) -> None:
    algorithm, expected_loss, expected_gradient = AREAL[case]
    proximal = torch.tensor(PROXIMAL, dtype=torch.float64)
    is_first = "first" in case
    policy = (proximal.clone() if is_first else torch.tensor(PI, dtype=torch.float64)).requires_grad_()
    algorithm_of_case = lagged_job(algorithm={"loss": "dapo"} | algorithm).algorithm
    loss_of_case = pass_loss(
        TokenOutputs(
            policy=policy, generator=torch.tensor(BEHAVIOUR, dtype=torch.float64), old=None if is_first else proximal
        ),
        advantages=AREAL_ADVANTAGES,
        loss_mask=AREAL_MASK,
        algorithm=algorithm_of_case,
        sizes=BatchSizes(num_tokens=9, max_sampled_tokens=4),
        terms=terms_of(LossSpec(algorithm=algorithm_of_case)),
    )
    loss = loss_of_case.loss_sum / 9
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-6, atol=1e-9)
