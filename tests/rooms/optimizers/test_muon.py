"""Muon by its equation, and AdamW beside it."""

from __future__ import annotations

import torch
from torch import nn

from consumer.gradient.optimizer import PolicyOptimizer
from tests.builders import job_spec, step_on_grads


def test_muon_steps_hidden_matrices_by_its_equation_and_all_else_as_adamw_does() -> None:
    """Momentum, Nesterov's look ahead, five steps of Newton and Schulz, 0.2 √max(rows, columns), decoupled decay: in
    float64, from which torch's bfloat16 is some percent away."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"embedding": (9, 4), "wide": (4, 6), "tall": (8, 3), "norm": (4,), "head": (9, 4)}
    named = {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}
    plain = {name: nn.Parameter(one.detach().clone()) for name, one in named.items() if name not in ("wide", "tall")}
    options = {"optimizer__weight_decay": 0.1, "optimizer__max_grad_norm": 1e6}
    optimizer, again = (
        PolicyOptimizer(
            {name: nn.Parameter(one.detach().clone()) for name, one in named.items()},
            job_spec(optimizer__type="muon", **options).optimizer,
            embeddings={"embedding"},
            heads={"head"},
        )
        for _ in range(2)
    )
    adamw = PolicyOptimizer(plain, job_spec(**options).optimizer, embeddings={"embedding"})
    exact = {name: (named[name].detach().double(), torch.zeros(shapes[name]).double()) for name in ("wide", "tall")}
    for number in range(3):
        gradients = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        if number == 2:
            again.load_state_tensors(optimizer.state_tensors())
            for name, one in again.stepped.items():
                one.data.copy_(optimizer.stepped[name])
        for name, gradient in gradients.items():
            for one in (optimizer, again, adamw):
                if name in one.stepped:
                    one.stepped[name].grad = gradient.clone()
        for one in (optimizer, again, adamw):
            step_on_grads(one, 0.02)
        for name, (weight, momentum) in exact.items():
            gradient = gradients[name].double()
            momentum = 0.95 * momentum + 0.05 * gradient
            spread = 0.05 * gradient + 0.95 * momentum
            spread = spread / spread.norm()
            for _ in range(5):
                gram = spread @ spread.T
                spread = 3.4445 * spread + (-4.7750 * gram + 2.0315 * gram @ gram) @ spread
            exact[name] = weight * (1.0 - 0.02 * 0.1) - 0.02 * 0.2 * max(shapes[name]) ** 0.5 * spread, momentum
    for name in named:
        found, start = optimizer.stepped[name].detach(), named[name].detach()
        assert torch.equal(found, again.stepped[name])
        expected = exact[name][0].float() if name in exact else plain[name].detach()
        assert (found - expected).norm() <= (0.03 if name in exact else 0.0) * (expected - start).norm()
    assert {name for name in optimizer.state_tensors() if "wide" in name} == {"momentum_buffer.wide"}
