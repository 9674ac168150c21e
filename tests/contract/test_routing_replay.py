"""Routing replay: at the trainer a token goes through the experts that it went through at the generator.

    engine's routers ─ experts of each token ─▶ completions ─▶ batch ─▶ the trainer's routers ─▶ scores at these experts

The reference is written apart from the trainer: a router with experts of a table, the equation of the loss, and plain
autograd in float64, a response at a time.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import MicroBatch, make_micro_batch
from consumer.model.inputs import Packing
from consumer.model.policy import Policy
from consumer.model.shared_prompt.passes import Passes
from contracts.encoding.arrays import unpack_int32
from contracts.errors import BatchFailed, ContractViolation, InvalidInput
from contracts.rollouts import Completion, Rollout, RolloutBatch, RolloutGroup, batch_digest
from contracts.sampling import SamplingParams
from onbeat.base.routers import TAP, RouteShape, replay, tap_routers
from onbeat.data.routes import OWN, pack_routes, unpack_routes
from producer.engine.growing_rows import GrowingBatch
from producer.engine.sampling import Ends
from producer.engine.transformers.decoding import LoneDecoding
from tests.builders import batch_of, job_spec, prompt_batch, rollout_batch
from tests.contract.engine_rigs import transformers_rig
from tests.contract.test_families import learner_of, published
from tests.contract.test_streamed_gradient import iteration_of, relative_error, streamed_gradient, to_float64
from tests.contract.test_streamed_losses import equation_gradient
from tests.families import MIXTURES, SIZES
from tests.loss_equations import Equation

PROMPTS = ([5, 6, 7], [8], [4, 9, 10, 11, 12, 3, 2])
SHAPE = RouteShape(num_layers=2, top_k=2, num_experts=4)
REFUSED = {
    "llama": "LlamaForCausalLM has no experts to route to",
    "llama4_text": "Llama4Router is no router whose choice can be replayed: it doesn't return logits, scores and",
    "phimoe": "PhimoeTopKRouter is no router whose choice can be replayed: the experts that it returns are not those",
    "jamba": "JambaSparseMoeBlock has experts, and no router of its own",
}
"""Family → what is said of it."""
LAYOUTS = ("padded", "shared_prompt", "prompt_cache")
UNPACKED = frozenset({"gpt_oss"})
"""Families whose attention has sinks, so that no packed sequence shares a prompt."""


def model_of(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, without a folder."""
    sizes = SIZES | {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1} | MIXTURES.get(family, {}) | changes
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()


def scored(completions: Sequence[Sequence[Completion]], prompts: Sequence[Sequence[int]]) -> RolloutBatch:
    """The batch that a generator publishes of these completions, with rewards of 0 and 1."""
    rollouts = [
        [
            Rollout(completion=completion, text="", reward=float(number % 2), reward_breakdown={})
            for number, completion in enumerate(group)
        ]
        for group in completions
    ]
    return batch_of(list(zip(prompts, rollouts, strict=True)))


def decoded(model: Any, prompts: Sequence[Sequence[int]] = PROMPTS, **changes: Any) -> list[list[Completion]]:
    """Samples a batch with routes by the engine's own decoder."""
    fields: dict[str, Any] = {"group_size": 4, "routing_replay": True} | changes
    growing = GrowingBatch(batch=prompt_batch(prompts, **fields))
    # Many ends, so that rows leave at different steps.
    decoder = LoneDecoding(model, Ends(frozenset(range(1, 9))))
    with torch.inference_mode():
        decoder.join(growing)
        while not growing.finished:
            assert decoder.advance() == []
    return growing.completions


def laid_out(batch: RolloutBatch, packing: Any, shape: RouteShape) -> MicroBatch:
    return make_micro_batch(batch, advantages=np.ones((len(batch.groups), 4)), packing=packing, route_shape=shape)


