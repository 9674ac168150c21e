"""What every engine promises its generator: honest log-probs, complete batches, verified weights, equal bytes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from contracts.encoding.arrays import pack_int32, unpack_float32, unpack_int32
from contracts.encoding.wire import convert, encode
from contracts.errors import BatchFailed, WeightsRejected
from contracts.probes import ProbeRow
from contracts.rollouts import Completion
from contracts.sampling import SamplingParams
from contracts.spec.job import ModelSpec
from contracts.versions import WeightFile, WeightManifest, weights_digest
from producer.engine.base import VerifiedWeights
from producer.engine.growing_rows import GrowingBatch
from producer.engine.transformers import row_steps
from producer.engine.transformers.engine import STARTED_THREADS, TransformersEngine
from producer.engine.transformers.shared_decoding import SharedDecoding
from tests.builders import CHANGED_LOGITS, VOCABULARY, engine_setup, kept_ids, tiny_model_folder
from tests.contract.engine_rigs import (
    KINDS,
    MODELS,
    REPRODUCIBLE,
    SHARED,
    TIED,
    Rig,
    Tensors,
    fake_rig,
    reference_model,
    scaled,
    shared_rigs,
    transformers_rig,
    under,
)
from tests.refusals import refusal_of

PROMPTS = ([5, 6, 7], [8], [4, 9, 10, 11, 12, 3, 2], [13, 5])
"""Different lengths, so that padding is exercised."""
PROBE_ROWS = [
    ProbeRow(prompt=pack_int32(tokens[:-4]), scored=pack_int32(tokens[-4:]))
    for tokens in (
        [5, 6, 7, 8, 9, 4, 11, 12, 13, 14],
        [8, 3, 10, 15, 12, 4, 9, 5, 7, 6],
        [1, 0, 13, 11, 1, 0, 12, 3, 1, 2],
    )
]
"""Rows of one length. The last one has the ends and the padding of the model's tokens among them."""
SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=6),
    "cool": SamplingParams(max_new_tokens=6, temperature=0.7),
    "nucleus": SamplingParams(max_new_tokens=6, top_p=0.9),
    "top 5": SamplingParams(max_new_tokens=6, top_k=5),
    "min share": SamplingParams(max_new_tokens=6, min_p=0.05),
    "all": SamplingParams(max_new_tokens=6, temperature=0.7, top_p=0.9, top_k=5),
    "greedy": SamplingParams(max_new_tokens=6, temperature=0.0),
    "late": SamplingParams(max_new_tokens=6, min_new_tokens=4, stop_token_ids=(9,)),
    "biased": SamplingParams(max_new_tokens=6, logit_bias={"1": 3.0, "4": 2.5, "7": -100.0}),
    "penalised": SamplingParams(max_new_tokens=6, repetition_penalty=1.7),
    "changed, cut": convert(CHANGED_LOGITS | {"temperature": 0.7, "top_p": 0.9, "top_k": 9}, SamplingParams),
    "changed, greedy": convert(CHANGED_LOGITS | {"temperature": 0.0, "logit_bias": {"1": 20.0}}, SamplingParams),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for architecture, tied in TIED.items():
        tiny_model_folder(root, architecture, tied=tied)  # type: ignore[arg-type]
    return root


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Rig]]:
    yield from shared_rigs(tmp_path_factory.mktemp("engines"))


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, folders: Path, tmp_path: Path, shared: Callable[[str], Rig]) -> Iterator[Rig]:
    if request.param in SHARED:
        yield shared(request.param)
        return
    built = fake_rig(tmp_path) if request.param == "fake" else transformers_rig(request.param, folders, tmp_path)
    yield built
    built.close()


def distribution_of(
    logits: torch.Tensor, sampling: SamplingParams, prompt: list[int], completion: list[int], eos: int
) -> torch.Tensor:
    """[V] logits → log-probs by transformers' own processors. completion: of its turn alone."""
    scores: Any = logits[None]
    ids: Any = torch.tensor([[*prompt, *completion]])
    if sampling.logit_bias:
        biases: Any = {(int(token),): bias for token, bias in sampling.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(biases)(ids, scores)
    if sampling.repetition_penalty is not UNSET:
        # Each once: the gradient of one that stands twice would come twice.
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids.unique()[None], scores)
    if sampling.min_new_tokens is not UNSET:
        ends = [eos, *(sampling.stop_token_ids or ())]
        scores = MinNewTokensLengthLogitsProcessor(len(prompt), sampling.min_new_tokens, ends)(ids, scores)
    if sampling.temperature > 0.0:
        scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p is not UNSET:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return scores[0].log_softmax(dim=-1)


