"""Examples: the questions of a data set with their reference answers, and what its loader is asked for.

`onbeat/data/datasets/loading.py` loads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.environments.messages import Message
from contracts.spec.root import SpecRoot
from onbeat.data.prompts.file_rows import DatasetRoom


@dataclass(frozen=True)
class Example:
    """A question of a data set, before any tokenizer saw it."""

    example_id: str
    """Stable name in the data set, e.g. "train/4711"."""
    question: str
    """The prompt text, or the user's turn where the data set is rendered by a chat template; of messages, all of their
    text."""
    reference: str
    """The reference answer, for the reward."""
    task_entry: str = ""
    """JSON of the task's own entry, "" where the reference is enough."""
    origin: str = ""
    """File and line, "" where its id says enough."""
    field: str = "dataset"
    """Field of the spec that leads to it."""
    completion: str = ""
    """The answer that loss = "sft" learns; "" where none is given."""
    messages: tuple[Message, ...] = ()
    """The messages before the answer, where the prompt is a conversation."""
    metadata: str = ""
    """JSON of further columns, which rewards see; "" of none."""
    source: str = ""
    """Its data set in a mixture of several."""
    difficulty: float = 0.0
    """By which a curriculum goes."""

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the texts that it holds."""
        texts = [self.question, self.reference, self.task_entry, self.completion, self.metadata]
        for message in self.messages:
            texts += [message.content, *(call.arguments for call in message.tool_calls)]
        # An ASCII text, which most are, has as many bytes as characters, and isn't copied to be counted.
        return sum(len(text) if text.isascii() else len(text.encode(errors="surrogatepass")) for text in texts)


@dataclass(frozen=True)
class ExampleSets:
    """Training pool and held-out examples; both keep their order, and share no question."""

    train: tuple[Example, ...]
    evaluation: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a loader for examples; with the data set's table in the spec it decides every example (I7)."""

    num_evaluation: int
    """Held-out examples: so many, or InvalidInput."""
    seed: int
    """The job's seed."""
    model_root: SpecRoot
    """Where files are found."""
    trains: bool = True
    """True: the training pool is read, too. False: it may be empty, and a file held out whole."""
    reads_references: bool = True
    """False where nothing compares a completion with a reference: then a row needs none."""
    room: DatasetRoom
    """The room that rows of files may take; all data sets of one job share it."""
