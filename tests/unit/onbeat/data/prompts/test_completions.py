"""A data set's completion becomes the tokens that sampling would have answered, its end among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.errors import InvalidInput
from contracts.rollouts import Prompt
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.source import PromptSource
from tests.builders import VOCABULARY, char_tokenizer, job_spec
from tests.refusals import refusal_of

EOS = VOCABULARY["<eos>"]
TURNS = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def ids(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def sft(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "algorithm__loss": "sft",
        "algorithm__advantage": "none",
        "rollout__group_size": 1,
        "rollout__sampling__max_new_tokens": 9,
        "dataset": {"type": "jsonl", "train_path": "train.jsonl"},
        "evaluation__num_prompts": 1,
    }
    return job_spec(**(fields | changes))


def prompts_of(folder: Path, *rows: dict[str, str], template: str = "", **changes: Any) -> list[Prompt]:
    held_out = {"prompt": "9+9=", "reference": "18"}
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, held_out]))
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    spec = sft(**changes)
    examples = job_examples(spec, SpecRoot(folder))
    source = PromptSource(examples, spec=spec, tokenizer=tokenizer, context_tokens=64, end_ids=[EOS])
    (held,) = source.evaluation_prompts()
    assert held.dataset_completion is UNSET
    return sorted(source.training_prompts(0)[: len(rows)], key=lambda prompt: prompt.prompt_id)


def test_a_completion_ends_with_the_end_of_the_sequence(tmp_path: Path) -> None:
    (prompt,) = prompts_of(tmp_path, {"prompt": "1+2=", "completion": "3"})
    assert prompt.dataset_completion == pack_int32([*ids("3"), EOS])
    (prompt,) = prompts_of(tmp_path, {"prompt": "1+2=", "completion": "3<eos>"})
    assert prompt.dataset_completion == pack_int32([*ids("3"), EOS])


def test_a_chat_template_writes_the_answer_and_what_it_writes_behind_its_end_is_left_out(tmp_path: Path) -> None:
    row = {"prompt": "1+2=", "completion": "3", "reference": "3"}
    dataset = {"type": "jsonl", "train_path": "train.jsonl", "chat": {}}
    (prompt,) = prompts_of(tmp_path, row, template=TURNS, dataset=dataset)
    assert unpack_int32(prompt.token_ids) == [*ids("u:1+2="), EOS, *ids("\na:")]
    assert prompt.dataset_completion == pack_int32([*ids("3"), EOS])


def test_a_template_that_opens_a_turn_in_another_way_than_it_writes_one_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "1+2=", "completion": "3"}
    dataset = {"type": "jsonl", "train_path": "train.jsonl", "chat": {}}
    with refusal_of("model.path", match="opens a turn in another way"):
        prompts_of(tmp_path, row, template=TURNS.replace("%}a:{%", "%}b:{%"), dataset=dataset)


def test_a_completion_that_is_longer_than_the_limit_is_refused_by_its_line(tmp_path: Path) -> None:
    with refusal_of("rollout.sampling.max_new_tokens", match=r"train\.jsonl:1 has 10 tokens, the limit is 9"):
        prompts_of(tmp_path, {"prompt": "1+2=", "completion": "123456789"})


def test_a_row_without_a_completion_is_refused(tmp_path: Path) -> None:
    with refusal_of("dataset.train_path", match=r"train\.jsonl:2 has no completion"):
        prompts_of(tmp_path, {"prompt": "1+2=", "completion": "3"}, {"prompt": "1+3=", "reference": "4"})


def test_the_addition_task_gives_its_answers(tmp_path: Path) -> None:
    spec = sft(dataset={"type": "addition"})
    examples = job_examples(spec, SpecRoot(tmp_path))
    source = PromptSource(examples, spec=spec, tokenizer=char_tokenizer(), context_tokens=64)
    assert all(
        prompt.dataset_completion == pack_int32([*ids(prompt.reference), EOS]) for prompt in source.training_prompts(0)
    )


def test_examples_that_are_too_long_are_filtered_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": "1+2=", "completion": "3"},
        {"prompt": "1+2+3+4=", "completion": "10"},
        {"prompt": "1+3=", "completion": "123456789"},
    ]
    changes = {"rollout__filter_overlong_prompts": True, "rollout__max_prompt_tokens": 4}
    prompts = prompts_of(tmp_path, *rows, **changes)
    assert {prompt.prompt_id for prompt in prompts} == {"train/1"}
    assert "2 of 3 training prompts are too long, and left out" in caplog.text
    with pytest.raises(InvalidInput, match="every training prompt is too long"):
        prompts_of(tmp_path, *rows[1:], **changes)
    with pytest.raises(InvalidInput, match="train/2 has 8 tokens, the limit is 4"):
        prompts_of(tmp_path, *rows[:2], rollout__max_prompt_tokens=4)


def test_a_held_out_prompt_that_is_too_long_is_not_filtered(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="train/2 has 4 tokens, the limit is 3"):
        prompts_of(
            tmp_path,
            {"prompt": "1=", "completion": "1"},
            rollout__filter_overlong_prompts=True,
            rollout__max_prompt_tokens=3,
        )


def test_variables_of_a_chat_template_are_written_and_unknown_ones_refused(tmp_path: Path) -> None:
    row = {"prompt": "1+2=", "completion": "3"}
    template = TURNS.replace("%}a:{%", "%}a:{% if not think %}-{% endif %}{%")

    def dataset(**variables: Any) -> dict[str, Any]:
        chat = {"chat_template_kwargs": variables} if variables else {}
        return {"type": "jsonl", "train_path": "train.jsonl", "chat": chat}

    def text(**variables: Any) -> str:
        rows = ({"prompt": "1+2=", "reference": "3"},)
        rollout = {"rollout__group_size": 2, "algorithm": {}}
        (prompt,) = prompts_of(tmp_path, *rows, template=template, dataset=dataset(**variables), **rollout)
        return prompt.text

    assert text(think=True).endswith("a:")
    assert text(think=False) == text() == "u:1+2=<eos>\na:-"
    for unknown in ("thinks", "tokenize", "messages"):
        with refusal_of("dataset.chat.chat_template_kwargs", match=f"doesn't read `{unknown}`"):
            prompts_of(tmp_path, row, template=TURNS, dataset=dataset(**{unknown: True}))