def tokens_of(completion: Completion) -> list[int]:
    return unpack_int32(completion.token_ids)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_log_probs_and_what_was_kept_are_those_of_a_full_forward_pass(rig: Rig, name: str) -> None:
    """What was kept is said of tokens that are trained; by vLLM where top_k bounds it, which trains no others."""
    manifest, sampling = rig.load(), SAMPLINGS[name]
    unsaid = rig.kind in SHARED and sampling.unbounded_truncation != ""
    if unsaid:
        with pytest.raises(BatchFailed, match=r"rollout\.sampling\.top_k: .* keeps without a top_k \(set it, too"):
            rig.generate(manifest, PROMPTS, sampling=sampling)
    groups = rig.generate(manifest, PROMPTS, sampling=sampling, purpose="evaluation" if unsaid else "train")
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            tokens = tokens_of(completion)
            whole = [
                distribution_of(rig.full_logits([*prompt, *tokens[:at]]), sampling, prompt, tokens[:at], rig.eos)
                for at in range(len(tokens))
            ]
            expected = [of_token[token].item() for of_token, token in zip(whole, tokens, strict=True)]
            assert unpack_float32(completion.generator_logprobs) == pytest.approx(expected, abs=1e-4)
            assert (completion.kept_sets is not UNSET) == (sampling.truncation != "" and not unsaid)
            if completion.kept_sets is not UNSET:
                left = [(of_token > -torch.inf).nonzero()[:, 0].tolist() for of_token in whole]
                assert [ids or list(range(len(whole[0]))) for ids in kept_ids(completion.kept_sets)] == left
    evaluated = rig.generate(manifest, PROMPTS, sampling=sampling, purpose="evaluation")
    assert all(completion.kept_sets is UNSET for group in evaluated for completion in group)


def expected_logprobs(rig: Rig, model: Callable[[list[int]], torch.Tensor]) -> list[float]:
    """A model's own log-probs of the scored tokens of `PROBE_ROWS`, from one full forward for each."""
    expected: list[float] = []
    for row in PROBE_ROWS:
        tokens = unpack_int32(row.prompt)
        for token in unpack_int32(row.scored):
            expected.append(model(tokens).float().log_softmax(-1)[token].item())
            tokens = [*tokens, token]
    return expected


def test_log_probs_of_given_tokens_are_those_of_a_full_forward_pass_under_the_version_that_is_held(rig: Rig) -> None:
    rig.load(0)
    first = unpack_float32(rig.run(rig.engine.logprobs(PROBE_ROWS)))
    assert first == pytest.approx(expected_logprobs(rig, rig.full_logits), abs=1e-4)
    half = scaled(rig.tensors, 0.5)
    rig.load(1, half)
    second = unpack_float32(rig.run(rig.engine.logprobs(PROBE_ROWS)))
    assert max(abs(np.subtract(first, second))) > 1e-2
    if rig.folder is not None:
        model = reference_model(rig.folder, half)

        def logits(tokens: list[int]) -> torch.Tensor:
            with torch.inference_mode():
                return model(input_ids=torch.tensor([tokens])).logits[0, -1]

        assert second == pytest.approx(expected_logprobs(rig, logits), abs=1e-4)
    rig.load(2)
    assert unpack_float32(rig.run(rig.engine.logprobs(PROBE_ROWS))) == pytest.approx(first, abs=1e-5)


def test_an_engine_without_verified_weights_has_no_log_probs_of_given_tokens(rig: Rig) -> None:
    with pytest.raises(BatchFailed, match="without verified weights has no log-probs"):
        rig.run(rig.engine.logprobs(PROBE_ROWS))


