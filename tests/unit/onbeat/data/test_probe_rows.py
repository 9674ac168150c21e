"""The rows of a job's probe: the same for all its versions, and made of tokens that any engine takes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.probes import ProbeRow
from contracts.rollouts import Prompt
from contracts.sampling import SamplingParams
from contracts.spec.rollout import ProbeSpec, RolloutSpec
from onbeat.data.probe_rows import plain_tokens, probe_rows
from tests.builders import char_tokenizer

SPEC = ProbeSpec(rows=16, tokens=12)
RANDOM = range(100, 164)
PROMPTS = tuple(
    Prompt(prompt_id=str(n), index=n, token_ids=pack_int32([n + 1] * length), text="", reference="")
    for n, length in enumerate((3, 8, 20))
)


def rows(probe: ProbeSpec = SPEC, *, seed: int = 7, longest: int = 512) -> list[list[int]]:
    return [whole(row) for row in made(probe, seed=seed, longest=longest)]


def made(
    probe: ProbeSpec = SPEC,
    *,
    seed: int = 7,
    longest: int = 512,
    max_new_tokens: int = 128,
    is_rough: bool = False,
) -> tuple[ProbeRow, ...]:
    spec = RolloutSpec(probe=probe, sampling=SamplingParams(max_new_tokens=max_new_tokens))
    return probe_rows(spec, PROMPTS, seed=seed, tokens=RANDOM, longest_tokens=longest, is_rough=is_rough)


def whole(row: ProbeRow) -> list[int]:
    return [*unpack_int32(row.prompt), *unpack_int32(row.scored)]


def test_the_rows_are_a_function_of_seed_prompts_and_spec() -> None:
    assert rows() == rows()
    assert rows(seed=8) != rows()
    assert rows(ProbeSpec(rows=3, tokens=12)) == rows()[:3]


def test_a_row_begins_as_a_prompt_of_the_job_does_and_goes_on_at_random() -> None:
    for row in rows():
        (number,) = {token for token in row if token < RANDOM[0]}
        prompt = unpack_int32(PROMPTS[number - 1].token_ids)
        begun = min(len(prompt), 8)
        assert row[:begun] == [number] * begun
        assert set(row[begun:]) <= set(RANDOM)
    assert {row[0] for row in rows()} == {1, 2, 3}
    assert len({token for row in rows() for token in row[8:]}) > 20, "the scored tokens are not a few"


@pytest.mark.parametrize(
    ("tokens", "longest", "prompt", "scored"), [(32, 512, 28, 4), (12, 9, 4, 4), (6, 512, 3, 3), (2, 512, 1, 1)]
)
def test_all_rows_are_of_one_length_that_the_model_takes_and_the_last_four_at_most_are_scored(
    tokens: int, longest: int, prompt: int, scored: int
) -> None:
    lengths = {
        (len(unpack_int32(row.prompt)), len(unpack_int32(row.scored)))
        for row in made(ProbeSpec(rows=5, tokens=tokens), longest=longest)
    }
    assert lengths == {(prompt, scored)}


@pytest.mark.parametrize(("max_new_tokens", "num_scored"), [(1, 2), (5, 2), (6, 3), (8, 4), (512, 4)])
def test_a_job_of_short_completions_has_fewer_tokens_of_a_row_compared_but_in_16_bits_and_for_experts(
    max_new_tokens: int, num_scored: int
) -> None:
    """Each but the first is a decoding step of an engine; there is one in any case."""
    for is_rough, expected in ((False, num_scored), (True, 4)):
        rows_of_job = made(max_new_tokens=max_new_tokens, is_rough=is_rough)
        assert {len(unpack_int32(row.scored)) for row in rows_of_job} == {expected}


@pytest.mark.parametrize(
    ("batches", "max_new_tokens", "num_rows"),
    [(1, 1, 4), (8, 5, 4), (8, 62, 4), (8, 63, 5), (8, 128, 10), (8, 199, 15), (8, 200, 16), (1000, 4096, 16)],
)
def test_a_probe_has_a_row_for_each_3200_tokens_that_an_iteration_samples_at_least_4_and_at_most_16(
    batches: int, max_new_tokens: int, num_rows: int
) -> None:
    spec = RolloutSpec(
        batches_per_iteration=batches,
        prompts_per_batch=4,
        group_size=8,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )
    assert spec.probe_shape(is_rough=False).num_rows == num_rows
    assert spec.probe_shape(is_rough=True).num_rows == 16
    for rows_of_spec in (0, 3, 256):
        stated = replace(spec, probe=ProbeSpec(rows=rows_of_spec))
        assert {stated.probe_shape(is_rough=is_rough).num_rows for is_rough in (False, True)} == {rows_of_spec}
        assert stated.has_probes == (rows_of_spec > 0)


def test_no_special_token_is_drawn_and_none_that_the_model_has_no_row_for() -> None:
    tokenizer = char_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab().values())
    plain = plain_tokens(tokenizer, vocabulary_tokens=len(tokenizer) - 3)
    assert not set(plain) & set(tokenizer.all_special_ids)
    assert max(plain) < len(tokenizer) - 3
    assert len(plain) > len(vocabulary) / 2
