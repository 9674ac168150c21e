"""Rows as people have them: messages, columns of other names, columns that rewards see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from contracts.encoding.arrays import unpack_int32
from contracts.encoding.wire import convert
from contracts.errors import InvalidInput
from contracts.rewards import PluginReward, RewardItem
from contracts.rollouts import Prompt
from contracts.spec_tables.datasets import JsonlDataset
from contracts.spec_tables.root import SpecRoot
from onbeat.prompts.examples import Example, load_dataset
from onbeat.prompts.source import PromptSource
from onbeat_extras.datasets.rows import MAX_METADATA_BYTES
from reward_service.scorers import plugin
from tests.builders import job_spec

DEMO_MODEL = Path(__file__).parents[3] / "configs" / "models" / "two-digit-addition"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = {"role": "user", "content": "1+1="}
ANSWERED = {"role": "assistant", "content": "2"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def examples(folder: Path, *rows: dict[str, Any], **table: Any) -> tuple[Example, ...]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = convert({"type": "jsonl", "train_path": "rows.jsonl", **table}, JsonlDataset)
    return load_dataset(spec, num_evaluation=0, seed=0, model_root=SpecRoot(folder), learns_given=True).train


def prompt(tokenizer: PreTrainedTokenizerBase, folder: Path, row: dict[str, Any], **table: Any) -> Prompt:
    """The prompt of a row, and its completion, as loss = "sft" has them."""
    spec = job_spec(
        dataset={"type": "jsonl", "train_path": "rows.jsonl", **table},
        algorithm={"loss": "sft", "advantage": "none"},
        rollout={
            "batches_per_iteration": 1,
            "prompts_per_batch": 1,
            "group_size": 1,
            "sampling": {"max_new_tokens": 8},
        },
        reward={},
        evaluation__num_prompts=0,
    )
    (folder / "rows.jsonl").write_text(json.dumps(row))
    loaded = load_dataset(spec.dataset, num_evaluation=0, seed=0, model_root=SpecRoot(folder), learns_given=True)
    return PromptSource(loaded, tokenizer=tokenizer, spec=spec, context_tokens=512).training_prompts(0)[0]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED]},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"prompt": [ASKED], "completion": "2", "messages": None},
    ],
)
def test_messages_are_written_by_the_chat_template_and_the_last_ones_answer_is_learnt(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: dict[str, Any]
) -> None:
    asked = prompt(tokenizer, tmp_path, row)
    assert asked.text == "[user]1+1=<eos>[assistant]"
    assert isinstance(asked.given, bytes)
    assert tokenizer.decode(unpack_int32(asked.given)) == "2<eos>"


def test_a_system_message_of_a_row_stands_in_place_of_the_jobs(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    own = {"role": "system", "content": "3"}
    chat = {"system_prompt": "4"}
    assert prompt(tokenizer, tmp_path, {"messages": [ASKED, ANSWERED]}, chat=chat).text.startswith("[system]4<eos>[us")
    with_own = prompt(tokenizer, tmp_path, {"messages": [own, ASKED, ANSWERED]}, chat=chat)
    assert with_own.text == "[system]3<eos>[user]1+1=<eos>[assistant]"


def test_a_conversation_without_an_answer_is_asked_whole(tmp_path: Path) -> None:
    (example,) = examples(tmp_path, {"messages": [ASKED, ANSWERED, ASKED], "reference": 2})
    assert (example.completion, example.reference) == ("", "2")
    assert example.messages == (("user", "1+1="), ("assistant", "2"), ("user", "1+1="))


def test_columns_of_other_names_and_of_tables_are_found_and_rewards_see_further_ones(tmp_path: Path) -> None:
    row = {"question": "1+1=", "reward_model": {"ground_truth": 2.5}, "tests": [1, 2], "a.b": "x", "else": object}
    (example,) = examples(
        tmp_path,
        {**row, "else": "read by nothing"},
        columns={"prompt": "question", "reference": "reward_model.ground_truth"},
        metadata_columns=["tests", "a.b"],
    )
    assert (example.question, example.reference) == ("1+1=", "2.5")
    assert json.loads(example.metadata) == {"tests": [1, 2], "a.b": "x"}


def test_a_plugins_reward_sees_the_metadata_as_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def seen(metadata):\n    return float(len(metadata.get('tests', ())))\n"
    component = PluginReward(entry_point="seen", file="mine.py", source=source)
    item = RewardItem(prompt="", completion="", reference="")
    assert plugin.score(component, item) == 0.0
    tests = RewardItem(prompt="", completion="", reference="", metadata='{"tests": [1, 2]}')
    assert plugin.score(component, tests) == 2.0


@pytest.mark.parametrize(
    ("row", "table", "problem"),
    [
        (
            {"messages": [{"role": "tool", "content": "1"}], "reference": "1"},
            {},
            r"rows\.jsonl:1: Invalid enum value 'tool'",
        ),
        ({"messages": [{**ASKED, "tool_calls": [1]}], "reference": "1"}, {}, "length <= 0"),
        ({"messages": [], "reference": "1"}, {}, "length >= 1"),
        ({"reference": "1"}, {}, "missing required field `prompt`"),
        ({"prompt": "1", "reference": True}, {}, "got `bool`"),
        ({"prompt": "1", "reference": "1"}, {"metadata_columns": ["tests"]}, "no column `tests`"),
        (
            {"prompt": "1", "reference": "1", "long": "x" * MAX_METADATA_BYTES},
            {"metadata_columns": ["long"]},
            "its metadata have 65,547 characters, the most are 65,536",
        ),
    ],
)
def test_a_row_that_says_too_little_or_too_much_is_refused_by_its_line(
    tmp_path: Path, row: dict[str, Any], table: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem) as error:
        examples(tmp_path, row, **table)
    assert error.value.field == "dataset.train_path"