def test_a_batch_that_is_sampled_next_to_given_tokens_is_the_one_that_is_sampled_alone(rig: Rig) -> None:
    manifest = rig.load()
    alone = rig.generate(manifest, PROMPTS, group_size=8)
    measured = rig.run(rig.engine.logprobs(PROBE_ROWS))

    async def together() -> tuple[list[list[Completion]], bytes]:
        sampling = asyncio.ensure_future(rig.engine.generate(under(manifest, PROMPTS, group_size=8)))
        await asyncio.sleep(0)
        logprobs = await rig.engine.logprobs(PROBE_ROWS)
        return await sampling, logprobs

    sampled, measured_beside = rig.run(together())
    if rig.kind in REPRODUCIBLE:
        assert encode(sampled) == encode(alone)
        assert measured_beside == measured
    assert [list(map(tokens_of, group)) for group in sampled] == [list(map(tokens_of, group)) for group in alone]
    logprobs = [unpack_float32(completion.generator_logprobs) for completion in chain(*sampled)]
    expected = [unpack_float32(completion.generator_logprobs) for completion in chain(*alone)]
    assert list(chain(*logprobs)) == pytest.approx(list(chain(*expected)), abs=1e-5)
    assert unpack_float32(measured_beside) == pytest.approx(unpack_float32(measured), abs=1e-5)


@pytest.mark.parametrize("rig", MODELS, indirect=True)
def test_given_tokens_that_do_not_fit_the_model_are_refused_and_the_next_ones_are_measured(rig: Rig) -> None:
    rig.load()
    (row, *_) = PROBE_ROWS
    with pytest.raises(BatchFailed, match=r"needs 13[01] tokens of context, the (model|engine) has 128"):
        rig.run(rig.engine.logprobs([replace(row, prompt=pack_int32([5] * 126))]))
    with pytest.raises(BatchFailed, match="outside the vocabulary"):
        rig.run(rig.engine.logprobs([replace(row, prompt=pack_int32([5, 10_000]))]))
    assert len(rig.run(rig.engine.logprobs(PROBE_ROWS))) == 4 * len(PROBE_ROWS) * 4


def test_a_batch_is_complete_and_ends_where_it_must(rig: Rig) -> None:
    eos, max_new_tokens = rig.eos, 12
    groups = rig.generate(
        rig.load(), PROMPTS, group_size=24, sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=2.0)
    )
    assert [len(group) for group in groups] == [24] * len(PROMPTS)
    completions = [completion for group in groups for completion in group]
    for completion in completions:
        tokens = tokens_of(completion)
        assert eos not in tokens[:-1]
        assert completion.finish_reason == ("stop" if tokens[-1] == eos else "length")
        assert completion.finish_reason == "stop" or len(tokens) == max_new_tokens
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_a_stop_token_ends_a_row_as_the_model_s_own_does_and_changes_none_before_it(rig: Rig) -> None:
    manifest, free = rig.load(), SamplingParams(max_new_tokens=12, temperature=2.0)
    unstopped = rig.generate(manifest, PROMPTS, group_size=8, sampling=free)
    rows = [tokens_of(completion) for group in unstopped for completion in group]
    stop = next(token for tokens in rows for token in tokens[2:-1] if token != rig.eos)
    stopped = rig.generate(manifest, PROMPTS, group_size=8, sampling=replace(free, stop_token_ids=(stop,)))
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in rows]
    completions = [completion for group in stopped for completion in group]
    assert [tokens_of(completion) for completion in completions] == expected != rows
    assert all(completion.finish_reason == "stop" for completion in completions if tokens_of(completion)[-1] == stop)
    if rig.kind == "fake":
        return  # it has no vocabulary
    with pytest.raises(BatchFailed, match=r"correct rollout\.sampling\.stop_token_ids"):
        rig.generate(manifest, PROMPTS, sampling=replace(free, stop_token_ids=(2**20,)))


