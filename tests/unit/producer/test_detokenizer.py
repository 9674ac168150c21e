"""What the reward sees of a completion: its text, without special tokens, otherwise untouched."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.rollouts import Completion, Trajectory, Turn
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from producer.detokenizer import FolderDetokenizer
from tests.builders import DIGEST, VOCABULARY, char_tokenizer, completion
from tests.refusals import refusal_of


@pytest.fixture
def settings(tmp_path: Path) -> StackSettings:
    return StackSettings(model_root=str(tmp_path))


def test_special_tokens_are_left_out_and_spaces_kept(tmp_path: Path, settings: StackSettings) -> None:
    char_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    detokenize = FolderDetokenizer(ModelSpec(path="model"), settings=settings)
    spelled = [completion([VOCABULARY[character] for character in text] + [1]) for text in ("is it 12 ?", " ")]
    assert detokenize(spelled) == ["is it 12 ?", " "]
    assert detokenize([completion([1])]) == [""]


def test_of_several_turns_it_is_the_last_one(tmp_path: Path, settings: StackSettings) -> None:
    char_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    turns = tuple(
        Turn(start=start, end=end, finish_reason="stop", reward=0.0, reply_digest=DIGEST)
        for start, end in ((0, 2), (5, 8))
    )
    played = Completion(
        token_ids=pack_int32([VOCABULARY[character] for character in "?a12=42"] + [1]),
        generator_logprobs=pack_float32([-1.0] * 5),
        finish_reason="stop",
        trajectory=Trajectory(turns=turns, stop="done"),
    )
    assert FolderDetokenizer(ModelSpec(path="model"), settings=settings)([played]) == ["42"]


def test_a_missing_folder_names_model_path(settings: StackSettings) -> None:
    with refusal_of("model.path", match="no folder"):
        FolderDetokenizer(ModelSpec(path="nowhere"), settings=settings)
