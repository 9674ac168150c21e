"""AdamW, clipping and the learning rate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from consumer.gradient.optimizer import GROUP_BYTES, PolicyOptimizer, horizon_at, learning_rate_at
from consumer.gradient.optimizers.adamw import Adamw32bit
from contracts.errors import ContractViolation, InvalidInput, TrainingDiverged
from contracts.spec.job import OptimizerSpec
from tests.builders import job_spec, judged_spec, step_on_grads


def weights(values: list[float]) -> dict[str, nn.Parameter]:
    """A matrix of one row: weight decay is for matrices."""
    return {"weight": nn.Parameter(torch.tensor([values]))}


def test_the_learning_rate_warms_up_and_then_decays_to_zero_at_the_end() -> None:
    linear = OptimizerSpec(learning_rate=1.0, schedule="linear", warmup_iterations=2)
    assert [learning_rate_at(iteration, linear, 6) for iteration in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = OptimizerSpec(learning_rate=1.0, schedule="cosine")
    rates = [learning_rate_at(iteration, cosine, 4) for iteration in range(5)]
    assert rates == pytest.approx([1.0, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0.0])
    lowest = OptimizerSpec(learning_rate=1.0, schedule="cosine", min_learning_rate=0.2)
    assert [learning_rate_at(iteration, lowest, 4) for iteration in range(5)] == pytest.approx(
        [0.2 + 0.8 * rate for rate in rates]
    )
    constant = OptimizerSpec(learning_rate=0.3, warmup_iterations=3)
    assert [learning_rate_at(i, constant, 2) for i in range(2)] == pytest.approx([0.1, 0.2])
    assert learning_rate_at(100, constant, 2) == 0.3


def test_wsd_is_stable_after_its_warm_up_and_decays_in_the_last_iterations_alone() -> None:
    wsd = OptimizerSpec(
        learning_rate=1.0, schedule="wsd", warmup_iterations=2, decay_iterations=4, min_learning_rate=0.2
    )
    rates = [learning_rate_at(iteration, wsd, 10) for iteration in range(11)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    # A job that is shorter than both decays from its warm-up on.
    assert [learning_rate_at(iteration, wsd, 4) for iteration in range(2, 5)] == pytest.approx([1.0, 0.6, 0.2])


def test_what_was_trained_before_a_resume_changed_the_iterations_keeps_its_learning_rate() -> None:
    horizons = {0: 4, 3: 6}
    assert [horizon_at(iteration, horizons, 6) for iteration in range(6)] == [4, 4, 4, 6, 6, 6]
    assert horizon_at(2, {}, 5) == 5


def test_a_step_is_adamw_on_the_clipped_gradient() -> None:
    named = weights([1.0, -2.0])
    spec = OptimizerSpec(max_grad_norm=1.0, weight_decay=0.1, beta1=0.9, beta2=0.99, epsilon=1e-8)
    optimizer = PolicyOptimizer(named, spec)
    named["weight"].grad = torch.tensor([[3.0, 4.0]])
    assert step_on_grads(optimizer, 0.01) == 5.0
    # The first step of Adam is gradient / (|gradient| + eps), after the weight decay.
    expected = [1.0 - 0.01 * 0.1 * 1.0 - 0.01, -2.0 + 0.01 * 0.1 * 2.0 - 0.01]
    assert named["weight"][0].tolist() == pytest.approx(expected, rel=1e-6)
    assert optimizer.state_tensors()["exp_avg.weight"][0].tolist() == pytest.approx([0.06, 0.08], rel=1e-5)
    assert named["weight"].grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_moves_nothing(bad: float) -> None:
    named = weights([1.0, 2.0])
    optimizer = PolicyOptimizer(named, OptimizerSpec())
    named["weight"].grad = torch.tensor([[bad, 0.0]])
    with pytest.raises(TrainingDiverged, match="grad_norm"):
        step_on_grads(optimizer, 0.01)
    assert named["weight"].tolist() == [[1.0, 2.0]]


def test_optimizer_state_of_another_model_is_refused() -> None:
    optimizer = PolicyOptimizer(weights([1.0, 2.0]), OptimizerSpec())
    state = {"exp_avg.weight": torch.zeros(3), "exp_avg_sq.weight": torch.zeros(3), "step.weight": torch.tensor(1.0)}
    with pytest.raises(ContractViolation, match="another shape"):
        optimizer.load_state_tensors(state)
    with pytest.raises(ContractViolation, match="not this model's"):
        optimizer.load_state_tensors({"exp_avg.other": torch.zeros(2)})


def half_precision(values: list[float]) -> dict[str, nn.Parameter]:
    return {"weight": nn.Parameter(torch.tensor([values], dtype=torch.bfloat16))}


def give(optimizer: PolicyOptimizer, gradient: list[float]) -> None:
    optimizer.stepped["weight"].grad = torch.tensor([gradient])


def test_steps_that_bfloat16_would_lose_add_up_in_float32_masters() -> None:
    named, exact = half_precision([1.0, -2.0]), weights([1.0, -2.0])
    spec = OptimizerSpec(learning_rate=1e-3)
    optimizer, reference = PolicyOptimizer(named, spec), PolicyOptimizer(exact, spec)
    for _ in range(8):
        give(optimizer, [0.3, -0.3])
        give(reference, [0.3, -0.3])
        before = named["weight"].clone()
        step_on_grads(optimizer, 1e-3)
        step_on_grads(reference, 1e-3)
        # 0.001 is less than half of the last bit of -2.0 in bfloat16, which is 0.0156.
        assert (named["weight"] - before).abs().max() <= 0.0079
    assert torch.equal(optimizer.stepped["weight"], exact["weight"])
    assert torch.equal(named["weight"], exact["weight"].bfloat16())
    assert named["weight"][0, 0] == 0.9922


def test_masters_are_part_of_the_state_and_go_on_from_it_bit_for_bit() -> None:
    spec = OptimizerSpec(learning_rate=1e-3)
    named = half_precision([1.0, -2.0])
    optimizer = PolicyOptimizer(named, spec)
    give(optimizer, [0.3, -0.2])
    step_on_grads(optimizer, 1e-3)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    assert saved["master.weight"].dtype == saved["exp_avg.weight"].dtype == torch.float32
    again = PolicyOptimizer({"weight": nn.Parameter(named["weight"].detach().clone())}, spec)
    again.load_state_tensors(saved)
    for one in (optimizer, again):
        give(one, [-0.1, 0.4])
        step_on_grads(one, 1e-3)
    assert torch.equal(again.stepped["weight"], optimizer.stepped["weight"])
    del saved["master.weight"]
    with pytest.raises(ContractViolation, match=r"e.g. master\.weight"):
        again.load_state_tensors(saved)


def several(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(50, 3, generator=draw).to(dtype)) for name in "abcd"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_in_groups_is_bitwise_one_step_and_tells_of_each_parameter_that_has_its_value(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    spec = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    whole, grouped = (PolicyOptimizer(several(dtype), spec) for _ in range(2))
    plain = torch.optim.AdamW(
        [nn.Parameter(stepped.detach().clone()) for stepped in whole.stepped.values()],
        lr=1e-2,
        betas=(spec.beta1, spec.beta2),
        eps=spec.epsilon,
        weight_decay=0.1,
        fused=True,
    )
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        gradients = [torch.randn(50, 3, generator=draw) for _ in "abcd"]
        for optimizer in (whole, grouped):
            for stepped, gradient in zip(optimizer.stepped.values(), gradients, strict=True):
                stepped.grad = gradient.clone()
        of_all = plain.param_groups[0]["params"]
        for parameter, gradient in zip(of_all, gradients, strict=True):
            parameter.grad = gradient.clone()
        nn.utils.clip_grad_norm_(of_all, 1.0, foreach=False)
        plain.step()
        values: dict[str, torch.Tensor] = {}
        monkeypatch.setitem(GROUP_BYTES, "cpu", 1 << 30)
        norm = step_on_grads(whole, 1e-2)
        # Of two parameters each.
        monkeypatch.setitem(GROUP_BYTES, "cpu", 2 * 50 * 3 * 4)
        told = step_on_grads(
            grouped, 1e-2, on_stepped=lambda name, of=values: of.update({name: grouped._parameters[name].clone()})
        )
        assert told == norm
        assert list(values) == list("abcd")
        for name, parameter in zip("abcd", of_all, strict=True):
            assert torch.equal(grouped.stepped[name], parameter)
            assert torch.equal(whole.stepped[name], parameter)
            assert torch.equal(values[name], parameter.to(dtype))
            assert grouped.stepped[name].grad is None
    one, other = whole.state_tensors(), grouped.state_tensors()
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def a_matrix_a_norm_and_an_embedding() -> dict[str, nn.Parameter]:
    shapes = {"norm": (3,), "matrix": (2, 3), "bias": (2,), "embedding": (4, 3)}
    return {name: nn.Parameter(torch.full(shape, 2.0)) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay_takes_from_matrices_and_leaves_norms_biases_and_embeddings(dtype: torch.dtype) -> None:
    named = {name: nn.Parameter(p.to(dtype)) for name, p in a_matrix_a_norm_and_an_embedding().items()}
    spec = OptimizerSpec(learning_rate=0.5, weight_decay=0.5)
    optimizer = PolicyOptimizer(named, spec, embeddings={"embedding"})
    assert list(optimizer.stepped) == list(named)
    for stepped in optimizer.stepped.values():
        stepped.grad = torch.zeros_like(stepped)
    step_on_grads(optimizer, 0.5)
    values = {name: set(parameter.flatten().tolist()) for name, parameter in named.items()}
    assert values == {"norm": {2.0}, "matrix": {1.5}, "bias": {2.0}, "embedding": {2.0}}


def test_without_weight_decay_a_step_is_that_of_one_group_bit_for_bit() -> None:
    named, plain = a_matrix_a_norm_and_an_embedding(), a_matrix_a_norm_and_an_embedding()
    optimizer = PolicyOptimizer(named, OptimizerSpec(learning_rate=0.1), embeddings={"embedding"})
    reference = torch.optim.AdamW(plain.values(), lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, fused=True)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, parameter in named.items():
            # Below the norm that is clipped.
            parameter.grad = torch.randn(parameter.shape, generator=draw) / 100.0
            plain[name].grad = parameter.grad.clone()
        step_on_grads(optimizer, 0.1)
        reference.step()
    assert all(torch.equal(named[name], plain[name]) for name in named)


@pytest.mark.parametrize("spec", [OptimizerSpec(weight_decay=0.3), OptimizerSpec()])
def test_a_model_of_one_kind_of_parameter_is_stepped_too(spec: OptimizerSpec) -> None:
    for name, embeddings in (("norm", ()), ("matrix", ()), ("embedding", ("embedding",))):
        named = {name: a_matrix_a_norm_and_an_embedding()[name]}
        optimizer = PolicyOptimizer(named, spec, embeddings=embeddings)
        optimizer.stepped[name].grad = torch.ones_like(named[name])
        step_on_grads(optimizer, 0.5)
        assert named[name].max() < 2.0


def test_a_loaded_state_lies_where_its_parameter_does_the_step_as_well() -> None:
    """The fused kernel of a GPU takes a step from nowhere else; the device without memory stands in for one."""
    adamw = Adamw32bit([{"params": [nn.Parameter(torch.zeros(2, 2))]}], OptimizerSpec())
    parameter = nn.Parameter(torch.zeros(2, 2, device="meta", dtype=torch.float64))
    saved = {"exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2), "step": torch.tensor(3.0)}
    adamw.load(parameter, saved)
    state = adamw.state(parameter)
    assert {name: (t.device.type, t.dtype) for name, t in state.items()} == {
        "exp_avg": ("meta", torch.float64),
        "exp_avg_sq": ("meta", torch.float64),
        "step": ("meta", torch.float32),
    }


def test_groups_have_a_learning_rate_and_a_decay_of_their_own_and_the_first_that_names_a_parameter_counts() -> None:
    """The float64 transcription of a first step: AdamW's update is the sign of the gradient."""
    groups = [{"parameters": ["nor?", "bias"], "weight_decay": 0.2}, {"parameters": ["*"], "learning_rate_factor": 0.5}]
    spec = job_spec(optimizer__weight_decay=0.1, optimizer__groups=groups, optimizer__max_grad_norm=1e6).optimizer
    named = a_matrix_a_norm_and_an_embedding()
    optimizer = PolicyOptimizer(named, spec, embeddings={"embedding"})
    for parameter in named.values():
        parameter.grad = torch.full_like(parameter, -0.3)
    step_on_grads(optimizer, 0.25)
    rates_and_decays = {"norm": (0.25, 0.2), "bias": (0.25, 0.2), "matrix": (0.125, 0.1), "embedding": (0.125, 0.0)}
    for name, (rate, decay) in rates_and_decays.items():
        assert named[name].tolist() == pytest.approx((2.0 * (1.0 - rate * decay) + rate) * np.ones(named[name].shape))
    with pytest.raises(InvalidInput, match=r"optimizer.groups\[1\].parameters.*names are as norm, matrix"):
        PolicyOptimizer(named, job_spec(optimizer__groups=[groups[1], groups[0]]).optimizer)
    with pytest.raises(InvalidInput, match="changes nothing"):
        judged_spec(optimizer__groups=[{"parameters": ["*"]}])