@pytest.mark.parametrize("least", [0, 4])
def test_a_stop_text_ends_a_row_with_the_token_that_completes_it_and_changes_none_before_it(
    rig: Rig, least: int
) -> None:
    """Each token but the special ones is a character, which are no part of the text that is looked at."""
    if rig.kind == "fake":
        return  # it writes no text
    letters = {number: letter for letter, number in VOCABULARY.items() if len(letter) == 1}
    manifest, free = rig.load(), SamplingParams(max_new_tokens=12, temperature=2.0, min_new_tokens=least or UNSET)
    unstopped = rig.generate(manifest, PROMPTS, group_size=8, sampling=free)
    rows = [tokens_of(completion) for group in unstopped for completion in group]
    texts = ["".join(letters.get(token, "") for token in tokens) for tokens in rows]
    # The second one is complete with the fourth token of a row.
    early = [
        text for tokens, text in zip(rows, texts, strict=True) if letters.keys() >= {*tokens[:4]} and len(text) > 5
    ]
    stop = (next(text[3:6] for text in texts if len(text) > 8), early[-1][2:4])
    stopped = rig.generate(manifest, PROMPTS, group_size=8, sampling=replace(free, stop=stop))
    ends = [until_text(tokens, letters, stop, least) for tokens in rows]
    completions = [completion for group in stopped for completion in group]
    assert [tokens_of(one) for one in completions] == [tokens[:end] for tokens, end in zip(rows, ends, strict=True)]
    assert sum(end < len(tokens) for tokens, end in zip(rows, ends, strict=True)) >= (1 if least else 2)
    assert (ends != [until_text(tokens, letters, stop, 0) for tokens in rows]) == bool(least)
    for completion, tokens, end in zip(completions, rows, ends, strict=True):
        assert completion.finish_reason == "stop" or end == len(tokens)


def until_text(tokens: list[int], letters: dict[int, str], stop: tuple[str, ...], least: int) -> int:
    """How many tokens there are when one completes a text, behind so many; all, where none does."""
    text = ""
    for number, token in enumerate(tokens, start=1):
        before, text = text, text + letters.get(token, "")
        if number > least and text != before and text.endswith(stop):
            return number
    return len(tokens)


def test_sampled_tokens_have_the_frequencies_of_the_softmax(rig: Rig) -> None:
    sampling, draws = SamplingParams(max_new_tokens=1), 2000
    groups = rig.generate(rig.load(), [PROMPTS[0]], group_size=draws, sampling=sampling, seed=7)
    expected = (
        distribution_of(rig.full_logits(list(PROMPTS[0])), sampling, PROMPTS[0], [], rig.eos).exp().numpy() * draws
    )
    observed = np.bincount([tokens_of(completion)[0] for completion in groups[0]], minlength=len(expected))
    common = expected >= 5.0
    pairs = [*zip(observed[common], expected[common], strict=True)]
    if not common.all():
        pairs.append((observed[~common].sum(), expected[~common].sum()))
    chi_square = sum((seen - mean) ** 2 / mean for seen, mean in pairs)
    freedom = len(pairs) - 1
    assert freedom >= 5
    assert chi_square < freedom + 4.0 * np.sqrt(2.0 * freedom)


@pytest.mark.parametrize("rig", MODELS, indirect=True)
def test_greedy_equals_the_generate_of_transformers_before_and_after_an_update(rig: Rig) -> None:
    sampling = SamplingParams(max_new_tokens=20, temperature=0.0)
    for version, factor in enumerate((1.0, 0.7)):
        tensors = scaled(rig.tensors, factor)
        groups = rig.generate(rig.load(version, tensors), PROMPTS, group_size=1, sampling=sampling)
        assert rig.folder is not None
        model = reference_model(rig.folder, tensors)
        for prompt, group in zip(PROMPTS, groups, strict=True):
            answer = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)
            assert tokens_of(group[0]) == answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rig", REPRODUCIBLE, indirect=True)
def test_the_same_batch_gives_the_same_bytes_whatever_ran_before(rig: Rig) -> None:
    manifest = rig.load()
    first = encode(rig.generate(manifest, PROMPTS))
    assert encode(rig.generate(manifest, PROMPTS)) == first
    other = rig.generate(manifest, [[7, 7, 7, 7], [3]], group_size=5, iteration=1)
    rig.load(1, scaled(rig.tensors, 0.5))
    rig.load(0)
    assert encode(rig.generate(manifest, PROMPTS)) == first
    assert encode(other) != first


