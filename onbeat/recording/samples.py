"""Recorded completions as texts: of a job's run folder, or of a gateway's answers.

rollouts/ of the run folder ─▶ FolderSamples ─┐
GET /v1/jobs/{id}/rollouts ──▶ GatewaySamples ─┴─▶ read_samples ─▶ `onbeat samples`, `run.samples()`
a batch that was just trained ─▶ samples_of ─▶ the tables of trackers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from msgspec import UNSET

from contracts.encoding.arrays import unpack_int32
from contracts.encoding.wire import convert
from contracts.errors import NotFound
from contracts.run_folder import RunFolder
from onbeat.recording.files import RecordedFiles, parts_of
from onbeat.recording.records import RecordedBatch, RecordedBatchView, RecordedList, RecordedSample

MOST_ITERATIONS = 1000
"""Most recorded iterations that are asked for at once, as the route allows."""
MOST_NAMED = 6
"""Most iterations that an error lists."""


class SampleSource(Protocol):
    """Reads the records of one job."""

    def iterations(self) -> dict[int, list[str]]:
        """Returns iteration → the ids of its recorded batches, newest iteration first."""
        ...

    def samples(self, batch_id: str) -> list[RecordedSample]: ...


class FolderSamples:
    """Reads a run folder, also of a stack that is gone."""

    def __init__(self, folder: RunFolder) -> None:
        self._files = RecordedFiles(folder)

    def iterations(self) -> dict[int, list[str]]:
        batches: dict[int, list[str]] = {}
        for number in reversed(self._files.iterations()):
            try:
                index = self._files.index(number)
            except NotFound:
                # Its commit is to come.
                continue
            batches[number] = [summary.batch_id for summary in index.batches]
        return batches

    def samples(self, batch_id: str) -> list[RecordedSample]:
        return list(samples_of(self._files.read(batch_id)))


class GatewaySamples:
    """Reads the answers of a gateway."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        """ask: takes the path behind that of the job, and `params`; returns the JSON of the answer."""
        self._ask = ask

    def iterations(self) -> dict[int, list[str]]:
        recorded = convert(self._ask("/rollouts", params={"limit": MOST_ITERATIONS}), RecordedList)
        return {view.iteration: [summary.batch_id for summary in view.batches] for view in recorded.iterations}

    def samples(self, batch_id: str) -> list[RecordedSample]:
        return list(_samples_of_view(convert(self._ask(f"/rollouts/{batch_id}"), RecordedBatchView)))


def read_samples(
    source: SampleSource,
    *,
    iteration: int | None = None,
    batch: int | None = None,
    held_out: bool = False,
    worst: bool = False,
    limit: int = 8,
) -> list[RecordedSample]:
    """Returns recorded completions of one iteration.

    Args:
        source: The job's records.
        iteration: Its number; None takes the newest one that has such a batch.
        batch: The number of one batch in it; None takes all that are recorded.
        held_out: Completions of held-out prompts, in place of those that were trained. A job that only evaluates has
            no others.
        worst: Those of the lowest rewards first; else as they were sampled.
        limit: How many at most.

    Raises:
        NotFound: Nothing of that kind is recorded; the error names what is.
    """
    recorded = source.iterations()
    only_evaluates = bool(recorded) and not _has_training(recorded)
    purpose = "evaluation" if held_out or only_evaluates else "train"
    chosen = {number: _of_purpose(batches, purpose) for number, batches in recorded.items()}
    chosen = {number: batches for number, batches in chosen.items() if batches}
    if iteration is None:
        iteration = next(iter(chosen), None)
    if iteration is None or iteration not in chosen:
        raise _not_recorded(iteration, purpose, list(chosen))
    batch_ids = chosen[iteration]
    if batch is not None:
        batch_ids = [batch_id for batch_id in batch_ids if parts_of(batch_id)[2] == batch]
        if not batch_ids:
            numbers = ", ".join(str(parts_of(batch_id)[2]) for batch_id in chosen[iteration])
            raise NotFound(
                f"batch {batch} of iteration {iteration} isn't recorded", field="batch", cure=f"recorded are {numbers}"
            )
    samples: list[RecordedSample] = []
    for batch_id in batch_ids:
        samples += source.samples(batch_id)
        # The worst ones may be in any batch.
        if len(samples) >= limit and not worst:
            break
    if worst:
        samples.sort(key=lambda sample: sample.reward)
    return samples[:limit]


def samples_of(record: RecordedBatch) -> Iterator[RecordedSample]:
    """Yields the completions of a recorded batch, prompt by prompt."""
    batch = record.batch
    texts = record.text_of
    for place, group in enumerate(batch.groups):
        prompt = record.prompt_batch.prompt_at(place, num_resamples=group.num_resamples)
        for sample, rollout in enumerate(group.rollouts):
            row = place * batch.group_size + sample
            text = rollout.text
            if rollout.completion.trajectory is not UNSET:
                text = "".join(texts.get(token, "") for token in unpack_int32(rollout.completion.token_ids))
            yield RecordedSample(
                iteration=batch.iteration,
                batch_id=batch.batch_id,
                purpose=batch.purpose,
                policy_version=batch.policy_version,
                prompt=prompt.text if prompt else group.prompt_text or "",
                reference=prompt.reference if prompt else group.reference or "",
                sample=sample,
                completion=text,
                reward=rollout.reward if record.rewards is UNSET else record.rewards[row],
                reward_components=dict(rollout.reward_breakdown),
                finish_reason=rollout.completion.finish_reason,
            )


def _samples_of_view(view: RecordedBatchView) -> Iterator[RecordedSample]:
    for group in view.groups:
        for completion in group.completions:
            yield RecordedSample(
                iteration=view.iteration,
                batch_id=view.batch_id,
                purpose=view.purpose,
                policy_version=view.policy_version,
                prompt=group.prompt_text,
                reference=group.reference,
                sample=completion.sample,
                completion="".join(completion.pieces) if completion.turns else completion.text,
                reward=completion.reward,
                reward_components=completion.reward_breakdown,
                finish_reason=completion.finish_reason,
            )


def _has_training(recorded: dict[int, list[str]]) -> bool:
    return any(_of_purpose(batches, "train") for batches in recorded.values())


def _of_purpose(batch_ids: Sequence[str], purpose: str) -> list[str]:
    return [batch_id for batch_id in batch_ids if parts_of(batch_id)[1] == purpose]


def _not_recorded(iteration: int | None, purpose: str, recorded: Sequence[int]) -> NotFound:
    kind = "held-out completions" if purpose == "evaluation" else "completions"
    if not recorded:
        return NotFound(
            f"no {kind} are recorded",
            field="samples",
            cure="they come with the commit of an iteration, unless the spec's table recording says otherwise",
        )
    first = ", ".join(map(str, recorded[:MOST_NAMED]))
    more = ", …" if len(recorded) > MOST_NAMED else ""
    return NotFound(f"no {kind} of iteration {iteration} are recorded", field="iteration", cure=f"take {first}{more}")
