"""Log-probs of chosen tokens without the logits of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from consumer.model import language_head
from consumer.model.language_head import CHUNK_LOGITS, chosen_values, has_plain_head, last_states, project
from contracts.errors import InvalidInput
from onbeat.weights.model_folder import cast_head

NUM_TOKENS, WIDTH, VOCABULARY = 450, 8, 151_936


class LargestTensor(TorchDispatchMode):
    """Items of the largest tensor that any operation makes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_items = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                self.num_items = max(self.num_items, made.numel())
        return result


def values_and_gradients(
    head: nn.Linear, states: Tensor, chosen: Tensor, values: Callable[..., tuple[Tensor, ...]]
) -> list[Tensor]:
    states = states.clone().requires_grad_()
    head.zero_grad(set_to_none=True)
    logprobs, entropy, *_ = values(head, states, chosen, temperature=0.7)
    weights = torch.cos(torch.arange(len(chosen)))
    (logprobs * weights + entropy * weights.flip(0)).sum().backward()
    assert states.grad is not None
    assert head.weight.grad is not None
    return [logprobs.detach(), entropy.detach(), states.grad, head.weight.grad]


def plain_values(head: nn.Linear, states: Tensor, chosen: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """The textbook: all logits at once."""
    distribution = torch.distributions.Categorical(logits=head(states) / temperature)
    return distribution.log_prob(chosen), distribution.entropy()


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 20])
def test_chunks_give_the_log_probs_entropies_and_gradients_of_the_whole(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_head, "CHUNK_LOGITS", 7 * 50)
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 50, bias=False, dtype=torch.float64)
    states, chosen = torch.randn(num_tokens, WIDTH, dtype=torch.float64), torch.randint(50, (num_tokens,))
    values = functools.partial(chosen_values, vocabulary_size=50, entropy=True)
    expected = values_and_gradients(head, states, chosen, plain_values)
    for actual, one in zip(values_and_gradients(head, states, chosen, values), expected, strict=True):
        assert (actual - one).norm() <= 1e-12 * one.norm()


def test_with_a_vocabulary_of_150_thousand_no_tensor_is_larger_than_a_chunk() -> None:
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    states = torch.zeros(NUM_TOKENS, WIDTH, requires_grad=True)
    chosen = torch.arange(NUM_TOKENS)
    with LargestTensor() as largest:
        logprobs, *_ = chosen_values(head, states, chosen, vocabulary_size=VOCABULARY, temperature=1.0, entropy=False)
        logprobs.sum().backward()
    assert states.grad is not None
    assert head.weight.numel() < largest.num_items <= CHUNK_LOGITS < NUM_TOKENS * VOCABULARY // 2
    assert torch.allclose(logprobs, torch.full((NUM_TOKENS,), -float(torch.tensor(VOCABULARY).log())))


def test_no_gradient_is_computed_where_none_is_asked_for() -> None:
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    with torch.no_grad():
        logprobs, *_ = chosen_values(
            head, torch.zeros(300, WIDTH), torch.arange(300), vocabulary_size=VOCABULARY, temperature=1.0, entropy=False
        )
    assert not logprobs.requires_grad
    assert logprobs.shape == (300,)


def test_the_states_come_without_any_logits() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**small_config())).eval()
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.numel()))
    tokens = torch.arange(6)[None]
    states = last_states(model, input_ids=tokens)
    assert seen == [0]
    assert torch.equal(project(model, states), model(input_ids=tokens).logits)


def test_a_head_that_does_more_than_a_head_is_found_out() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**small_config()))
    assert has_plain_head(model)
    scaled = Qwen2ForCausalLM(Qwen2Config(**small_config()))
    scaled.register_forward_hook(lambda _module, _inputs, output: replace(output, logits=2.0 * output.logits))
    assert not has_plain_head(scaled)


def test_a_float32_head_has_the_log_probs_of_the_states_and_a_bfloat16_one_those_of_rounded_logits() -> None:
    """In float64, from the bfloat16 states and weights; the gradient of the weight is one rounding away."""
    model = Qwen2ForCausalLM(Qwen2Config(**small_config())).bfloat16()
    head, states, chosen = model.lm_head, torch.randn(40, 16).bfloat16(), torch.arange(40)
    values = functools.partial(chosen_values, functools.partial(project, model), vocabulary_size=50, entropy=True)
    exact = nn.Linear(16, 50, bias=False, dtype=torch.float64)
    exact.load_state_dict({"weight": head.weight.detach().double()})
    expected = values_and_gradients(exact, states.double(), chosen, plain_values)
    gaps: list[list[float]] = []
    for make in (lambda one: one, cast_head):
        make(model)
        found = values_and_gradients(head, states, chosen, lambda _, *its, **also: values(*its, **also))
        gaps.append([float((one - of).norm() / of.norm()) for one, of in zip(found, expected, strict=True)])
    (rounded, _, *_), (logprobs, entropy, *gradients) = gaps
    assert rounded > 1e-4
    assert max(logprobs, entropy) < 1e-6
    assert max(gradients) < 2**-8
    assert has_plain_head(model)
    with pytest.raises(InvalidInput, match="Qwen2ForCausalLM has no plain output head"):
        cast_head(model)


def small_config() -> dict[str, Any]:
    return {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "initializer_range": 0.2,
    }