@pytest.mark.parametrize("rig", REPRODUCIBLE, indirect=True)
def test_batches_of_several_sizes_in_turn_have_the_bytes_of_the_first_time(rig: Rig) -> None:
    manifest = rig.load()
    sizes = [([[5, 6, 7]], 3), ([[8], [9, 10]], 9), ([[5, 6, 7]], 3), ([[11]] * 3, 8)]
    in_turn = [rig.generate(manifest, prompts, group_size=number) for prompts, number in sizes * 2]
    assert in_turn[4:] == in_turn[:4]
    assert in_turn[0] == in_turn[2]


@pytest.mark.parametrize("rig", REPRODUCIBLE, indirect=True)
def test_a_generation_that_was_cancelled_changes_nothing_for_the_next(rig: Rig) -> None:
    manifest = rig.load()
    expected = encode(rig.generate(manifest, PROMPTS))

    async def drop_one() -> list[list[Completion]]:
        dropped = asyncio.ensure_future(rig.engine.generate(under(manifest, PROMPTS, iteration=1)))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.wait({dropped})
        return await rig.engine.generate(under(manifest, PROMPTS))

    assert encode(rig.run(drop_one())) == expected


def test_a_cancelled_generation_stops_at_its_next_token(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = transformers_rig("qwen3", folders, tmp_path)
    manifest = rig.load()
    steps: list[int] = []
    reached, go_on = threading.Event(), threading.Event()
    honest_join, honest_advance = SharedDecoding.join, SharedDecoding.advance

    def gated_join(decoding: SharedDecoding, growing: GrowingBatch) -> None:
        reached.set()
        go_on.wait(120.0)
        honest_join(decoding, growing)

    def counted_advance(decoding: SharedDecoding) -> list[GrowingBatch]:
        steps.append(1)
        return honest_advance(decoding)

    async def drop() -> None:
        batch = under(manifest, PROMPTS, sampling=SamplingParams(max_new_tokens=20))
        dropped = asyncio.ensure_future(rig.engine.generate(batch))
        await asyncio.to_thread(reached.wait, 120.0)
        dropped.cancel()
        await asyncio.wait({dropped})
        go_on.set()
        await rig.engine.aclose()
        assert dropped.cancelled()

    monkeypatch.setattr(SharedDecoding, "join", gated_join)
    monkeypatch.setattr(SharedDecoding, "advance", counted_advance)
    rig.run(drop())
    assert steps == []


@pytest.mark.parametrize("rig", REPRODUCIBLE, indirect=True)
def test_a_finished_row_changes_nothing_for_the_others(rig: Rig) -> None:
    manifest = rig.load()
    short, long = (
        rig.generate(
            manifest, PROMPTS, group_size=24, sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=4.0)
        )
        for max_new_tokens in (3, 9)
    )
    lengths = {len(tokens_of(completion)) for group in long for completion in group}
    assert {1, 2} & lengths, "some row must finish before the short batch ends"
    assert 9 in lengths
    for before, after in zip(chain(*short), chain(*long), strict=True):
        assert after.token_ids.startswith(before.token_ids)
        assert after.generator_logprobs.startswith(before.generator_logprobs)


@pytest.mark.parametrize("rig", REPRODUCIBLE, indirect=True)
def test_an_engine_that_slept_samples_the_same_bytes_as_before(rig: Rig) -> None:
    manifest = rig.load()
    expected = encode(rig.generate(manifest, PROMPTS))
    rig.run(rig.engine.sleep())
    rig.run(rig.engine.wake(num_threads=None))
    if rig.engine.policy_version is None:
        rig.load()
    assert encode(rig.generate(manifest, PROMPTS)) == expected


