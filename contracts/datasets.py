"""Where a job's prompts come from."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from contracts.ranges import PositiveInt
from contracts.wire import Record


class ChatSpec(Record, frozen=True, kw_only=True):
    """How a question becomes a prompt through the tokenizer's own chat template."""

    system_prompt: str = ""
    """"" leaves the system turn out (the template may have a default of its own)."""


class AdditionDataset(Record, tag_field="type", tag="addition", frozen=True, kw_only=True):
    """`a+b=` for all pairs of numbers below 100, answers with the digits reversed; 512 pairs are held out."""


class ReasoningGymDataset(Record, tag_field="type", tag="reasoning_gym", frozen=True, kw_only=True):
    """Procedural tasks of reasoning-gym; evaluation items come from another seed, repeated questions are dropped."""

    task: Annotated[str, Meta(min_length=1)]
    """Name in reasoning-gym, e.g. "chain_sum"."""
    params: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Parameters of the task's generator."""
    num_train_prompts: PositiveInt = 10_000
    """Size of the training pool; iterations walk through shuffled passes of it."""
    question_suffix: str = ""
    """Text after each question, e.g. how to mark the answer."""
    chat: ChatSpec | None = None
    """Renders the question by the chat template; without it the question text is the prompt."""


class JsonlDataset(Record, tag_field="type", tag="jsonl", frozen=True, kw_only=True):
    """One JSON object a line: `{"prompt": "...", "reference": "..."}`, optionally `"task_entry"`."""

    train_path: Annotated[str, Meta(min_length=1)]
    """File of training prompts; relative paths start at the stack's model root."""
    evaluation_path: str = ""
    """File of held-out prompts; "" holds the last `evaluation.num_prompts` lines of the training file out."""
    chat: ChatSpec | None = None
    """Renders the prompt by the chat template; without it the prompt text is used as it is."""


DatasetSpec = AdditionDataset | ReasoningGymDataset | JsonlDataset