@pytest.mark.parametrize("family", sorted(MIXTURES.keys() - REFUSED.keys()))
def test_a_family_replays_the_choices_that_were_recorded_and_any_others_with_a_gradient(family: str) -> None:
    model = model_of(family)
    tokens = torch.randint(2, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    untapped = model(tokens).logits
    routers = tap_routers(model)
    assert torch.equal(model(tokens).logits, untapped), "idle taps change nothing"
    routers.record(True)
    assert torch.equal(model(tokens).logits, untapped)
    recorded = routers.take_recorded()
    routers.record(False)
    assert recorded.shape == (14, routers.shape.num_layers, 2)
    replay(model, recorded)
    assert torch.equal(model(tokens).logits, untapped), "a router's own choice is replayed to its own bits"
    replay(model, torch.full_like(recorded, OWN))
    assert torch.equal(model(tokens).logits, untapped)
    # 3 - x is another expert for each of 0 … 3, and keeps the two of a token apart.
    replay(model, 3 - recorded)
    others = model(tokens).logits
    assert not torch.allclose(others, untapped, atol=1e-2)
    others.sum().backward()
    gates = [tensor for name, tensor in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
    assert gates
    assert all(gate.grad is not None and gate.grad.abs().max() > 0 for gate in gates)


@pytest.mark.parametrize("family", REFUSED)
def test_a_router_of_an_unknown_shape_is_refused_by_name_by_trainer_and_engine(family: str) -> None:
    with torch.device("meta"):
        model = model_of(family)
    words = REFUSED[family]
    with pytest.raises(InvalidInput, match=rf"algorithm\.routing_replay: {words}"):
        tap_routers(model)
    with pytest.raises(BatchFailed, match=words):
        LoneDecoding(model, Ends(frozenset())).join(
            GrowingBatch(batch=prompt_batch(PROMPTS, routing_replay=True, group_size=4))
        )


def test_a_learner_of_a_dense_model_refuses_replay_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"routing_replay: Qwen3ForCausalLM has no experts .*leave it out"):
        learner_of(tmp_path, "qwen3", algorithm__routing_replay=True)


def test_a_job_whose_routes_alone_may_be_larger_than_a_batch_is_refused_with_their_bytes(tmp_path: Path) -> None:
    """4 bytes a token: 2 prompts of 100 tokens, each with 4 completions of 5 tokens, of which the last has none."""
    limited = {"algorithm__routing_replay": True, "limits__max_batch_bytes": 1024}
    assert 2 * (100 + 4 * 4) * 4 == 928
    learner_of(tmp_path, "qwen3_moe", rollout__max_prompt_tokens=100, **limited)
    with pytest.raises(InvalidInput, match=r"1,024 are fewer than the 1,728 bytes of the routes .*, 4 a token"):
        learner_of(tmp_path, "qwen3_moe", rollout__max_prompt_tokens=200, **limited)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2"])
def test_the_engines_routes_are_those_of_each_token_and_the_layouts_put_them_in_their_places(family: str) -> None:
    """Rows end at different steps and leave; the trainer's own choices under equal float32 weights are the measure."""
    model = model_of(family)
    completions = decoded(model, sampling=SamplingParams(max_new_tokens=12))
    assert len({completion.num_tokens for group in completions for completion in group}) > 2
    batch = scored(completions, PROMPTS)
    routers = tap_routers(model)
    for prompt, group in zip(PROMPTS, completions, strict=True):
        for number, completion in enumerate(group):
            assert (completion.prompt_routes is not UNSET) == (number == 0)
            fed = unpack_int32(completion.token_ids)[:-1]
            routers.record(True)
            model(torch.tensor([[*prompt, *fed]]))
            experts = pack_routes(routers.take_recorded().numpy(), routers.shape)
            routers.record(False)
            assert (group[0].prompt_routes or b"") + (completion.routes or b"") == experts
    for packing in LAYOUTS:
        if packing == "shared_prompt" and family in UNPACKED:
            continue
        micro_batch = laid_out(batch, packing, routers.shape)
        assert micro_batch.routes is not None
        with torch.no_grad():
            # The first pass tries the model with tokens of its own; it is no part of what is recorded.
            own = response_logprobs(model, micro_batch, 1.0)
            routers.record(True)
            assert torch.equal(response_logprobs(model, micro_batch, 1.0), own)
        experts = routers.take_recorded()
        routers.record(False)
        is_padding = (micro_batch.routes == OWN).flatten(1).all(dim=1)
        assert is_padding.any() == (packing != "shared_prompt")
        assert torch.equal(micro_batch.routes[~is_padding].long(), experts[~is_padding])
        replay(model, micro_batch.routes)
        with torch.no_grad():
            assert torch.equal(response_logprobs(model, micro_batch, 1.0), own)
        replay(model, None)


def drawn_experts(name: str, num_tokens: int) -> np.ndarray:
    """[M, L, k] experts that no router chose, the same for the same name."""
    draw = random.Random(name)
    return np.array(
        [[draw.sample(range(4), 2) for _ in range(SHAPE.num_layers)] for _ in range(num_tokens)], dtype=np.int64
    ).reshape(num_tokens, SHAPE.num_layers, 2)


def with_routes(batch: RolloutBatch) -> RolloutBatch:
    """The batch with experts drawn for each token of each prompt and response."""

    def group_with(group: RolloutGroup) -> RolloutGroup:
        prompt = unpack_int32(group.prompt_token_ids)
        rollouts = []
        for number, rollout in enumerate(group.rollouts):
            response = unpack_int32(rollout.completion.token_ids)
            experts = drawn_experts(f"{prompt}{response}", len(response) - 1)
            changes: dict[str, Any] = {"routes": pack_routes(experts, SHAPE)}
            if number == 0:
                changes["prompt_routes"] = pack_routes(drawn_experts(f"{prompt}", len(prompt)), SHAPE)
            rollouts.append(replace(rollout, completion=replace(rollout.completion, **changes)))
        return replace(group, rollouts=tuple(rollouts))

    return replace(batch, groups=tuple(map(group_with, batch.groups)))


def table_router(layer: int, experts_now: Callable[[], np.ndarray]) -> Any:
    """Qwen3-MoE's router, written anew: softmax over all experts, the table's ones, which sum to 1."""

    def forward(self: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts = torch.from_numpy(experts_now()[:, layer])
        logits = states.reshape(-1, states.shape[-1]) @ self.weight.T
        # The class takes the softmax in float32, whatever the model is.
        chances = torch.softmax(logits.float(), dim=-1)
        weights = torch.stack([of_token[chosen] for of_token, chosen in zip(chances, experts, strict=True)])
        return logits, (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), experts

    return forward


def reference_of(policy: Policy, batches: Sequence[RolloutBatch]) -> None:
    """Puts routers in a model that look up the experts of the sequence which goes through, by its tokens."""
    tables: dict[tuple[int, ...], np.ndarray] = {}
    for batch in batches:
        for group in batch.groups:
            prompt = unpack_int32(group.prompt_token_ids)
            for rollout in group.rollouts:
                response = unpack_int32(rollout.completion.token_ids)
                # The last token's experts change nothing that is learnt: its logits predict no token.
                parts = [
                    drawn_experts(f"{prompt}", len(prompt)),
                    drawn_experts(f"{prompt}{response}", len(response) - 1),
                    drawn_experts("last", 1),
                ]
                tables[*prompt, *response] = np.concatenate(parts)
    now: list[np.ndarray] = []

    def look_up(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        now[:] = [tables[tuple(kwargs["input_ids"][0].tolist())]]

    model: Any = policy.model
    model.register_forward_pre_hook(look_up, with_kwargs=True)
    routers = [module for module in model.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    for layer, router in enumerate(routers):
        router.forward = table_router(layer, lambda: now[0]).__get__(router)


@pytest.mark.parametrize(
    ("packing", "checkpointing"),
    [*((packing, False) for packing in LAYOUTS), ("padded", True), ("shared_prompt", True)],
)
def test_the_gradient_is_that_of_the_equation_through_the_experts_of_the_batch(
    tmp_path: Path, packing: Packing, checkpointing: bool
) -> None:
    """A pass by the cache calls the model several times; one that recomputes activations goes through it twice."""
    options = {"trainer__gradient_checkpointing": checkpointing, "trainer__packing": "padded"}
    policy = learner_of(tmp_path, "qwen3_moe", algorithm__routing_replay=True, **options).policy
    policy = dataclasses.replace(policy, passes=Passes(packing=packing, reason=""))
    apart = learner_of(tmp_path, "qwen3_moe", trainer__packing="padded").policy
    for one_policy in (policy, apart):
        to_float64(one_policy)
        # torch has no grouped product of float64.
        one_policy.model.set_experts_implementation("eager")
        for module in one_policy.model.modules():
            if type(module).__name__ == "Qwen3MoeTopKRouter":
                vars(module)["norm_topk_prob"] = True
    plain = iteration_of()
    batches = [with_routes(batch) for batch in plain]
    own = equation_gradient((apart, apart), plain, Equation())
    reference_of(apart, batches)
    expected = equation_gradient((apart, apart), batches, Equation())
    spec = job_spec(algorithm__routing_replay=True)
    # Not 1e-8: the scores of both are rounded to float32, and their gradients with them.
    assert relative_error(streamed_gradient(policy, batches, spec), expected) < 1e-6
    assert relative_error(own, expected) > 1e-2, "the routers themselves would have chosen others"


def test_a_reference_and_a_pass_of_another_job_choose_their_experts_themselves(tmp_path: Path) -> None:
    """With adapters the reference is the policy's own model; a copy of it has taps of its own."""
    policy = learner_of(tmp_path, "qwen3_moe", algorithm__routing_replay=True).policy
    copied = policy.beside().model
    tokens = torch.tensor([[5, 6, 7, 8]])
    own = policy.model(input_ids=tokens).logits
    replay(policy.model, torch.from_numpy(drawn_experts("x", 4)))
    assert not torch.equal(policy.model(input_ids=tokens).logits, own)
    assert torch.equal(copied(input_ids=tokens).logits, own)
    assert torch.equal(copy.deepcopy(copied)(input_ids=tokens).logits, own)


def test_routes_of_another_model_are_refused_and_none_is_made_up() -> None:
    batch = with_routes(rollout_batch(response_tokens=(3, 5)))
    for shape in (
        RouteShape(num_layers=3, top_k=2, num_experts=4),
        RouteShape(num_layers=2, top_k=2, num_experts=300),
        RouteShape(num_layers=2, top_k=2, num_experts=3),
    ):
        with pytest.raises(ContractViolation, match=r"bytes are no routes|is not among the model's 3"):
            laid_out(batch, "padded", shape)
    with pytest.raises(ContractViolation, match="0 bytes are no routes"):
        laid_out(rollout_batch(), "padded", SHAPE)


def test_routes_are_a_byte_an_expert_or_two_and_come_back_as_they_were() -> None:
    wide = RouteShape(num_layers=2, top_k=2, num_experts=300)
    experts = np.array([[[3, 1], [0, 2]], [[1, 0], [2, 3]]])
    assert pack_routes(experts, SHAPE) == bytes([3, 1, 0, 2, 1, 0, 2, 3])
    assert pack_routes(experts[:1] + 256, wide) == bytes([3, 1, 1, 1, 0, 1, 2, 1])
    for shape in (SHAPE, wide):
        packed = pack_routes(experts, shape)
        assert np.array_equal(unpack_routes(packed, shape, num_tokens=2, field="routes"), experts)
    assert unpack_routes(b"", SHAPE, num_tokens=0, field="routes").shape == (0, 2, 2)
    with pytest.raises(ContractViolation, match="each of its experts once"):
        unpack_routes(bytes([3, 3, 0, 2]), SHAPE, num_tokens=1, field="routes")


def test_the_digest_of_a_batch_has_its_routes() -> None:
    batch = with_routes(rollout_batch(response_tokens=(3, 5)))
    group = batch.groups[0]
    completion = group.rollouts[1].completion
    assert isinstance(completion.routes, bytes)
    turned = replace(completion, routes=bytes([completion.routes[0] ^ 1]) + completion.routes[1:])
    rollouts = (group.rollouts[0], replace(group.rollouts[1], completion=turned), *group.rollouts[2:])
    other = replace(batch, groups=(replace(group, rollouts=rollouts), *batch.groups[1:]))
    assert batch_digest(other) != batch_digest(batch)


def test_an_engine_says_routes_where_they_are_asked_for_and_samples_the_same_tokens(tmp_path: Path) -> None:
    policy = learner_of(tmp_path, "qwen3_moe").policy
    assert not [module for module in policy.model.modules() if hasattr(module, TAP)], "a job without replay has no taps"
    tensors = published(policy)
    rig = transformers_rig("qwen3_moe", tmp_path, tmp_path / "runs")
    try:
        version = rig.load(0, tensors)
        plain = rig.generate(version, PROMPTS)
        routed = rig.generate(version, PROMPTS, routing_replay=True)
        evaluated = rig.generate(version, PROMPTS, routing_replay=True, purpose="evaluation")
        again = rig.generate(version, PROMPTS)
    finally:
        rig.close()
    assert plain == again
    assert all(completion.routes is UNSET for group in (*plain, *evaluated) for completion in group)
    assert all(completion.routes is not UNSET for group in routed for completion in group)
    without = [[replace(completion, routes=UNSET, prompt_routes=UNSET) for completion in group] for group in routed]
    assert without == plain


def k3(trainer: Any, batch: RolloutBatch, shape: RouteShape, *, is_replayed: bool) -> float:
    """Mean over sampled tokens of the k3 estimate of KL(generator || trainer)."""
    micro_batch = laid_out(batch, "padded", shape)
    replay(trainer, micro_batch.routes if is_replayed else None)
    with torch.no_grad():
        logprobs = response_logprobs(trainer, micro_batch, 1.0)
    ratio = (logprobs - micro_batch.generator_logprobs)[micro_batch.loss_mask].double()
    return float((ratio.exp() - 1.0 - ratio).mean())


@pytest.mark.parametrize(("num_experts", "top_k", "at_least"), [(16, 2, 10.0), (64, 8, 2.0)])
def test_replay_brings_a_bfloat16_engine_nearer_to_a_float32_trainer(
    num_experts: int, top_k: int, at_least: float
) -> None:
    """The same weights, whose bfloat16 router chooses other experts where two are almost equally likely.

    One of two experts is half of what a layer adds, one of eight an eighth; what is left is bfloat16's rounding.
    """
    sizes = {"num_experts": num_experts, "num_experts_per_tok": top_k, "moe_intermediate_size": 32, "hidden_size": 64}
    options = {"num_hidden_layers": 4, "initializer_range": 0.1, "norm_topk_prob": True}
    prompts = [[random.Random(place).randrange(9, 60) for _ in range(16)] for place in range(4)]
    without, replayed = [], []
    for seed in range(3):
        engine = model_of("qwen3_moe", seed=seed, **sizes, **options).to(torch.bfloat16)
        trainer = copy.deepcopy(engine).float()
        shape = tap_routers(trainer).shape
        batch = scored(decoded(engine, prompts, sampling=SamplingParams(max_new_tokens=24)), prompts)
        without.append(k3(trainer, batch, shape, is_replayed=False))
        replayed.append(k3(trainer, batch, shape, is_replayed=True))
    assert all(after < before for before, after in zip(without, replayed, strict=True))
    assert sum(replayed) * at_least < sum(without)