def test_the_number_of_threads_is_that_of_the_last_waking_and_a_new_engine_has_the_process_s_own(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed_with: list[int] = []
    honest_forward = row_steps.forward

    def noted(*arguments: Any) -> torch.Tensor:
        computed_with.append(torch.get_num_threads())
        return honest_forward(*arguments)

    # Prompts go through it whichever way the batch is decoded.
    monkeypatch.setattr(row_steps, "forward", noted)
    monkeypatch.setattr("producer.engine.transformers.decoding.forward", noted)
    rig = transformers_rig("qwen3", folders, tmp_path / "first")
    manifest = rig.load()
    for num_threads in (None, STARTED_THREADS + 2, None, STARTED_THREADS + 1):
        rig.run(rig.engine.wake(num_threads=num_threads))
        rig.generate(manifest, PROMPTS)
    rig.close()
    fresh = transformers_rig("qwen3", folders, tmp_path / "second")
    fresh.generate(fresh.load(), PROMPTS)
    fresh.close()
    own = STARTED_THREADS
    assert [number for number, _ in itertools.groupby(computed_with)] == [own, own + 2, own, own + 1, own]
    torch.set_num_threads(own)


def test_a_later_turn_draws_by_the_seed_that_its_prompt_has(rig: Rig) -> None:
    batch = under(rig.load(), [PROMPTS[0]] * 3, group_size=2)
    prompts = tuple(replace(one, sampler_seed=seed) for one, seed in zip(batch.prompts, (2**40, 2**40, 7), strict=True))
    first, same, other = rig.run(rig.engine.generate(replace(batch, prompts=prompts)))
    assert list(map(tokens_of, first)) == list(map(tokens_of, same)) != list(map(tokens_of, other))
    assert tokens_of(first[0]) != tokens_of(first[1])


def test_seed_iteration_purpose_prompt_and_sample_each_change_the_draw(rig: Rig) -> None:
    manifest, sampling = rig.load(), SamplingParams(max_new_tokens=8)
    same_prompts = [PROMPTS[0], PROMPTS[0]]
    groups = rig.generate(manifest, same_prompts, sampling=sampling)
    drawn = {completion.token_ids for group in groups for completion in group}
    for change in ({"seed": 1}, {"iteration": 1}, {"purpose": "evaluation"}):
        drawn.add(rig.generate(manifest, same_prompts, sampling=sampling, **change)[0][0].token_ids)
    assert len(drawn) == 7


def test_only_a_verified_load_sets_the_version(rig: Rig) -> None:
    assert rig.engine.policy_version is None
    manifest = rig.publish(3)
    with pytest.raises(BatchFailed, match="no verified weights"):
        rig.generate(manifest, PROMPTS)
    rig.run(rig.engine.load_weights(manifest))
    assert rig.engine.policy_version == VerifiedWeights(policy_version=3, weights_digest=manifest.weights_digest)


def test_a_batch_of_another_version_is_refused(rig: Rig) -> None:
    rig.load(0)
    other = rig.publish(1, scaled(rig.tensors, 0.5))
    with pytest.raises(BatchFailed, match="asks for version 1"):
        rig.generate(other, PROMPTS)


def test_new_weights_are_the_ones_that_sample(rig: Rig) -> None:
    before = rig.generate(rig.load(0), PROMPTS, group_size=8)
    after = rig.generate(rig.load(1, scaled(rig.tensors, 0.5)), PROMPTS, group_size=8)
    assert encode(before) != encode(after)


def flip_a_byte(folder: Path, tensors: Tensors) -> None:
    path = folder / "weights-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def shorten(folder: Path, tensors: Tensors) -> None:
    path = folder / "weights-0.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def remove_a_file(folder: Path, tensors: Tensors) -> None:
    (folder / "weights-0.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"), [(flip_a_byte, "digest"), (shorten, "bytes"), (remove_a_file, "is not at")]
)
def test_damaged_files_are_refused_and_leave_no_version(rig: Rig, damage: Callable[..., None], reason: str) -> None:
    rig.load(0)
    manifest = rig.publish(1, scaled(rig.tensors, 0.5))
    damage(rig.run_root / manifest.directory, rig.tensors)
    with pytest.raises(WeightsRejected, match=reason):
        rig.run(rig.engine.load_weights(manifest))
    assert rig.engine.policy_version is None
    with pytest.raises(BatchFailed):
        rig.generate(manifest, PROMPTS)


