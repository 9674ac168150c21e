"""A recorded batch → what a person reads of it: pieces of text, masks, log-probs, rewards and advantages.

And a search for text in prompts and completions: newest first, bounded in files, bytes and time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from contracts.encoding.arrays import unpack_float32, unpack_float64, unpack_int32
from contracts.errors import ContractViolation, OnbeatError
from contracts.experience.columns import Column
from contracts.rollouts import Completion, Rollout, StopReason, Turn
from contracts.spec.job import JobSpec
from onbeat.recording.files import RecordedFiles, read_record
from onbeat.recording.records import (
    CompletionView,
    FoundText,
    FoundTexts,
    GroupView,
    RecordedBatch,
    RecordedBatchView,
    RecordedIteration,
    TurnView,
)

MAX_FILES = 5000
MAX_BYTES = 512 * 1024**2
MAX_S = 5.0
MAX_TEXT_CHARS = 32 * 1024**2
"""Characters that the pieces of a record's tokens may have together: a record names each piece once, and a file of some
kilobytes could have a long one come a million times."""
BESIDE = 60
"""Characters of an excerpt on each side of what was found."""
Value = float | str | tuple[float | None, ...]


def batch_view(record: RecordedBatch, index: RecordedIteration, spec: JobSpec, *, why_not: str) -> RecordedBatchView:
    """Returns the view. index: of the record's iteration; why_not: why it can't be sampled again, or "".

    Raises ContractViolation for a record whose text is too long to be shown.
    """
    check_text(record)
    batch = record.batch
    return RecordedBatchView(
        job_id=batch.job_id,
        batch_id=batch.batch_id,
        iteration=batch.iteration,
        purpose=batch.purpose,
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        generator_id=batch.generator_id,
        attempt=batch.attempt,
        batch_digest=record.batch_digest,
        timings=batch.timings,
        groups=tuple(_groups(record, index, spec)),
        can_sample_again=not why_not,
        why_not=why_not,
    )


def _groups(record: RecordedBatch, index: RecordedIteration, spec: JobSpec) -> Iterator[GroupView]:
    size = record.batch.group_size
    texts = record.text_of
    advantages = list(_advantages(record, index, by_turn=spec.algorithm.credits_turns))
    for place, group in enumerate(record.batch.groups):
        prompt_text = group.prompt_text or ""
        reference = group.reference or ""
        prompt = record.prompt_batch.prompt_at(place, num_resamples=group.num_resamples)
        if prompt:
            prompt_text = prompt.text
            reference = prompt.reference
        yield GroupView(
            prompt_id=group.prompt_id,
            prompt_index=group.prompt_index,
            prompt_text=prompt_text,
            reference=reference,
            num_resamples=group.num_resamples,
            completions=tuple(
                _completion(record, spec, rollout, texts, row=row, advantages=advantages[row])
                for row, rollout in enumerate(group.rollouts, start=place * size)
            ),
        )


def _completion(
    record: RecordedBatch,
    spec: JobSpec,
    rollout: Rollout,
    texts: Mapping[int, str],
    *,
    row: int,
    advantages: Sequence[float],
) -> CompletionView:
    """Returns a completion as the page shows it, token by token.

    `advantages` are of the completion, or of each of its turns; empty where none is known.
    """
    completion = rollout.completion
    trajectory = rollout.completion.trajectory
    sampled = _sampled(completion)
    by_turn = spec.algorithm.credits_turns
    turns: Sequence[Turn] = ()
    stop: StopReason | None = None
    environment_metrics: Mapping[str, float] = {}
    if trajectory is not UNSET:
        turns = trajectory.turns
        stop = trajectory.stop
        environment_metrics = trajectory.metrics
    shown = tuple(
        TurnView(
            start=turn.start,
            end=turn.end,
            finish_reason=turn.finish_reason,
            reward=turn.reward,
            advantage=advantages[number] if by_turn and number < len(advantages) else None,
            begins_anew=number > 0 and turn.sees_from == turns[number - 1].end,
        )
        for number, turn in enumerate(turns)
    )
    reward = rollout.reward
    if record.rewards is not UNSET:
        reward = record.rewards[row]
    trainer_logprobs = None
    if record.trainer_logprobs:
        trainer_logprobs = record.trainer_logprobs[row]
    return CompletionView(
        sample=row % record.batch.group_size,
        text=rollout.text,
        reward=reward,
        reward_breakdown=rollout.reward_breakdown,
        unscorable=rollout.unscorable,
        advantage=advantages[0] if advantages and not by_turn else None,
        finish_reason=completion.finish_reason,
        pieces=pieces_of(completion, texts),
        sampled=tuple(sampled),
        generator_logprobs=_spread(completion.generator_logprobs, sampled),
        trainer_logprobs=_spread(trainer_logprobs, sampled),
        turns=shown or None,
        stop=stop,
        environment_metrics=environment_metrics,
        columns=_columns(record, spec, row),
    )


def pieces_of(completion: Completion, texts: Mapping[int, str]) -> tuple[str, ...]:
    """Returns the text of each token; its number in brackets where it has none. texts: `RecordedBatch.text_of`."""
    return tuple(texts.get(token, f"[{token}]") for token in unpack_int32(completion.token_ids))


def check_text(record: RecordedBatch) -> None:
    """Raises ContractViolation where the pieces of all tokens have more than MAX_TEXT_CHARS characters."""
    lengths = {token: len(piece) for token, piece in record.text_of.items()}
    num_chars = 0
    for group in record.batch.groups:
        for rollout in group.rollouts:
            num_chars += sum(lengths.get(token, 0) for token in unpack_int32(rollout.completion.token_ids))
    if num_chars > MAX_TEXT_CHARS:
        raise ContractViolation(
            f"its text has {num_chars:,} characters, of which at most {MAX_TEXT_CHARS:,} are shown",
            field=record.batch.batch_id,
        )


def _sampled(completion: Completion) -> list[bool]:
    sampled = [False] * completion.num_tokens
    for start, end in completion.spans:
        sampled[start:end] = [True] * (end - start)
    return sampled


def _spread(logprobs: bytes | None, sampled: Sequence[bool]) -> tuple[float | None, ...]:
    """[S] of the sampled tokens → one for each token; null for observations, and where there are no numbers."""
    if logprobs is None:
        return (None,) * len(sampled)
    values = iter(unpack_float32(logprobs))
    return tuple(_finite(next(values)) if is_sampled else None for is_sampled in sampled)


def _advantages(record: RecordedBatch, index: RecordedIteration, *, by_turn: bool) -> Iterator[list[float]]:
    """Yields the advantages of each completion: one, or one for each turn.

    They are [] where they are unknown, or of another shape.
    """
    known = [advantage / index.deviation for advantage in record.advantages or ()]
    rollouts = [rollout for group in record.batch.groups for rollout in group.rollouts]
    counts = [1] * len(rollouts)
    if by_turn:
        counts = [len(rollout.completion.spans) for rollout in rollouts]
    if len(known) != sum(counts):
        known = []
        counts = [0] * len(rollouts)
    start = 0
    for count in counts:
        yield known[start : start + count]
        start += count


def _columns(record: RecordedBatch, spec: JobSpec, row: int) -> dict[str, Value]:
    kinds = {column.name: column for stage in spec.stages for column in stage.outputs}
    return {
        name: _value(values[row], kinds[name])
        for name, values in (record.batch.columns or {}).items()
        if name in kinds and row < len(values) and kinds[name].width is UNSET
    }


def _value(data: bytes, column: Column) -> Value:
    """Raises ContractViolation for bytes that aren't the column's."""
    if column.type == "text":
        return data.decode(errors="replace")
    unpack = {"float32": unpack_float32, "float64": unpack_float64, "int32": unpack_int32}[column.type]
    try:
        values = tuple(map(_finite, unpack(data)))
    except ValueError as error:
        raise ContractViolation(f"{len(data)} bytes are no {column.type}", field=f"column {column.name}") from error
    if column.per == "rollout" and values and values[0] is not None:
        return values[0]
    return values


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(kw_only=True)
class Search:
    """A search for text in recorded batches; `run` looks at each record once."""

    files: RecordedFiles
    text: str
    limit: int
    max_files: int = MAX_FILES
    max_bytes: int = MAX_BYTES
    max_s: float = MAX_S
    clock: Callable[[], float] = time.monotonic
    _num_files: int = field(default=0, init=False)
    _num_bytes: int = field(default=0, init=False)

    def run(self) -> FoundTexts:
        """Returns what was found within the bounds; case doesn't matter. A file that can't be read is passed over."""
        matches: list[FoundText] = []
        searched = 0
        ends_s = self.clock() + self.max_s
        for iteration in reversed(self.files.iterations()):
            for path in self.files.batch_paths(iteration):
                is_spent = self._num_files >= self.max_files or self._num_bytes >= self.max_bytes
                if len(matches) >= self.limit or is_spent or self.clock() >= ends_s:
                    return FoundTexts(
                        texts=tuple(matches[: self.limit]), searched_iterations=searched, is_complete=False
                    )
                self._num_files += 1
                try:
                    self._num_bytes += path.stat().st_size
                    record = read_record(path, RecordedBatch, max_bytes=self.files.max_bytes)
                    check_text(record)
                except (OSError, OnbeatError):
                    continue
                matches += found_in(record, self.text)
            searched += 1
        is_complete = len(matches) <= self.limit
        return FoundTexts(texts=tuple(matches[: self.limit]), searched_iterations=searched, is_complete=is_complete)


def found_in(record: RecordedBatch, text: str) -> Iterator[FoundText]:
    """Yields each prompt and each completion of the batch that has the text; of a trajectory all turns count."""
    wanted = text.casefold()
    pieces = record.text_of
    for place, group in enumerate(record.batch.groups):
        prompt = record.prompt_batch.prompt_at(place, num_resamples=group.num_resamples)
        texts = [(-1, prompt.text if prompt else "")]
        for sample, rollout in enumerate(group.rollouts):
            whole = ""
            if pieces:
                whole = "".join(pieces_of(rollout.completion, pieces))
            texts.append((sample, rollout.text if wanted in rollout.text.casefold() else whole))
        for sample, content in texts:
            at = place_of(wanted, content)
            if at >= 0:
                excerpt = content[max(0, at - BESIDE) : at + len(text) + BESIDE]
                yield FoundText(batch_id=record.batch.batch_id, group=place, sample=sample, excerpt=excerpt)


def place_of(wanted: str, content: str) -> int:
    """Returns where a folded text begins in a text as it stands; -1 where it doesn't.

    Folding makes some characters two.
    """
    folded = content.casefold()
    at = folded.find(wanted)
    if at <= 0 or len(folded) == len(content):
        return at
    passed = 0
    for place, character in enumerate(content):
        passed += len(character.casefold())
        if passed > at:
            return place
    return -1
