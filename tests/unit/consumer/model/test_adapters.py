"""LoRA: what is trained, what is published of it, and what is left of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from torch import Tensor

from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import make_micro_batch
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.gradient.saved_state import adapter_state, restore_state, save_state
from consumer.model.checkpoint import read_checkpoint, write_checkpoint
from consumer.model.policy import Policy, load_policy
from contracts.spec.job import ModelSpec, OptimizerSpec
from contracts.spec.root import SpecRoot
from contracts.spec.trainer import LoraSpec
from onbeat.weights.adapter.matrices import CHUNK_ITEMS, matrix_names, merge_into
from onbeat.weights.hashing import tensors_digest
from tests.builders import rollout_batch, step_on_grads, tiny_model_folder
from tests.refusals import refusal_of

TARGETS = LoraSpec(rank=4, target_modules=("q_proj", "down_proj"))
ATTENTION = LoraSpec(rank=4, alpha=8.0, target_modules=("q_proj", "self_attn.v_proj"))


def load(folder: Path, **options: Any) -> Policy:
    return load_policy(
        ModelSpec(path=folder.name, dtype=options.pop("dtype", "float32"), matmul=options.pop("matmul", UNSET)),
        model_root=SpecRoot(folder.parent),
        gradient_checkpointing=options.pop("gradient_checkpointing", False),
    )


def moved(policy: Policy, *, seed: int = 0) -> Policy:
    """Moves the adapters far from zero, as if they were trained."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    policy.follow()
    return policy


def logprobs(policy: Policy) -> Tensor:
    micro_batch = make_micro_batch(rollout_batch(), advantages=np.zeros((2, 4)))
    return response_logprobs(policy.model, micro_batch, 1.0)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refused(policy: Policy, *target_modules: str) -> str:
    with refusal_of("trainer.lora.target_modules") as refusal:
        policy.with_adapters(LoraSpec(target_modules=target_modules), seed=0)
    return str(refusal.value)


@pytest.mark.parametrize("tied", [True, False])
def test_a_policy_with_new_adapters_is_the_model_bit_for_bit(tmp_path: Path, *, tied: bool) -> None:
    plain = load(tiny_model_folder(tmp_path, tied=tied))
    policy = load(tmp_path / "qwen3").with_adapters(LoraSpec(), seed=0)
    assert same(policy.weights(), plain.weights())
    assert torch.equal(logprobs(policy), logprobs(plain))


@pytest.mark.parametrize("matmul", [UNSET, "onednn"])
def test_all_linear_layers_but_the_head_get_an_adapter_and_nothing_else_is_trained(tmp_path: Path, matmul: Any) -> None:
    policy = load(tiny_model_folder(tmp_path, tied=False), matmul=matmul).with_adapters(LoraSpec(rank=2), seed=0)
    trained = policy.trained_parameters()
    ends = {name.split(".")[-3] for name in trained}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(trained) == 2 * 7 * 2
    assert {id(p) for p in trained.values()} == {id(p) for p in policy.model.parameters() if p.requires_grad}
    logprobs(policy).sum().backward()
    assert {name for name, p in trained.items() if p.grad is not None} == trained.keys()
    assert all(p.grad is None for p in policy.model.parameters() if not p.requires_grad)


def test_named_layers_alone_get_an_adapter_by_the_end_of_their_names(tmp_path: Path) -> None:
    policy = load(tiny_model_folder(tmp_path)).with_adapters(ATTENTION, seed=0)
    shapes = {name: tuple(p.shape) for name, p in policy.trained_parameters().items() if "layers.1" in name}
    layer = "base_model.model.model.layers.1.self_attn"
    assert shapes == {
        f"{layer}.q_proj.lora_A.weight": (4, 32),
        f"{layer}.q_proj.lora_B.weight": (32, 4),
        f"{layer}.v_proj.lora_A.weight": (4, 32),
        f"{layer}.v_proj.lora_B.weight": (16, 4),
    }