@pytest.mark.parametrize("rig", REPRODUCIBLE, indirect=True)
def test_a_received_version_samples_what_a_loaded_one_samples_and_the_older_one_comes_back(rig: Rig) -> None:
    tensors = [rig.tensors, scaled(rig.tensors, 0.5)]
    expected = [encode(rig.generate(rig.load(version, tensors[version]), PROMPTS)) for version in (0, 1)]
    manifests = [rig.load(), rig.publish(1, tensors[1])]
    assert rig.run(rig.engine.receive_weights(manifests, num_versions=2))
    assert {one.policy_version for one in rig.engine.ready_versions} == {0, 1}
    for path in rig.run_root.glob("job/weights/*/*"):
        path.unlink()
    for version in (0, 1, 0, 1):
        rig.run(rig.engine.load_weights(manifests[version]))
        held = rig.engine.policy_version
        assert held == VerifiedWeights(policy_version=version, weights_digest=manifests[version].weights_digest)
        assert encode(rig.generate(manifests[version], PROMPTS)) == expected[version]


@pytest.mark.parametrize("rig", REPRODUCIBLE, indirect=True)
def test_a_version_that_is_received_changes_nothing_of_what_is_sampled_meanwhile(rig: Rig) -> None:
    manifest = rig.load()
    expected = encode(rig.generate(manifest, PROMPTS, group_size=24))
    announced = [manifest, *(rig.publish(number, scaled(rig.tensors, 0.5 / number)) for number in range(1, 5))]

    async def beside() -> list[list[Completion]]:
        sampling = asyncio.ensure_future(rig.engine.generate(under(manifest, PROMPTS, group_size=24)))
        while await rig.engine.receive_weights(announced, num_versions=5):
            assert rig.engine.policy_version == rig.engine.ready_versions[0]
        return await sampling

    assert encode(rig.run(beside())) == expected
    assert sorted(one.policy_version for one in rig.engine.ready_versions) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rig", REPRODUCIBLE, indirect=True)
def test_a_damaged_version_is_not_received_and_the_one_in_use_goes_on(rig: Rig) -> None:
    manifest = rig.load()
    expected = encode(rig.generate(manifest, PROMPTS))
    other = rig.publish(1, scaled(rig.tensors, 0.5))
    flip_a_byte(rig.run_root / other.directory, rig.tensors)
    with pytest.raises(WeightsRejected, match="digest"):
        rig.run(rig.engine.receive_weights([manifest, other], num_versions=2))
    assert rig.engine.ready_versions == (rig.engine.policy_version,)
    assert encode(rig.generate(manifest, PROMPTS)) == expected


@pytest.mark.parametrize("rig", SHARED, indirect=True)
def test_an_engine_that_holds_one_version_receives_none_and_loads_the_next_between_batches(rig: Rig) -> None:
    assert rig.engine.ready_versions == ()
    manifests = [rig.load(), rig.publish(1, scaled(rig.tensors, 0.5))]
    assert not rig.run(rig.engine.receive_weights(manifests, num_versions=2))
    assert rig.engine.ready_versions == (rig.engine.policy_version,)
    rig.run(rig.engine.load_weights(manifests[1]))
    assert [one.policy_version for one in rig.engine.ready_versions] == [1]


def test_another_set_of_tensors_is_refused(rig: Rig) -> None:
    first = sorted(rig.tensors)[0]
    fewer = {name: tensor for name, tensor in rig.tensors.items() if name != first}
    more = {**rig.tensors, "model.extra": np.zeros(1, dtype=np.float32)}
    with pytest.raises(WeightsRejected, match=f"lacks 1 tensors, the first: {first}"):
        rig.load(1, fewer)
    with pytest.raises(WeightsRejected, match=r"the first: model\.extra"):
        rig.load(2, more)
    assert rig.engine.policy_version is None


def test_a_manifest_of_other_contents_is_refused(rig: Rig) -> None:
    honest, other = rig.publish(1, scaled(rig.tensors, 0.5)), rig.publish(0)
    stale = replace(honest, weights_digest=other.weights_digest)
    with pytest.raises(WeightsRejected, match=honest.weights_digest):
        rig.run(rig.engine.load_weights(stale))


