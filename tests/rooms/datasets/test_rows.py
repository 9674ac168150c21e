"""Rows as people have them: messages, columns of other names, columns that rewards see."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from contracts.encoding.arrays import unpack_int32
from contracts.encoding.wire import convert, encode_json
from contracts.errors import InvalidInput
from contracts.reward_arguments import arguments_of
from contracts.rewards import PluginReward, RewardItem
from contracts.rollouts import Prompt
from contracts.spec.datasets import JsonlDataset
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import job_examples, load_dataset
from onbeat.data.datasets.rows import MAX_METADATA_BYTES
from onbeat.data.prompts.examples import Example, ExampleSets
from onbeat.data.prompts.source import PromptSource
from reward_service.scorers import plugin
from tests.builders import job_spec

DEMO_MODEL = Path(__file__).parents[3] / "configs" / "models" / "two-digit-addition"
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = {"role": "user", "content": "1+1="}
ANSWERED = {"role": "assistant", "content": "2"}
ROW = json.dumps({"prompt": "1+1=", "reference": "2"})


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
    assert isinstance(asked.dataset_completion, bytes)
    assert tokenizer.decode(unpack_int32(asked.dataset_completion)) == "2<eos>"


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
    said = [("user", "1+1="), ("assistant", "2"), ("user", "1+1=")]
    assert [(message.role, message.content) for message in example.messages] == said


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
    ("row", "table", "problem", "cure"),
    [
        (
            {"reference": "1", "b": 2},
            {},
            r"no column `prompt` \(there are `reference`, `b`\)",
            "by dataset.columns.prompt",
        ),
        (
            {"question": "1+1=", "answer": "2"},
            {"columns": {"prompt": "Question", "reference": "answer"}},
            r"no column `Question` \(there are `question`, `answer`\)",
            "dataset.columns.prompt",
        ),
        ({"prompt": "1", "answer": "2"}, {}, "no column `reference`", "by dataset.columns.reference"),
        ({"prompt": "1", "reference": None}, {}, "column `reference` is null", "dataset.columns.reference"),
        (
            {"prompt": "1", "reference": "1"},
            {"metadata_columns": ["tests"]},
            "no column `tests`, which dataset.metadata_columns or an argument of a reward names",
            "or add the column",
        ),
        (
            {"prompt": "1", "reference": "1", "long": "x" * MAX_METADATA_BYTES},
            {"metadata_columns": ["long"]},
            "its metadata have 65,547 characters, the most are 65,536",
            "name fewer columns in dataset.metadata_columns",
        ),
        (
            {"prompt": "1", "reference": "1", "level": "hard"},
            {"curriculum": {"column": "level", "iterations": 3}},
            "column `level`, by which dataset.curriculum orders the rows, has no number",
            "a finite number",
        ),
        (
            {"prompt": "1", "reference": "the answer is 2"},
            {"columns": {"reference_after": "####"}},
            "column `reference` has no `####`, which dataset.columns.reference_after names",
            "leave reference_after out",
        ),
    ],
)
def test_a_row_is_refused_by_its_line_its_column_and_a_cure_for_this_fault(
    tmp_path: Path, row: dict[str, Any], table: dict[str, Any], problem: str, cure: str
) -> None:
    with pytest.raises(InvalidInput, match=r"rows\.jsonl:1: .*" + problem) as error:
        examples(tmp_path, row, **table)
    assert error.value.field == "dataset.train_path"
    assert cure in (error.value.cure or "")


WARM = {"role": "user", "content": "How warm is it?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "0 C", "name": "weather", "tool_call_id": "call_0"}
KNOWS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call>{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize(
    "called",
    [
        CALLED,
        CALLED | {"content": None},
        {"role": "assistant", "tool_calls": [CALL], "name": None, "function_call": None},
        CALLED | {"tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
        CALLED | {"tool_calls": [CALL | {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
    ],
    ids=["text", "null", "absent", "bare", "object"],
)
def test_calls_and_tools_answers_are_written_as_environments_write_them(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, called: dict[str, Any]
) -> None:
    row = {"prompt": [WARM, called, TOLD], "completion": "Cold."}
    asked = f"[user]How warm is it?<eos>[assistant]{WRITTEN}<eos>"
    answered = "[user]<tool_response>\n0 C\n</tool_response><eos>[assistant]"
    assert prompt(tokenizer, tmp_path, row).text == asked + answered
    knowing = AutoTokenizer.from_pretrained(DEMO_MODEL)
    knowing.chat_template = KNOWS_TOOLS
    assert prompt(knowing, tmp_path, row).text == f"{asked}[tool]0 C<eos>[assistant]"


def test_calls_that_a_row_ends_with_are_learnt_as_a_model_writes_them(tmp_path: Path) -> None:
    (example,) = examples(tmp_path, {"messages": [WARM, {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]}]})
    assert example.completion == f"Hm.\n{WRITTEN}"
    (example,) = examples(tmp_path, {"prompt": [WARM], "completion": [CALLED]})
    assert example.completion == WRITTEN


def test_the_texts_of_parts_are_one_text(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+", "image": None}, {"type": "text", "text": "1="}]
    row = {"prompt": [{"role": "user", "content": parts}], "completion": "2"}
    assert prompt(tokenizer, tmp_path, row).text == "[user]1+1=<eos>[assistant]"


def message(**changes: Any) -> dict[str, Any]:
    return {"prompt": [WARM | changes], "reference": "1"}


@pytest.mark.parametrize(
    ("row", "problem", "cure"),
    [
        (message(role="developer"), "messages of the role developer aren't read: `prompt[0]` is one", "write system"),
        (message(role="function"), "messages of the role function", "write tool"),
        (message(role="human"), "messages of the role human", "write user"),
        (message(role="poet"), "messages of the role poet", "roles are system, user, assistant, tool"),
        (message(role=None), "`prompt[0]` has no role", '{"role": "user"'),
        (
            {"prompt": [{"from": "human", "value": "?"}], "reference": "1"},
            "has the keys from and value",
            "user for human",
        ),
        (message(content=None), "`prompt[0]` has no content", "leave the message out"),
        (message(content=None, role="assistant"), "has no content and calls no tool", "leave the message out"),
        (message(content=7), "`prompt[0].content` is a number", "a message is an object"),
        (message(content=["1+1="]), "`prompt[0].content[0]` is a part without a text", '"type": "text"'),
        (
            message(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
            "`prompt[0].content[0]` is a part of the type image_url: only text is read",
            "leave it out",
        ),
        (message(tool_calls=[CALL]), "of the role user with tool_calls", "only the assistant calls tools"),
        (message(role="assistant", tool_calls="weather()"), "`prompt[0].tool_calls` is a text", "a call is an object"),
        (message(role="assistant", tool_calls=[1]), "`prompt[0].tool_calls[0]` has no name", "a call is an object"),
        (
            message(role="assistant", tool_calls=[{"name": "a", "arguments": [1]}]),
            "`prompt[0].tool_calls[0]` has arguments that are a list of 1",
            "a call is an object",
        ),
        (message(role="assistant", function_call={"name": "a"}), "has a function_call", "write it under tool_calls"),
        ({"prompt": ["1+1="], "reference": "1"}, "`prompt[0]` is a text, and no message", "a message is an object"),
        ({"prompt": {"text": "1"}, "reference": "1"}, "`prompt` is an object", "dataset.columns"),
        ({"messages": [], "reference": "1"}, "`messages` has no messages", "remove the row"),
        ({"prompt": "1", "reference": True}, "`reference` is true or false", "write it as text"),
        ({"prompt": "1", "reference": ["42", "43"]}, "`reference` is a list of 2", "dataset.metadata_columns"),
        ({"prompt": "1", "reference": {"answer": 1}}, "`reference` is an object", "dataset.columns.reference"),
        ({"prompt": "1", "reference": "1", "task_entry": {}}, "`task_entry` is an object", "as a text"),
        ({"prompt": "1", "completion": [ANSWERED, ANSWERED]}, "`completion` has 2 messages", "into the prompt"),
        ({"prompt": "1", "completion": [ASKED]}, "`completion` is a message of the role user", "assistant's answer"),
    ],
)
def test_what_a_row_says_wrongly_is_named_with_the_cure_that_fits_it(
    tmp_path: Path, row: dict[str, Any], problem: str, cure: str
) -> None:
    with pytest.raises(InvalidInput) as error:
        examples(tmp_path, row)
    assert error.value.field == "dataset.train_path"
    assert error.value.problem.startswith("rows.jsonl:1: ")
    assert problem in error.value.problem
    assert cure in (error.value.cure or "")


def test_a_column_of_another_name_is_called_by_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"`chat\[0\]\.content` is a number"):
        examples(tmp_path, {"chat": [{"role": "user", "content": 1}], "reference": "1"}, columns={"prompt": "chat"})


def test_a_prompt_that_ends_with_the_assistant_s_words_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for asked in ([ASKED, ANSWERED], [ANSWERED]):
        with pytest.raises(
            InvalidInput, match=r"rows\.jsonl:1: the prompt ends with a message of the assistant"
        ) as error:
            prompt(tokenizer, tmp_path, {"prompt": asked, "completion": "2"})
        assert error.value.field == "dataset.train_path"
        assert "completion" in (error.value.cure or "")


@pytest.mark.parametrize(
    ("content", "problem", "cure"),
    [
        (ROW.encode("utf-16"), r"rows\.jsonl is encoded in UTF-16", "iconv -f UTF-16 -t UTF-8"),
        (ROW.encode("utf-16-le"), r"rows\.jsonl is encoded in UTF-16", "save it as UTF-8"),
        (ROW.encode("utf-32"), r"rows\.jsonl is encoded in UTF-32", "iconv -f UTF-32 -t UTF-8"),
        (
            ROW.replace("2", "zwölf").encode("latin-1"),
            r"rows\.jsonl:1: byte \d+ of the line is no UTF-8",
            "save the file as",
        ),
        (b"PAR1....PAR1", "is a parquet file, not a file of JSON lines", 'dataset.type = "huggingface"'),
        (gzip.compress(ROW.encode(), mtime=0), "is compressed by gzip", "gzip -d"),
        (b"\n[" + ROW.encode() + b"]", r"rows\.jsonl:2: the line is a list, not an object", "jq -c"),
        (b"42", r"rows\.jsonl:1: the line is a JSON value, but no object", "one JSON object a line"),
        (ROW.encode() + b"\n{", r"rows\.jsonl:2: the line is no JSON: ", "one JSON object a line"),
    ],
)
def test_a_file_that_is_none_of_json_lines_is_refused_by_what_it_is(
    tmp_path: Path, content: bytes, problem: str, cure: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(InvalidInput, match=problem) as error:
        load_dataset(JsonlDataset(train_path="rows.jsonl"), num_evaluation=0, seed=0, model_root=SpecRoot(tmp_path))
    assert error.value.field == "dataset.train_path"
    assert cure in (error.value.cure or "")


def test_a_utf_8_mark_at_the_start_of_a_file_is_no_part_of_its_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes((ROW + "\n" + ROW.replace("2", "3")).encode("utf-8-sig"))
    loaded = load_dataset(
        JsonlDataset(train_path="rows.jsonl"), num_evaluation=0, seed=0, model_root=SpecRoot(tmp_path)
    )
    assert [(one.example_id, one.question, one.reference) for one in loaded.train] == [
        ("train/1", "1+1=", "2"),
        ("train/2", "1+1=", "3"),
    ]


def test_what_follows_the_last_marker_is_the_reference(tmp_path: Path) -> None:
    answers = ["It has 490+568=1,058.\n#### 1,058", "#### no\n####\t-3 \n"]
    rows = [{"question": "How many?", "answer": answer} for answer in answers]
    columns = {"prompt": "question", "reference": "answer", "reference_after": "####"}
    assert [example.reference for example in examples(tmp_path, *rows, columns=columns)] == ["1,058", "-3"]


def test_rows_without_a_marker_keep_the_digest_of_their_job() -> None:
    encoded = encode_json(job_spec(dataset={"type": "jsonl", "train_path": "rows.jsonl", "columns": {}}))
    assert b"reference_after" not in encoded


def test_rows_are_counted_while_they_are_read_and_refused_by_the_first_that_has_no_room(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=" + "x" * 2000, "reference": "2"}] * 1000
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "and no JSON")
    root = SpecRoot(tmp_path, dataset_mb=1)
    with pytest.raises(InvalidInput, match=r"more than 1 MiB at rows.jsonl:347: 347 rows with 695,735 bytes") as error:
        load_dataset(JsonlDataset(train_path="rows.jsonl"), num_evaluation=0, seed=0, model_root=root)
    assert error.value.field == "dataset.train_path"
    assert "ONBEAT_DATASET_MB" in (error.value.cure or "")


def test_all_files_of_a_job_share_its_room(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}" + "x" * 2000, "reference": "2"} for number in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec, root = JsonlDataset(train_path="rows.jsonl"), SpecRoot(tmp_path, dataset_mb=1)
    assert len(load_dataset(spec, num_evaluation=0, seed=0, model_root=root).train) == 200
    both = JsonlDataset(train_path="rows.jsonl", evaluation_path="more.jsonl")
    with pytest.raises(InvalidInput, match=r"more than 1 MiB at more\.jsonl:") as error:
        load_dataset(both, num_evaluation=2, seed=0, model_root=root)
    assert error.value.field == "dataset.evaluation_path"


def test_a_line_longer_than_any_row_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(b'{"prompt": "1", "reference": "1", "unread": "')
        file.truncate(8 * 2**30)  # sparse: it takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=r"rows.jsonl:1 is longer than 16,777,216 bytes") as error:
            load_dataset(JsonlDataset(train_path="rows.jsonl"), num_evaluation=0, seed=0, model_root=SpecRoot(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert error.value.field == "dataset.train_path"


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        ("def right(completion, reference): return 1.0", True),
        ("def right(*, completion, reference): return 1.0", True),
        ("def right(completion, reference=''): return 1.0", False),
        ("def right(*, completion, reference=''): return 1.0", False),
        ("def right(completion): return 1.0", False),
    ],
)
def test_a_held_out_row_without_a_reference_is_refused_where_the_reward_needs_one(
    tmp_path: Path, source: str, is_refused: bool
) -> None:
    """Rows of `sft` may leave it out; a job that evaluates them would fail with its first held-out completion."""
    rows = [{"prompt": f"{number}=", "completion": str(number)} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # As the gateway reads them when the job is submitted.
    arguments = arguments_of(source, "right")
    assert arguments is not None
    reward = PluginReward(entry_point="right", source=source, arguments=arguments)

    def load(num_evaluation: int) -> ExampleSets:
        return load_dataset(
            JsonlDataset(train_path="rows.jsonl"),
            num_evaluation=num_evaluation,
            seed=0,
            model_root=SpecRoot(tmp_path),
            components=(reward,),
            learns_given=True,
        )

    assert len(load(0).train) == 4, "what is only learned needs none"
    if not is_refused:
        assert len(load(2).evaluation) == 2
        return
    with pytest.raises(
        InvalidInput, match="the reward `right` needs a reference, and this held-out row has none"
    ) as refused:
        load(2)
    assert refused.value.cure is not None
    assert "dataset.columns.reference" in refused.value.cure


def test_a_job_that_only_evaluates_may_hold_out_the_whole_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}=", "reference": str(number)} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = JsonlDataset(train_path="rows.jsonl")
    sets = load_dataset(dataset, num_evaluation=4, seed=0, model_root=SpecRoot(tmp_path), trains=False)
    assert (len(sets.train), len(sets.evaluation)) == (0, 4)
    with pytest.raises(InvalidInput):
        load_dataset(dataset, num_evaluation=4, seed=0, model_root=SpecRoot(tmp_path))


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_job_that_only_evaluates_has_prompts_without_one_to_train(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, is_mixture: bool
) -> None:
    rows = [{"prompt": f"{number}+1=", "reference": "2"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table: dict[str, Any] = {"type": "jsonl", "train_path": "rows.jsonl"}
    if is_mixture:
        other = {"name": "other", "weight": 1e-6, "dataset": {"type": "addition"}}
        table = {"type": "mixture", "sources": [{"name": "sums", "dataset": table}, other]}
    held_out = {"num_prompts": 4, "sets": [{"name": "more", "dataset": {"type": "addition"}, "num_prompts": 3}]}
    spec = job_spec(iterations=0, dataset=table, evaluation=held_out)
    source = PromptSource(job_examples(spec, SpecRoot(tmp_path)), spec=spec, tokenizer=tokenizer, context_tokens=2048)
    prompts = source.evaluation_prompts()
    assert [prompt.text for prompt in prompts[:4]] == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert len(prompts) == 7
