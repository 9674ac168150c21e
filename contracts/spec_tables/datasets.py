"""Where a job's prompts come from."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from contracts.encoding.wire import FilePath, FilePathOrNone, Line, Record, Text

TaskNumber = Annotated[int, Meta(ge=-(2**53), le=2**53)]
TaskRatio = Annotated[float, Meta(ge=-1e15, le=1e15)]
TaskParams = Annotated[dict[Line, TaskNumber | TaskRatio | bool | Text], Meta(max_length=64)]


class ChatSpec(Record, frozen=True, kw_only=True):
    """How a question becomes a prompt through the tokenizer's own chat template."""

    system_prompt: Text = ""
    """"" leaves the system turn out (the template may have a default of its own)."""


class AdditionDataset(Record, tag_field="type", tag="addition", frozen=True, kw_only=True):
    """`a+b=` for all pairs of numbers below 100, answers with the digits reversed; 512 pairs are held out."""


class ReasoningGymDataset(Record, tag_field="type", tag="reasoning_gym", frozen=True, kw_only=True):
    """Procedural tasks of reasoning-gym; evaluation items come from another seed, repeated questions are dropped."""

    task: Line
    """Name in reasoning-gym, e.g. "chain_sum"."""
    params: TaskParams = field(default_factory=dict)
    """Parameters of the task's generator."""
    num_train_prompts: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    """Size of the training pool; iterations walk through shuffled passes of it."""
    question_suffix: Text = ""
    """Text after each question, e.g. how to mark the answer."""
    chat: ChatSpec | None = None
    """Renders the question by the chat template; without it the question text is the prompt."""


class JsonlDataset(Record, tag_field="type", tag="jsonl", frozen=True, kw_only=True):
    """One JSON object a line: `{"prompt": "...", "reference": "..."}`, optionally `"task_entry"`.

    A line whose prompt is also held out is not trained. `task_entry` is data: the JSON that reasoning-gym's tasks are
    scored from.
    """

    train_path: FilePath
    """File of training prompts; relative paths start at the stack's model root."""
    evaluation_path: FilePathOrNone = ""
    """File of held-out prompts; "" holds the last `evaluation.num_prompts` lines of the training file out."""
    chat: ChatSpec | None = None
    """Renders the prompt by the chat template; without it the prompt text is used as it is."""


DatasetSpec = AdditionDataset | ReasoningGymDataset | JsonlDataset