def test_a_device_that_is_not_there_is_named(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refusal_of("ONBEAT_DEVICE", match="no CUDA device"):
        TransformersEngine(engine_setup(folders, tmp_path, device="cuda"))


def test_threads_that_follow_the_load_of_the_machine_are_refused_for_a_deterministic_job(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_DYNAMIC", "TRUE")
    with refusal_of("OMP_DYNAMIC", match="would follow the load of the machine"):
        TransformersEngine(engine_setup(folders, tmp_path, deterministic=True))


def test_a_closed_engine_holds_and_generates_nothing(folders: Path, tmp_path: Path) -> None:
    rig = transformers_rig("qwen3", folders, tmp_path)
    manifest = rig.load()
    rig.run(rig.engine.aclose())
    assert (rig.engine.policy_version, rig.engine.ready_versions) == (None, ())
    with pytest.raises(BatchFailed):
        rig.generate(manifest, PROMPTS)


@pytest.mark.parametrize("rig", MODELS, indirect=True)
def test_a_tensor_of_another_dtype_is_refused(rig: Rig) -> None:
    halves = {name: tensor.astype(np.float16) for name, tensor in rig.tensors.items()}
    with pytest.raises(WeightsRejected, match="float16"):
        rig.load(0, halves)


@pytest.mark.parametrize("rig", MODELS, indirect=True)
def test_a_prompt_beyond_the_models_context_fails_its_batch(rig: Rig) -> None:
    with pytest.raises(BatchFailed, match="needs 130 tokens of context, the model has 128"):
        rig.generate(rig.load(), [[5] * 120], sampling=SamplingParams(max_new_tokens=10))


@pytest.mark.parametrize("rig", MODELS, indirect=True)
def test_a_diverged_model_fails_its_batch_and_good_weights_repair_it(rig: Rig) -> None:
    with pytest.raises(BatchFailed, match=r"not finite|Out of range float"):
        rig.generate(rig.load(0, scaled(rig.tensors, float("nan"))), PROMPTS)
    assert len(rig.generate(rig.load(1), PROMPTS)) == len(PROMPTS)


def test_a_bfloat16_model_loads_and_samples(folders: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    engine = TransformersEngine(engine_setup(folders, tmp_path, model=ModelSpec(path="qwen3", dtype="bfloat16")))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folders / "qwen3" / "model.safetensors").items()}
    (tmp_path / "v000000").mkdir()
    file = tmp_path / "v000000" / "weights.safetensors"
    save_file(tensors, file)
    manifest = WeightManifest(
        policy_version=0,
        weights_digest=weights_digest(
            (name, "bfloat16", tuple(tensor.shape), tensor.view(torch.int16).numpy().tobytes())
            for name, tensor in tensors.items()
        ),
        dtype="bfloat16",
        directory="v000000",
        files=(WeightFile(name=file.name, num_bytes=file.stat().st_size),),
    )

    async def run() -> list[list[Completion]]:
        await engine.load_weights(manifest)
        groups = await engine.generate(under(manifest, PROMPTS))
        await engine.aclose()
        return groups

    assert [len(group) for group in asyncio.run(run())] == [2] * len(PROMPTS)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "no-such-model"}'), "not a causal"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "the tokenizer of .* does not load"),
    ],
)
def test_a_bad_model_folder_is_named(tmp_path: Path, spoil: Callable[[Path], None], problem: str) -> None:
    spoil(tiny_model_folder(tmp_path, "qwen3"))
    with refusal_of("model.path", match=problem):
        TransformersEngine(engine_setup(tmp_path))


def test_a_model_without_end_of_sequence_is_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, "qwen3")
    for name, wanted in (
        ("config.json", '"eos_token_id": 1'),
        ("generation_config.json", '"eos_token_id": 1'),
        ("tokenizer_config.json", '"eos_token": "<eos>"'),
    ):
        path = folder / name
        text = path.read_text()
        assert wanted in text
        path.write_text(text.replace(wanted, wanted.split(":")[0] + ": null"))
    with refusal_of("model.path", match="no end-of-sequence token"):
        TransformersEngine(engine_setup(tmp_path))


@pytest.mark.parametrize("rig", MODELS, indirect=True)
def test_a_token_beyond_the_vocabulary_fails_its_batch_and_not_the_engine(rig: Rig) -> None:
    manifest = rig.load()
    with pytest.raises(BatchFailed, match="outside the vocabulary"):
        rig.generate(manifest, [[5, 10_000]])
    assert len(rig.generate(manifest, PROMPTS)) == len(PROMPTS)