def test_the_first_adapters_are_a_function_of_the_seed(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    state = torch.get_rng_state()
    one = load(folder).with_adapters(ATTENTION, seed=7).state_tensors()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert same(one, load(folder).with_adapters(ATTENTION, seed=7).state_tensors())
    assert not same(one, load(folder).with_adapters(ATTENTION, seed=8).state_tensors())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_float32_and_published_weights_have_the_dtype_of_the_model(tmp_path: Path, dtype: str) -> None:
    policy = load(tiny_model_folder(tmp_path), dtype=dtype).with_adapters(LoraSpec(), seed=0)
    assert {p.dtype for p in policy.trained_parameters().values()} == {torch.float32}
    assert {t.dtype for t in moved(policy).weights().values()} == {getattr(torch, dtype)}


def test_the_merged_model_gives_the_log_probs_of_the_model_with_adapters(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    policy, merged, base = moved(load(folder).with_adapters(LoraSpec(), seed=0)), load(folder), load(folder)
    merged.load_state_tensors(policy.weights())
    torch.testing.assert_close(logprobs(policy), logprobs(merged), rtol=0, atol=1e-5)
    assert (logprobs(policy) - logprobs(base)).abs().max() > 0.1


def test_the_reference_is_the_base_bit_for_bit_and_training_goes_on_after_it(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    policy, base = moved(load(folder).with_adapters(LoraSpec(), seed=0)), load(folder)
    before = logprobs(policy)
    reference = policy.reference()
    assert reference is policy.model
    with torch.no_grad(), policy.without_adapters():
        micro_batch = make_micro_batch(rollout_batch(), advantages=np.zeros((2, 4)))
        assert torch.equal(response_logprobs(reference, micro_batch, 1.0), logprobs(base))
    assert torch.equal(logprobs(policy), before)
    assert all(parameter.requires_grad for parameter in policy.trained_parameters().values())


def test_gradient_checkpointing_gives_the_same_gradient(tmp_path: Path) -> None:
    folder, gradients = tiny_model_folder(tmp_path), []
    for gradient_checkpointing in (False, True):
        policy = load(folder, gradient_checkpointing=gradient_checkpointing).with_adapters(LoraSpec(), seed=0)
        logprobs(moved(policy)).sum().backward()
        gradients.append({name: p.grad for name, p in policy.trained_parameters().items()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_a_tied_head_an_embedding_and_unknown_names_are_refused(tmp_path: Path) -> None:
    tied = load(tiny_model_folder(tmp_path / "tied"))
    assert "lm_head is tied to the embedding" in refused(tied, "lm_head")
    assert "model.embed_tokens is a Embedding" in refused(tied, "embed_tokens")
    assert "`query` is no layer of the model" in refused(tied, "q_proj", "query")
    assert "end in down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in refused(tied, "query")


def test_a_head_of_its_own_can_have_an_adapter(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, tied=False)
    policy = load(folder).with_adapters(LoraSpec(target_modules=("lm_head",)), seed=0)
    base = copies(policy.weights())
    changed = dict(moved(policy).weights())
    assert [name for name in base if not torch.equal(base[name], changed[name])] == ["lm_head.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_a_merge_is_its_rule_to_the_last_bit_whatever_the_threads(dtype: torch.dtype, rank: int) -> None:
    """The rule again, in Python's integers and fractions of them: no sum is rounded."""
    draw = torch.Generator().manual_seed(rank)
    weight = torch.randn(40, 30, generator=draw).to(dtype)
    lora_a, lora_b = torch.randn(rank, 30, generator=draw), 1e-3 * torch.randn(40, rank, generator=draw)
    merged = []
    for threads in (1, 3):
        with_threads(threads, lambda: merged.append(merge(weight, lora_a, lora_b, scaling=0.3)))
    bits = (53 - math.ceil(math.log2(rank))) // 2
    exponents = [math.frexp(float(matrix.abs().max()))[1] for matrix in (lora_a, lora_b)]
    a, b = (
        [[round(math.ldexp(value, bits - exponent)) for value in row] for row in matrix.tolist()]
        for matrix, exponent in zip((lora_a, lora_b), exponents, strict=True)
    )
    factor = math.ldexp(0.3, sum(exponents) - 2 * bits)
    expected = [
        [
            sum(b[row][k] * a[k][column] for k in range(rank)) * factor + float(weight[row, column])
            for column in range(30)
        ]
        for row in range(40)
    ]
    assert torch.equal(merged[0], torch.tensor(expected, dtype=torch.float64).to(dtype))
    assert torch.equal(merged[1], merged[0])


def test_a_merge_of_many_ranks_and_chunks_is_as_near_as_float32_can_be() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(3 * CHUNK_ITEMS // 500, 500, generator=draw)
    lora_a, lora_b = torch.randn(64, 500, generator=draw), torch.randn(len(weight), 64, generator=draw)
    exact = weight.double() + 2.0 * (lora_b.double() @ lora_a.double())
    merged = merge(weight, lora_a, lora_b, scaling=2.0)
    assert (merged - exact).abs().max() < 1e-6 * exact.abs().max()


def merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, *, scaling: float) -> Tensor:
    target = torch.empty_like(weight)
    merge_into(target, weight, lora_a=lora_a, lora_b=lora_b, scaling=scaling)
    return target


def with_threads(count: int, work: Callable[[], None]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    work()
    torch.set_num_threads(before)


def halved(tmp_path: Path, *, tied: bool = True, **options: Any) -> Policy:
    """A policy in bfloat16, where merging rounds."""
    folder = tiny_model_folder(tmp_path, tied=tied)
    targets = ("q_proj", "down_proj") if tied else ("q_proj", "down_proj", "lm_head")
    return load(folder, dtype="bfloat16", **options).with_adapters(LoraSpec(rank=4, target_modules=targets), seed=0)


def as_a_generator_holds_it(policy: Policy, folder: Path) -> Policy:
    """The published weights in a model without adapters."""
    plain = load(folder, dtype="bfloat16")
    plain.load_state_tensors(policy.weights())
    return plain


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_where_merging_rounds_a_pass_is_that_of_the_published_weights_bit_for_bit(
    tmp_path: Path, *, tied: bool, gradient_checkpointing: bool
) -> None:
    policy = moved(halved(tmp_path, tied=tied, gradient_checkpointing=gradient_checkpointing))
    generator = as_a_generator_holds_it(policy, tmp_path / "qwen3")
    assert torch.equal(logprobs(policy), logprobs(generator))
    assert not torch.equal(logprobs(policy), logprobs(load(tmp_path / "qwen3", dtype="bfloat16")))


def test_where_merging_rounds_the_matrices_get_the_gradient_of_the_rounded_weights(tmp_path: Path) -> None:
    policy = moved(halved(tmp_path))
    generator = as_a_generator_holds_it(policy, tmp_path / "qwen3")
    for one in (policy, generator):
        logprobs(one).sum().backward()
    assert policy.adapters is not None
    of_weights = dict(generator.model.named_parameters())
    for layer in policy.adapters.layers:
        lora_a, lora_b = (policy.trained_parameters()[name] for name in matrix_names(layer))
        of_weight = of_weights[f"{layer}.weight"].grad
        assert of_weight is not None
        for matrix, expected in (
            (lora_a, policy.adapters.scaling * lora_b.T @ of_weight.float()),
            (lora_b, policy.adapters.scaling * of_weight.float() @ lora_a.T),
        ):
            assert matrix.grad is not None
            assert matrix.grad.dtype == torch.float32
            # The other one was rounded to bfloat16 on its way.
            assert (matrix.grad - expected).norm() < 0.01 * expected.norm()


def test_steps_too_small_for_bfloat16_add_up_in_the_matrices(tmp_path: Path) -> None:
    policy = halved(tmp_path)
    before = copies(policy.weights())
    with torch.no_grad():
        for name, parameter in policy.trained_parameters().items():
            parameter.fill_(1e-3 if ".lora_A." in name else 0.0)
    name_b = next(name for name in policy.trained_parameters() if ".lora_B." in name)
    changed: list[int] = []
    for _ in range(400):
        with torch.no_grad():
            policy.trained_parameters()[name_b].add_(1e-3)
        policy.follow()
        changed.append(sum(int((before[name] != now).sum()) for name, now in policy.weights().items()))
    assert changed[0] < 0.1 * changed[-1]
    assert changed[-1] > 500


def test_where_merging_rounds_the_base_is_what_it_was_inside_and_after(tmp_path: Path) -> None:
    policy = halved(tmp_path)
    plain = load(tmp_path / "qwen3", dtype="bfloat16")
    base_digest = policy.base_digest
    moved(policy, seed=1)
    trained = moved(policy, seed=2)
    expected, published = logprobs(trained), copies(trained.weights())
    with trained.without_adapters():
        assert torch.equal(logprobs(trained), logprobs(plain))
    assert torch.equal(logprobs(trained), expected)
    assert same(trained.weights(), published)
    assert same(trained.base_tensors(), plain.weights())
    assert tensors_digest(trained.base_tensors()) == base_digest
    again = moved(load(tmp_path / "qwen3", dtype="bfloat16").with_adapters(TARGETS, seed=0), seed=2)
    assert same(again.weights(), published)


def test_where_merging_rounds_a_restored_policy_goes_on_from_the_published_weights(tmp_path: Path) -> None:
    policy = moved(halved(tmp_path))
    optimizer = stepped(policy)
    policy.follow()
    checkpoint_of(policy, optimizer, tmp_path / "i000000")
    fresh = halved(tmp_path)
    restore_state(
        read_checkpoint(tmp_path / "i000000"),
        fresh,
        PolicyOptimizer(fresh.trained_parameters(), OptimizerSpec(learning_rate=0.1)),
    )
    assert same(fresh.weights(), policy.weights())
    assert torch.equal(logprobs(fresh), logprobs(policy))


def test_in_float32_a_pass_is_pefts(tmp_path: Path) -> None:
    policy = load(tiny_model_folder(tmp_path)).with_adapters(ATTENTION, seed=0)
    assert policy.adapters is not None
    assert policy.adapters.merged_layers is None
    assert all("forward" not in vars(layer) for layer in policy.adapters.layers.values())


def test_rows_of_a_merge_are_rows_of_the_whole_one() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 5, generator=draw).bfloat16()
    lora_a, lora_b = torch.randn(3, 5, generator=draw), torch.randn(7, 3, generator=draw)
    whole = merge(weight, lora_a, lora_b, scaling=2.0)
    for start, stop in ((0, 4), (4, 7), (7, 7)):
        rows = weight[start:stop].clone()
        merge_into(rows, rows, lora_a=lora_a, lora_b=lora_b, scaling=2.0, first_row=start)
        assert torch.equal(rows, whole[start:stop])


def test_a_checkpoint_holds_adapters_alone_and_restores_them(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    policy = moved(load(folder).with_adapters(ATTENTION, seed=0))
    before, optimizer = copies(policy.state_tensors()), stepped(policy)
    assert not same(before, policy.state_tensors())
    written = checkpoint_of(policy, optimizer, tmp_path / "i000000")
    assert written < 0.2 * sum(tensor.nbytes for tensor in policy.weights().values())

    fresh = load(folder).with_adapters(ATTENTION, seed=5)
    fresh_optimizer = PolicyOptimizer(fresh.trained_parameters(), OptimizerSpec())
    restore_state(read_checkpoint(tmp_path / "i000000"), fresh, fresh_optimizer)
    assert same(fresh.weights(), policy.weights())
    assert same(fresh_optimizer.state_tensors(), optimizer.state_tensors())


def test_a_checkpoint_says_of_adapters_only_where_there_are_some(tmp_path: Path) -> None:
    policy = load(tiny_model_folder(tmp_path))
    assert adapter_state(policy) is None
    state = adapter_state(policy.with_adapters(ATTENTION, seed=0))
    assert state is not None
    assert state.base_digest == tensors_digest(policy.base_tensors())


def test_a_checkpoint_on_another_base_is_refused(tmp_path: Path) -> None:
    policy = load(tiny_model_folder(tmp_path)).with_adapters(ATTENTION, seed=0)
    checkpoint_of(policy, stepped(policy), tmp_path / "i000000")
    other = load(tiny_model_folder(tmp_path / "other", seed=1)).with_adapters(ATTENTION, seed=0)
    with refusal_of("model.path", match="not the one that the adapters"):
        restore_state(
            read_checkpoint(tmp_path / "i000000"), other, PolicyOptimizer(other.trained_parameters(), OptimizerSpec())
        )


def stepped(policy: Policy) -> PolicyOptimizer:
    optimizer = PolicyOptimizer(policy.trained_parameters(), OptimizerSpec(learning_rate=0.1))
    logprobs(policy).sum().backward()
    step_on_grads(optimizer, 0.1)
    return optimizer


def checkpoint_of(policy: Policy, optimizer: PolicyOptimizer, folder: Path) -> int:
    """Bytes of its model file."""
    digest = tensors_digest(policy.weights())
    write_checkpoint(
        folder,
        job_id="job",
        iteration=0,
        weights_digest=digest,
        save=lambda scratch: save_state(scratch, policy, optimizer),
        adapters=adapter_state(policy),
    )
    return (folder / "model.safetensors").stat().st_size
