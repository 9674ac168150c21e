"""`trainer.packing = "as_sampled"`: the trainer gives each sampled token the very log-prob of its generator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import Packing, make_micro_batch, split_rows
from consumer.model import language_head
from consumer.model.shared_prompt.trial import check_as_sampled, share_prompts
from contracts.errors import InvalidInput
from contracts.rollouts import Completion, RolloutBatch
from contracts.sampling import SamplingParams
from contracts.spec.job import ModelSpec
from onbeat.base.kernels import use_onednn
from producer.engine.transformers.engine import TransformersEngine
from tests.builders import batch_of, char_tokenizer, rollout
from tests.building.pairs import pairwise
from tests.contract.engine_rigs import Rig, reference_model, rig_of, setup
from tests.contract.test_shared_prompts import small_model

SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=19),
    "cool": SamplingParams(max_new_tokens=19, temperature=0.7),
    "cut": SamplingParams(max_new_tokens=19, temperature=1.3, top_p=0.9, top_k=7),
    "late": SamplingParams(max_new_tokens=19, min_new_tokens=11),
    "biased": SamplingParams(max_new_tokens=19, logit_bias={"1": 1.5, "5": -2.25}),
    "penalised": SamplingParams(max_new_tokens=19, temperature=0.9, repetition_penalty=1.3),
    "all": SamplingParams(
        max_new_tokens=19, top_p=0.9, min_new_tokens=4, logit_bias={"7": 2.0}, repetition_penalty=0.8
    ),
}
RAGGED = ([5, 6, 7], [8], [4, 9, 10, 11, 12, 3, 2, 5, 6, 7, 8, 9, 4, 4, 5, 6, 7, 8], [13, 5])
PROMPTS = {
    "ragged": RAGGED,
    "even": tuple([prompt[0], 6, 7, 8, 9] for prompt in RAGGED),
    "one": ([3 + number % 20 for number in range(33)],),
}
WINDOWED = ("mistral, sliding", "qwen2, sliding", "gemma3_text", "phi3, sliding", "olmo3, sliding")
"""Windows of 4 to 6 tokens: "even" prompts are as long as a window, or a token shorter or longer."""
NAMES = ("llama", "qwen2", "qwen3", "qwen3 by oneDNN", "gemma", "granite", "mistral", *WINDOWED)
BY_ONEDNN = " by oneDNN"


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("as-sampled") / request.param.replace(", ", "-").replace(" ", "-")
    model = small_model(
        request.param.removesuffix(BY_ONEDNN),
        vocab_size=len(char_tokenizer()),
        eos_token_id=1,
        initializer_range=0.2,
        intermediate_size=64,
    )
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    matmul = "onednn" if request.param.endswith(BY_ONEDNN) else UNSET
    engine = TransformersEngine(dataclasses.replace(setup(folder), model=ModelSpec(path=folder.name, matmul=matmul)))
    built = rig_of(request.param, engine, folder, folder.parent / "runs")
    built.load()
    yield built
    built.close()


def sampled(rig: Rig, prompts: Any, sampling: SamplingParams) -> RolloutBatch:
    groups = rig.generate(rig.publish(0), prompts, sampling=sampling, group_size=8)
    return batch_of([(prompt, [_rollout(one) for one in group]) for prompt, group in zip(prompts, groups, strict=True)])


def _rollout(completion: Completion) -> Any:
    return replace(rollout([3], 1.0), completion=completion)


def logprobs_of(
    model: PreTrainedModel, batch: RolloutBatch, packing: Packing, sampling: SamplingParams, *, max_tokens: int = 10_000
) -> tuple[list[bytes], dict[str, Tensor]]:
    """The log-probs of each completion, and the gradient of a sum that weighs each token differently."""
    model.zero_grad(set_to_none=True)
    rows = np.arange(batch.num_completions)
    found: list[bytes] = []
    for part in split_rows(batch, rows, packing=packing, max_tokens=max_tokens):
        advantages = np.ones((len(batch.groups), batch.group_size))
        micro_batch = make_micro_batch(
            batch, advantages=advantages, rows=part, packing=packing, sampling=sampling, end_ids=frozenset({1})
        )
        logprobs = response_logprobs(model, micro_batch, sampling.temperature)
        (logprobs * torch.cos(torch.arange(logprobs.numel())).view_as(logprobs)).sum().backward()
        values = zip(logprobs.detach(), micro_batch.loss_mask, strict=True)
        found += [row[real].numpy().tobytes() for row, real in values]
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pairwise(indirect=["rig"], rig=NAMES, sampling_name=SAMPLINGS, prompts_name=PROMPTS, max_tokens=[10_000, 60])
def test_log_probs_are_those_that_the_generator_sampled_with(
    rig: Rig, sampling_name: str, prompts_name: str, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a batch goes through in several passes, and the head takes few tokens at a time."""
    sampling = SAMPLINGS[sampling_name]
    batch = sampled(rig, PROMPTS[prompts_name], sampling)
    assert rig.folder is not None
    model = reference_model(rig.folder)
    if rig.kind.endswith(BY_ONEDNN):
        use_onednn(model)
    share_prompts(model)
    if max_tokens == 60:
        monkeypatch.setattr(language_head, "CHUNK_LOGITS", 21 * len(char_tokenizer()))
    actual, gradients = logprobs_of(model, batch, "as_sampled", sampling, max_tokens=max_tokens)
    assert actual == [one.completion.generator_logprobs for group in batch.groups for one in group.rollouts]
    packed, expected = logprobs_of(model, batch, "shared_prompt", sampling, max_tokens=max_tokens)
    assert packed != actual
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_what_cannot_have_the_bits_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="an MLP of 48, not a multiple of 32"):
        check_as_sampled(small_model("llama"), torch.device("cpu"))
    with pytest.raises(InvalidInput, match="passes on a CPU"):
        check_as_sampled(small_model("llama"), torch.device("cuda"))
