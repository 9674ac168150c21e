"""A trainer's dry pass: what it reports, and by which key a job without room ends."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consumer.ranks.dry_pass import DryPass, LongestRow
from consumer.trainer.dry_pass import PREDECESSOR_GONE_S, dry_pass
from consumer.trainer.trainer import is_dry_pass_due
from contracts.encoding.arrays import pack_int32
from contracts.errors import Fault, InvalidInput, Unavailable
from contracts.events import MemoryMeasured, TrainerStarted
from tests.builders import job_spec

WORDS = "RuntimeError: can't allocate memory"


class Job:
    """A held job whose ranks have room for so many tokens; `passes` has the bound of each pass."""

    def __init__(self, *, room: int, error: Exception | None = None, num_trainers: int = 1, **changes: Any) -> None:
        self.spec = job_spec(rollout__sampling={"max_new_tokens": 290}, **changes)
        self.room = room
        self.error = error
        self.passes: list[int] = []
        self.told: list[MemoryMeasured] = []
        model = SimpleNamespace(device=torch.device("cpu"))
        policy = SimpleNamespace(model=model, context_tokens=512)
        self.ranks = SimpleNamespace(learner=SimpleNamespace(policy=policy), dry_pass=self._pass)
        prompts = [SimpleNamespace(token_ids=pack_int32([1] * length)) for length in (3, 10, 7)]
        self.window = SimpleNamespace(prompt_batches=SimpleNamespace(training_prompts=prompts))
        self.keeper = SimpleNamespace(
            check=lambda: None, training=lambda longest_pass_s: contextlib.nullcontext(longest_pass_s)
        )
        self.tell = self.told.append
        self.job_id = "job-1"
        starts = [
            TrainerStarted(at_s=number, trainer_epoch=1000 + number, next_iteration=0, resumed=False)
            for number in range(num_trainers)
        ]
        self.jobs = SimpleNamespace(events_after=lambda job_id, after: [(job_id, event) for event in starts])

    def _pass(self, row: LongestRow) -> DryPass:
        assert (row.prompt_tokens, row.response_tokens) == (10, 290), "the longest prompt, the longest completion"
        self.passes.append(row.pass_tokens)
        if self.error is not None:
            raise self.error
        if row.pass_tokens > self.room:
            return DryPass(num_tokens=row.pass_tokens, problem=WORDS)
        return DryPass(num_tokens=row.pass_tokens, peak_bytes=3 * 2**29)


def refused(job: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        dry_pass(job)
    return caught.value


def test_a_pass_with_room_is_told_in_one_line() -> None:
    job: Any = Job(room=8192)
    dry_pass(job)
    (event,) = job.told
    assert (event.device, event.num_tokens, event.peak_bytes) == ("cpu", 8192, 3 * 2**29)
    assert event.in_words.startswith(
        "the largest micro-batch of this spec, 8,192 tokens, takes 1.5 GiB at the peak, of"
    )
    assert job.passes == [8192]


def test_a_job_without_room_fails_by_the_key_with_the_first_half_that_has_room() -> None:
    job: Any = Job(room=3000)
    error = refused(job)
    assert error.field == "trainer.max_tokens_per_micro_batch"
    assert error.problem == f"out of memory in the dry pass, of 8192 tokens in rows of up to 300: {WORDS}"
    assert str(error.cure).startswith("set trainer.max_tokens_per_micro_batch = 2048, which has room here, or ")
    assert error.fault is Fault.JOB
    assert job.passes == [8192, 4096, 2048]
    assert job.told == []


def test_a_successor_tries_once_more_before_it_says_that_there_is_no_room() -> None:
    """The trainer before may have been killed a moment ago, and its memory not be free yet."""
    job: Any = Job(room=3000, num_trainers=2)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        job.room = 8192

    job.pause = pause
    dry_pass(job)
    assert (job.passes, pauses, len(job.told)) == ([8192, 8192], [PREDECESSOR_GONE_S], 1)

    job = Job(room=3000, num_trainers=2)
    job.pause = pauses.append
    assert "has room here" in str(refused(job).cure)
    assert job.passes == [8192, 8192, 4096, 2048]


def test_no_number_is_offered_where_one_row_has_no_room() -> None:
    job: Any = Job(room=299)
    error = refused(job)
    assert error.field == "rollout.sampling.max_new_tokens"
    assert "max_tokens_per_micro_batch" not in str(error.cure)
    assert "trainer.gradient_checkpointing = true" in str(error.cure)
    assert job.passes[-1] == 300, "no bound cuts a row"


def test_of_several_ranks_one_without_room_ends_the_job_by_its_words() -> None:
    failure = Unavailable("died", field="rank 1")
    failure.foreign = "OutOfMemoryError: CUDA out of memory"
    job: Any = Job(room=0, error=failure)
    error = refused(job)
    assert error.problem.endswith("OutOfMemoryError: CUDA out of memory")
    assert str(error.cure).startswith("set trainer.max_tokens_per_micro_batch = 4096, or ")
    assert job.passes == [8192], "ranks that have lost step try no other"
    lost: Any = Job(room=0, error=Unavailable("a rank was killed"))
    with pytest.raises(Unavailable, match="a rank was killed"):
        dry_pass(lost)


def test_a_pass_that_says_nothing_tells_nothing() -> None:
    job: Any = Job(room=8192)
    job.ranks.dry_pass = lambda row: DryPass()
    dry_pass(job)
    assert job.told == []


@pytest.mark.parametrize(
    ("committed", "following", "is_due"), [(-1, 0, True), (0, 1, False), (-1, None, False), (-1, 8, False)]
)
def test_it_is_due_until_an_iteration_is_committed_and_where_one_is_trained(
    committed: int, following: int | None, is_due: bool
) -> None:
    job: Any = SimpleNamespace(spec=job_spec(iterations=8))
    succession: Any = SimpleNamespace(committed=committed, next=following)
    assert is_dry_pass_due(job, succession) is is_due
