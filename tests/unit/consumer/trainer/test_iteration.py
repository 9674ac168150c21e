"""An open iteration: which batches it takes, and the boundary to the one before, read off its batches' timings."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from broker.trainer_side import Arrived
from consumer.trainer.iteration import Boundary, Iteration, uncovered_s
from contracts.encoding.arrays import pack_int32
from contracts.errors import FenceViolation
from contracts.events import TimelineSpan, TrajectoryMetrics
from contracts.rollouts import BatchTimings, Prompt, PromptBatch, PromptTask, Rollout, RolloutBatch, batch_digest
from contracts.sampling import SamplingParams
from onbeat.loop.window import AskedIteration
from tests.builders import DIGEST, batch_of, prompt_batch, rollout
from tests.trajectories import played

BOUNDARY = Boundary(last_token_s=100.0, opening_started_s=100.5, opened_s=100.625)


def asked_by(number: int, *batches: PromptBatch) -> AskedIteration:
    """An iteration that its own version samples."""
    return AskedIteration(number=number, weights_digest=DIGEST, batches=batches, samplers={number: DIGEST})


def iteration(boundary: Boundary | None, generations: list[tuple[float, float]]) -> Iteration:
    """Took one batch for each (start, end) of a generation."""
    asked = [
        prompt_batch([[5]], group_size=2, batch_id=f"1/train/{number}", iteration=1, policy_version=1)
        for number in range(len(generations))
    ]
    begun = Iteration(asked_by(1, *asked), trainer_epoch=1, boundary=boundary)
    for batch, (started_s, ended_s) in zip(asked, generations, strict=True):
        timings = BatchTimings(
            generation_started_s=started_s,
            generation_ended_s=ended_s,
            scoring_started_s=ended_s,
            scoring_ended_s=ended_s + 0.25,
        )
        came = batch_of(
            [([5], [rollout([7], 0.0), rollout([8], 1.0)])],
            batch_id=batch.batch_id,
            iteration=1,
            policy_version=1,
            timings=timings,
        )
        begun.take(Arrived(batch=came, digest=batch_digest(came), num_bytes=0))
    return begun


@pytest.mark.parametrize(
    ("generations", "bubble_s"), [([(101.0, 102.0), (100.75, 103.0)], 0.75), ([(99.0, 101.0)], 0.0), ([], 0.0)]
)
def test_the_bubble_lasts_from_the_last_token_to_the_first_generation(
    generations: list[tuple[float, float]], bubble_s: float
) -> None:
    assert iteration(BOUNDARY, generations).bubble_s == bubble_s


def test_a_trainers_first_iteration_has_no_bubble() -> None:
    assert iteration(None, [(101.0, 102.0)]).bubble_s == 0.0


def test_the_last_token_of_any_generator_counts() -> None:
    assert iteration(None, [(101.0, 105.0), (102.0, 103.0)]).last_token_s == 105.0


def test_opening_is_a_span_of_the_iteration_that_it_opened() -> None:
    opened = TimelineSpan(who="trainer", what="open", iteration=1, started_s=100.5, ended_s=100.625)
    assert iteration(BOUNDARY, []).spans == [opened]
    assert iteration(None, []).spans == []


TASK = PromptTask(task="{}", seed=7, observation_digest=DIGEST)


def answered(opened: bool, *rollouts: Rollout) -> tuple[Iteration, Arrived]:
    """An iteration of one batch, whose prompt an environment has opened or not, and what came for it."""
    asked = prompt_batch([[5]])
    if opened:
        asked = replace(asked, prompts=(replace(asked.prompts[0], environment=TASK),))
    batch = batch_of([([5], rollouts)])
    return Iteration(asked_by(0, asked), trainer_epoch=1), Arrived(batch=batch, digest=batch_digest(batch), num_bytes=0)


@pytest.mark.parametrize(
    ("opened", "rollouts", "problem"),
    [
        (True, [played([[7]]), rollout([7], 0.0)], "is no trajectory, though an environment opened the prompt"),
        (False, [rollout([7], 0.0), played([[7]])], "is a trajectory, though no environment opened the prompt"),
        (True, [played([[7]]), played([[7], [8] * 6], [[4]])], "has a turn of 6 tokens, sampling ends at 5"),
    ],
)
def test_a_completion_that_is_not_what_its_prompt_asks_for_is_refused(
    opened: bool, rollouts: list[Rollout], problem: str
) -> None:
    expected, arrived = answered(opened, *rollouts)
    with pytest.raises(FenceViolation, match=problem):
        expected.take(arrived)
    assert not expected.digests


def test_a_completion_says_what_truncated_sampling_kept_or_is_refused() -> None:
    asked = prompt_batch([[5]], sampling=SamplingParams(max_new_tokens=5, min_p=0.1))
    silent = batch_of([([5], [rollout([7], 0.0), rollout([8], 1.0)])])
    arrived = Arrived(batch=silent, digest=batch_digest(silent), num_bytes=0)
    with pytest.raises(FenceViolation, match=r"doesn't report which tokens min_p = 0\.1 kept"):
        Iteration(asked_by(0, asked), trainer_epoch=1).take(arrived)


def test_what_was_played_is_counted_and_in_a_job_without_an_environment_there_is_no_such_number() -> None:
    again = played(
        [[7], [8, 8], [9]],
        [[4, 4], [4]],
        turn_rewards=[0.0, 0.5, 0.25],
        terminal=1.0,
        stop="max_turns",
        attempt=2,
        metrics={"calls": 3.0, "errors": 1.0},
        anew=[1],
    )
    first = played([[7]], turn_rewards=[0.25], metrics={"calls": 1.0})
    expected, arrived = answered(True, again, first)
    assert expected.take(arrived)
    assert expected.played.metrics() == TrajectoryMetrics(
        turns_mean=2.0,
        turns_max=3,
        done_share=0.5,
        max_turns_share=0.5,
        max_tokens_share=0.0,
        observation_tokens_mean=1.5,
        lines_mean=1.5,
        environment_reward_mean=0.5,
        num_begun_again=1,
        environment={"calls": 2.0, "errors": 1.0},
    )
    without, arrived = answered(False, rollout([7], 0.0), rollout([8], 1.0))
    assert without.take(arrived)
    assert without.played.metrics() is UNSET


RESERVE = Prompt(prompt_id="train/9", index=2, token_ids=pack_int32([9]), text="", reference="")
RESAMPLED = {"prompt_id": "train/9", "prompt_index": 2, "prompt_token_ids": pack_int32([9]), "num_resamples": 1}


def resampling() -> Iteration:
    """Expects a batch of two prompts with one reserve each."""
    asked = replace(prompt_batch([[5], [6]]), reserves=((RESERVE, replace(RESERVE, index=3)),))
    return Iteration(asked_by(0, asked), trainer_epoch=1)


def answer(first: dict[str, Any], *, rewards: tuple[float, float] = (0.0, 1.0)) -> RolloutBatch:
    """The first group with these fields; the second one is as it was asked."""
    pairs = [rollout([7], reward) for reward in rewards]
    batch = batch_of([([5], pairs), ([6], [rollout([7], 0.0), rollout([8], 1.0)])])
    return replace(batch, groups=(replace(batch.groups[0], **first), batch.groups[1]))


@pytest.mark.parametrize(
    ("first", "rewards"),
    [({}, (0.0, 1.0)), (RESAMPLED, (0.0, 1.0)), (RESAMPLED, (1.0, 1.0))],
    ids=["its prompt", "its reserve", "nothing left to resample"],
)
def test_a_place_may_hold_its_prompt_or_its_reserve(first: dict[str, Any], rewards: tuple[float, float]) -> None:
    batch = answer(first, rewards=rewards)
    assert resampling().take(Arrived(batch=batch, digest=batch_digest(batch), num_bytes=0))


@pytest.mark.parametrize(
    ("first", "rewards", "problem"),
    [
        ({"prompt_token_ids": pack_int32([6])}, (0.0, 1.0), "answers train/0 at place 0 after 0 resamples"),
        (RESAMPLED | {"num_resamples": 0}, (0.0, 1.0), "it was asked train/0 there"),
        ({"num_resamples": 1}, (0.0, 1.0), "it was asked train/9 there"),
        (RESAMPLED | {"prompt_index": 3}, (0.0, 1.0), "answers train/9 at place 0 after 1 resamples"),
        (RESAMPLED | {"num_resamples": 2}, (0.0, 1.0), "it was asked nothing there"),
        ({}, (1.0, 1.0), "kept the equal rewards of train/0, though place 0 was due another prompt"),
    ],
    ids=["forged tokens", "early", "late", "another place's", "beyond the reserves", "not resampled"],
)
def test_a_place_that_holds_another_prompt_or_was_due_one_is_refused(
    first: dict[str, Any], rewards: tuple[float, float], problem: str
) -> None:
    batch = answer(first, rewards=rewards)
    with pytest.raises(FenceViolation, match=problem):
        resampling().take(Arrived(batch=batch, digest=batch_digest(batch), num_bytes=0))


def test_a_batch_of_another_shape_is_refused() -> None:
    batch = batch_of([([5], [rollout([7], 0.0), rollout([8], 1.0)])])
    with pytest.raises(FenceViolation, match="another shape"):
        resampling().take(Arrived(batch=batch, digest=batch_digest(batch), num_bytes=0))


def test_each_round_of_a_batch_is_a_span_of_its_own() -> None:
    batch = answer(RESAMPLED)
    first = BatchTimings(generation_started_s=0.0, generation_ended_s=0.5, scoring_started_s=0.5, scoring_ended_s=0.75)
    batch = replace(batch, earlier_rounds=(first,))
    begun = resampling()
    begun.take(Arrived(batch=batch, digest=batch_digest(batch), num_bytes=0))
    assert [(span.what, span.started_s, span.ended_s) for span in begun.spans] == [
        ("generate", 0.0, 0.5),
        ("score", 0.5, 0.75),
        ("generate", 1.0, 2.0),
        ("score", 2.0, 2.5),
    ]


def test_a_batch_without_a_stated_score_leaves_no_trace_and_one_with_them_their_counts() -> None:
    plain, begun = answer({}), resampling()
    begun.take(Arrived(batch=plain, digest=batch_digest(plain), num_bytes=0))
    assert (begun.unscorable, begun.num_unscorable) == ({}, 0)
    first = plain.groups[0]
    rollouts = (replace(first.rollouts[0], unscorable={"exact": "timeout"}), first.rollouts[1])
    stated, begun = replace(plain, groups=(replace(first, rollouts=rollouts), plain.groups[1])), resampling()
    begun.take(Arrived(batch=stated, digest=batch_digest(stated), num_bytes=0))
    assert (begun.unscorable, begun.num_unscorable) == ({"0/train/0": {"exact: timeout": 1}}, 1)
    # Stages add theirs: a completion with two stated scores is one completion, and the record has both reasons.
    both = replace(rollouts[0], unscorable={"exact": "timeout", "judge": "no_answer"})
    other = replace(rollouts[1], unscorable={"judge": "no_answer"})
    staged = replace(stated, groups=(replace(first, rollouts=(both, other)), plain.groups[1]))
    begun.put_columns(staged, "digest of columns")
    assert begun.columns == {"0/train/0": "digest of columns"}
    assert begun.unscorable == {"0/train/0": {"exact: timeout": 1, "judge: no_answer": 2}}
    assert begun.num_unscorable == 2


def two_batches() -> Iteration:
    """Expects 0/train/0 and 0/train/1 of version 0."""
    asked = tuple(prompt_batch([[5]], group_size=2, batch_id=f"0/train/{number}") for number in range(2))
    return Iteration(asked_by(0, *asked), trainer_epoch=1)


def came(**changes: Any) -> Arrived:
    batch = batch_of([([5], [rollout([7], 0.0), rollout([8], 1.0)])], **changes)
    return Arrived(batch=batch, digest=batch_digest(batch), num_bytes=0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"policy_version": 1}, "was sampled with version 1"),
        ({"weights_digest": "b" * 64}, r"was sampled with version 0 \(b{12}\), what samples it is version 0 \(abab"),
        ({"purpose": "evaluation"}, "another shape"),
        ({"batch_id": "0/train/2"}, "batch 0/train/2 is not of iteration 0"),
        ({"batch_id": "1/train/0"}, "batch 1/train/0 is not of iteration 0"),
    ],
    ids=["another version", "another digest", "another purpose", "one too many", "another iteration's"],
)
def test_a_batch_that_nobody_sampled_for_this_iteration_is_refused_and_not_taken(
    changes: dict[str, Any], problem: str
) -> None:
    """The second line of I2: the trainer checks again what the fence has checked."""
    begun = two_batches()
    with pytest.raises(FenceViolation, match=problem):
        begun.take(came(**changes))
    assert begun.digests == {}
    assert len(begun.missing) == 2


def test_a_second_copy_is_no_second_gradient() -> None:
    """The second line of I3."""
    begun = two_batches()
    assert begun.take(came())
    assert not begun.take(came(generator_id="generator-b"))
    assert [batch.batch_id for batch in begun.missing] == ["0/train/1"]
    assert [span.what for span in begun.spans] == ["generate", "score"]


def test_a_second_copy_of_another_content_is_an_error_and_no_choice() -> None:
    begun, first = two_batches(), came()
    begun.take(first)
    other = batch_of([([5], [rollout([9], 0.0), rollout([8], 1.0)])])
    with pytest.raises(FenceViolation, match="came twice, with different content"):
        begun.take(Arrived(batch=other, digest=batch_digest(other), num_bytes=0))
    assert begun.digests == {"0/train/0": first.digest}


def test_a_batch_that_was_abandoned_is_not_taken_when_it_comes_after_all() -> None:
    begun = two_batches()
    begun.abandon({"0/train/0": "died"})
    assert not begun.take(came())
    assert begun.digests == {}
    assert [batch.batch_id for batch in begun.missing] == ["0/train/1"]


def lagging() -> Iteration:
    """Iteration 3: what trains may be sampled with version 1, 2 or 3, what evaluates with 3 alone."""
    fields: dict[str, Any] = {"group_size": 2, "iteration": 3, "policy_version": 1}
    asked = [prompt_batch([[5]], batch_id=f"3/train/{number}", **fields) for number in range(3)]
    asked.append(prompt_batch([[5]], batch_id="3/evaluation/0", purpose="evaluation", **fields))
    samplers = {1: "1" * 64, 2: "2" * 64, 3: "3" * 64}
    return Iteration(
        AskedIteration(number=3, weights_digest="3" * 64, batches=tuple(asked), samplers=samplers), trainer_epoch=1
    )


def of_version(version: int, batch_id: str, **changes: Any) -> Arrived:
    purpose = "train" if "train" in batch_id else "evaluation"
    fields = {"batch_id": batch_id, "purpose": purpose, "iteration": 3, "policy_version": version}
    return came(**(fields | {"weights_digest": f"{version}" * 64} | changes))


def test_a_batch_may_be_of_any_version_of_the_range_and_its_sampler_is_kept_for_the_chain() -> None:
    begun = lagging()
    for version, batch_id in ((2, "3/train/2"), (3, "3/train/0"), (2, "3/train/1"), (3, "3/evaluation/0")):
        assert begun.take(of_version(version, batch_id))
    (by,) = begun.sampled
    assert (by.policy_version, by.weights_digest, by.batches) == (2, "2" * 64, ("3/train/1", "3/train/2"))


@pytest.mark.parametrize(
    ("version", "batch_id", "changes"),
    [
        (0, "3/train/0", {}),
        (4, "3/train/0", {}),
        (2, "3/train/0", {"weights_digest": "3" * 64}),
        (2, "3/evaluation/0", {}),
        (2, "3/evaluation/0", {"purpose": "train"}),
    ],
    ids=["below", "above", "another's digest", "an older version evaluated", "evaluation that says it trains"],
)
def test_a_batch_out_of_the_range_is_refused(version: int, batch_id: str, changes: dict[str, Any]) -> None:
    begun = lagging()
    with pytest.raises(FenceViolation, match="was sampled with version"):
        begun.take(of_version(version, batch_id, **changes))
    assert begun.digests == {}


def test_an_evaluation_between_two_iterations_is_no_pause() -> None:
    """Sampled ahead, training ended at 100; evaluation of the iteration before lasted from 101 to 104."""
    boundary = replace_boundary(generations=((99.0, 100.0), (101.0, 104.0)))
    assert iteration(boundary, [(104.5, 105.0), (106.0, 107.0)]).bubble_s == 1.5
    assert iteration(boundary, [(98.0, 99.0)]).bubble_s == 0.0


def test_the_next_boundary_knows_what_ended_after_the_last_training_token() -> None:
    boundary = replace_boundary(generations=((99.0, 100.0), (101.0, 109.0)))
    begun = iteration(boundary, [(104.5, 105.0), (106.0, 107.0)])
    assert (begun.last_token_s, begun.later_generations) == (107.0, ((101.0, 109.0),))


def replace_boundary(**changes: Any) -> Boundary:
    return dataclasses.replace(BOUNDARY, **changes)


@pytest.mark.parametrize(
    ("spans", "idle_s"),
    [
        ([], 10.0),
        ([(0.0, 10.0)], 0.0),
        ([(4.0, 6.0), (5.0, 7.0)], 7.0),
        ([(-5.0, 1.0), (9.0, 20.0)], 8.0),
        ([(20.0, 30.0), (-9.0, -5.0)], 10.0),
        ([(2.0, 3.0), (1.0, 8.0)], 3.0),
    ],
)
def test_what_no_span_covers_is_counted_once(spans: list[tuple[float, float]], idle_s: float) -> None:
    assert uncovered_s(0.0, 10.0, spans) == idle_s
    assert uncovered_s(10.0, 0.0, spans) == 0.0


def test_a_wait_that_follows_another_at_once_goes_on_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = Iteration(asked_by(0), trainer_epoch=1)
    now_s = iter([100.0, 101.0, 103.0])
    monkeypatch.setattr("consumer.trainer.iteration.time", SimpleNamespace(time=lambda: next(now_s)))
    for seconds in (2.0, 1.0, 1.0):
        begun.waited(seconds)
    assert [(span.started_s, span.ended_s) for span in begun.spans] == [(98.0, 101.0), (102.0, 103.0)]
    assert begun.waiting_s == 4.0
