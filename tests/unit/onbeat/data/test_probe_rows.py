"""The rows of a job's probe: the same for all its versions, and made of tokens that any engine takes."""

from __future__ import annotations

import pytest

from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.probes import ProbeRow
from contracts.rollouts import Prompt
from contracts.spec.rollout import ProbeSpec
from onbeat.data.probe_rows import plain_tokens, probe_rows
from tests.builders import char_tokenizer

SPEC = ProbeSpec(rows=16, tokens=12)
RANDOM = range(100, 164)
PROMPTS = tuple(
    Prompt(prompt_id=str(n), index=n, token_ids=pack_int32([n + 1] * length), text="", reference="")
    for n, length in enumerate((3, 8, 20))
)


def rows(spec: ProbeSpec = SPEC, *, seed: int = 7, longest: int = 512) -> list[list[int]]:
    return [whole(row) for row in made(spec, seed=seed, longest=longest)]


def made(spec: ProbeSpec = SPEC, *, seed: int = 7, longest: int = 512) -> tuple[ProbeRow, ...]:
    return probe_rows(spec, PROMPTS, seed=seed, tokens=RANDOM, longest_tokens=longest)


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


def test_no_special_token_is_drawn_and_none_that_the_model_has_no_row_for() -> None:
    tokenizer = char_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab().values())
    plain = plain_tokens(tokenizer, vocabulary_tokens=len(tokenizer) - 3)
    assert not set(plain) & set(tokenizer.all_special_ids)
    assert max(plain) < len(tokenizer) - 3
    assert len(plain) > len(vocabulary) / 2