@pytest.mark.parametrize(("dtype", "alpha"), [(torch.float32, 0.6), (torch.bfloat16, 0.6), (torch.bfloat16, 1.0)])
def test_a_reference_follows_the_parameters_by_its_share_and_goes_on_from_a_saved_state(
    dtype: torch.dtype, alpha: float
) -> None:
    def made() -> tuple[PolicyOptimizer, nn.Parameter]:
        frozen = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=dtype), requires_grad=False)
        named = {"weight": nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=dtype))}
        return PolicyOptimizer(named, OptimizerSpec(), reference={"weight": frozen}, mixup_alpha=alpha), frozen

    (optimizer, frozen), (again, other) = made(), made()
    assert optimizer.state_tensors() == {}
    expected = frozen.double()
    for number in range(3):
        give(optimizer, [0.3, -0.1 * number])
        step_on_grads(optimizer, 0.1)
        optimizer.sync_reference()
        expected = alpha * optimizer.stepped["weight"].double() + (1.0 - alpha) * expected
        assert torch.allclose(frozen.double(), expected, rtol=2**-8 if dtype is torch.bfloat16 else 1e-6)
    assert alpha < 1.0 or torch.equal(frozen, optimizer._parameters["weight"])
    again.load_state_tensors(optimizer.state_tensors())
    assert torch.equal(other, frozen)
    # A fork may go on without one.
    plain = PolicyOptimizer({"weight": nn.Parameter(torch.zeros(1, 2, dtype=dtype))}, OptimizerSpec())
    plain.load_state_tensors(optimizer.state_tensors())
    assert "reference.weight" not in plain.state_tensors()


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.6])
def test_a_bfloat16_reference_that_is_averaged_moves_as_far_as_in_float64(alpha: float) -> None:
    """Rounded weights that are averaged stay where they are: half of the last bit is more than alpha of a step."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(1, 4096, generator=draw)
    named = {"weight": nn.Parameter(start.bfloat16())}
    frozen = nn.Parameter(start.bfloat16(), requires_grad=False)
    optimizer = PolicyOptimizer(named, OptimizerSpec(), reference={"weight": frozen}, mixup_alpha=alpha)
    again = PolicyOptimizer(
        {"weight": nn.Parameter(start.bfloat16())},
        OptimizerSpec(),
        reference={"weight": nn.Parameter(start.bfloat16(), requires_grad=False)},
        mixup_alpha=alpha,
    )
    origin = start.bfloat16().double()
    expected = origin.clone()
    for _ in range(20):
        optimizer.stepped["weight"].grad = torch.randn(start.shape, generator=draw) + 1.0
        step_on_grads(optimizer, 5e-4)
        optimizer.sync_reference()
        expected = alpha * optimizer.stepped["weight"].detach().double() + (1.0 - alpha) * expected
        # A run that was killed here goes on from the same average.
        again.load_state_tensors({name: tensor.clone() for name, tensor in optimizer.state_tensors().items()})
        assert again.state_tensors()["reference.weight"].dtype is torch.float32
        assert torch.equal(again.beside["reference.weight"], frozen)
    moved = (frozen.double() - origin).mean().item()
    # As far as the float64 average that is rounded once, in the end.
    assert moved == pytest.approx((expected.bfloat16().double() - origin).mean().item(), rel=1e-3)
    average = optimizer.state_tensors()["reference.weight"]
    assert torch.allclose(average.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(frozen, average.bfloat16())


def test_a_loaded_state_is_its_own_and_goes_on() -> None:
    named, spec = weights([1.0, -2.0]), OptimizerSpec(learning_rate=0.1)
    optimizer, again = PolicyOptimizer(named, spec), PolicyOptimizer(weights([1.0, -2.0]), spec)
    give(optimizer, [0.3, -0.2])
    step_on_grads(optimizer, 0.1)
    saved = optimizer.state_tensors()
    again.load_state_tensors(saved)
    give(again, [0.1, 0.1])
    step_on_grads(again, 0.1)
    assert saved["step.weight"].item() == 1.0
    assert again.state_tensors()["step.weight"].item() == 2.0
