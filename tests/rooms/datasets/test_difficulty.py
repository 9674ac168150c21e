"""Difficulty pools: rates and draws beside a transcription of them, over resumes and lags, and what the audit sees."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.errors import FenceViolation, InvalidInput
from contracts.events import AuditRecord, record_digest
from contracts.jobs import DrawnPrompts
from contracts.spec.job import JobSpec
from contracts.spec.rules import check_spec
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.data.prompts.difficulty import MeasuredPool
from onbeat.data.prompts.pools import Pool, Walk
from tests.builders import DIGEST, commit_record, job_spec

SIZE, OTHERS = 20, 5
"""Prompts of the measured source, and of another in a mixture."""
POOLS: dict[str, Any] = {
    "easy_threshold": 0.75,
    "hard_threshold": 0.25,
    "easy_fraction": 0.25,
    "hard_fraction": 0.25,
    "pass_reward": 0.5,
    "newest_weight": 0.5,
}
LAGS: dict[int, dict[str, Any]] = {
    0: {},
    2: {"schedule": "delayed", "max_policy_lag": 2, "algorithm__correction": "none"},
}


def pools_spec(lag: int = 0, *, mixed: bool = False, **changes: Any) -> JobSpec:
    dataset: dict[str, Any] = {"type": "addition", "difficulty_pools": POOLS}
    if mixed:
        plain = {"name": "plain", "dataset": {"type": "addition"}}
        dataset = {"type": "mixture", "sources": [{"name": "sums", "weight": 3, "dataset": dataset}, plain]}
    fields = {"iterations": 12, "dataset": dataset, "evaluation__num_prompts": 0}
    return job_spec(**(fields | LAGS[lag] | changes))


def walk(job: JobSpec, *, mixed: bool = False) -> Walk:
    pools = [MeasuredPool.of(job, Pool(places=range(100, 100 + SIZE), name="sums" if mixed else "", weight=3.0))]
    plain = [Pool(places=range(OTHERS), name="plain")] if mixed else []
    return Walk([*pools, *plain], num_prompts=job.rollout.prompts_per_iteration, seed=job.seed)


def rewards(iteration: int, place: int, size: int) -> list[float]:
    """A third of the prompts always passes, a third never, a third changes."""
    kind = place % 3
    return [float(kind == 0 or (kind == 2 and (iteration + sample) % 3 > 0)) for sample in range(size)]


def commit(job: JobSpec, way: Walk, iteration: int, *, dead: range = range(0)) -> tuple[DrawnPrompts, ...]:
    """What the iteration measures. dead: batches that were abandoned."""
    places = way.places(iteration)
    lost = {index for index in range(len(places)) if index // job.rollout.prompts_per_batch in dead}
    groups = {
        index: rewards(iteration, place, job.rollout.group_size)
        for index, place in enumerate(places)
        if index not in lost
    }
    return way.drawn(iteration, groups)


def run(job: JobSpec, *, mixed: bool = False, dead: int = -1) -> list[tuple[DrawnPrompts, ...]]:
    """Returns each iteration's draws, in a trainer's order. dead: the iteration that loses its batch 1."""
    way, made = walk(job, mixed=mixed), list[tuple[DrawnPrompts, ...]]()
    for number in range(job.num_open):
        way.places(number)
    for number in range(job.iterations):
        made.append(commit(job, way, number, dead=range(1, 2) if number == dead else range(0)))
        way.learn(number, made[-1])
        if number + job.num_open < job.iterations:
            way.places(number + job.num_open)
    return made


def seeded(name: str) -> random.Random:
    return random.Random(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))


def transcribed(
    job: JobSpec, history: Sequence[DrawnPrompts], iteration: int, *, quota: int
) -> tuple[list[int], int, int]:
    """Numbers that the iteration draws of the only source, and the sizes of its easy and hard pools; in fractions."""
    rates: dict[int, Fraction] = {}
    for drawn in history[: max(0, iteration - job.max_policy_lag)]:
        for number, passed in zip(drawn.places, drawn.passed, strict=True):
            if passed < 0:
                continue
            share = Fraction(passed, job.rollout.group_size)
            rates[number] = (rates[number] + share) / 2 if number in rates else share
    names = dict.fromkeys(range(SIZE), "normal")
    names |= {number: "easy" for number, rate in rates.items() if rate >= Fraction(3, 4)}
    names |= {number: "hard" for number, rate in rates.items() if rate <= Fraction(1, 4)}
    pool = {name: [number for number in range(SIZE) if names[number] == name] for name in ("easy", "normal", "hard")}
    shift = (iteration + 1) * (math.sqrt(5) - 1) / 2 % 1
    ends = [0, math.floor(quota / 4 + shift), math.floor(3 * quota / 4 + shift), quota]
    draw, taken = seeded(f"{job.seed}/difficulty/{iteration}"), list[int]()
    for place, name in enumerate(("easy", "normal", "hard")):
        taken += draw.sample(pool[name], min(len(pool[name]), ends[place + 1] - ends[place]))
    for name in ("normal", "hard", "easy"):
        left = [number for number in pool[name] if number not in taken]
        taken += draw.sample(left, min(len(left), quota - len(taken)))
    taken.sort()
    draw.shuffle(taken)
    return taken, len(pool["easy"]), len(pool["hard"])


@pytest.mark.parametrize("lag", LAGS)
def test_the_fold_and_the_draw_are_those_of_a_transcription(lag: int) -> None:
    job = pools_spec(lag)
    made = [drawn[0] for drawn in run(job, dead=4)]
    quota = job.rollout.prompts_per_iteration
    for iteration, drawn in enumerate(made):
        again = transcribed(job, made, iteration, quota=quota)
        assert ([*drawn.places], drawn.num_easy, drawn.num_hard) == again
    assert [one.passed.count(-1) for one in made] == [0] * 4 + [job.rollout.prompts_per_batch] + [0] * 7
    assert made[lag + 3].num_easy
    assert made[lag + 3].num_hard
    assert (made[lag].num_easy, made[lag].num_hard) == (0, 0)


def test_without_rates_all_are_normal_and_what_a_pool_lacks_comes_from_the_others() -> None:
    job = pools_spec(rollout__prompts_per_batch=4, rollout__batches_per_iteration=2)
    way = walk(job)
    assert len({*way.places(0)}) == 8
    all_pass = DrawnPrompts(num_prompts=SIZE, num_easy=0, num_hard=0, places=tuple(range(SIZE - 1)), passed=(4,) * 19)
    way.learn(0, (all_pass,))
    # One normal prompt is left, and none is hard: the easy ones stand in.
    assert 100 + SIZE - 1 in way.places(1)
    assert len({*way.places(1)}) == 8
    assert way.drawn(1, {})[0].shares == {"easy": 0.95, "hard": 0.0, "normal": 0.05}


def test_a_source_that_is_smaller_than_its_share_comes_several_times() -> None:
    job = pools_spec()
    pool = MeasuredPool.of(job, Pool(places=range(3)))
    taken = pool.take(0, 7, seed="0", before=lambda iteration: 0)
    assert sorted(map(taken.count, range(3))) == [2, 2, 3]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("lag", LAGS)
def test_a_trainer_that_goes_on_draws_what_the_undisturbed_one_did(lag: int, mixed: bool) -> None:
    """It has read the whole chain, also what it does again and what followed from that."""
    job = pools_spec(lag, mixed=mixed)
    made = run(job, mixed=mixed)
    undisturbed = walk(job, mixed=mixed)
    expected = []
    for number in range(job.iterations):
        expected.append(undisturbed.places(number))
        undisturbed.learn(number, commit(job, undisturbed, number))
    successor = walk(job, mixed=mixed)
    for number, drawn in enumerate(made[:9]):
        successor.learn(number, drawn)
    first = 6
    for number in range(first, first + job.num_open):
        assert successor.places(number) == expected[number]
    for number in range(first, job.iterations - job.num_open):
        successor.learn(number, commit(job, successor, number))
        assert successor.places(number + job.num_open) == expected[number + job.num_open]


def test_what_is_replayed_with_other_rewards_leads_to_other_draws() -> None:
    job = pools_spec()
    made, way = run(job), walk(job)
    for number in range(4):
        way.learn(number, made[number])
    before = way.places(4)
    replayed = tuple(replace(one, passed=(0,) * len(one.passed)) for one in made[2])
    for number, drawn in ((2, replayed), (3, made[3])):
        way.learn(number, drawn)
    assert way.places(4) != before


@pytest.mark.parametrize("lag", LAGS)
def test_a_draw_needs_the_commit_that_opens_it_and_no_later_one(lag: int) -> None:
    job = pools_spec(lag)
    made, way = run(job), walk(job)
    for number in range(5):
        way.learn(number, made[number])
    due = 4 + job.num_open
    before = way.places(due)
    with pytest.raises(FenceViolation, match="iteration 5 is not committed"):
        way.places(due + 1)
    later = walk(job)
    for number, drawn in enumerate(made):
        later.learn(number, drawn)
    assert later.places(due) == before


def test_another_data_set_is_refused() -> None:
    drawn = run(pools_spec())[0][0]
    with pytest.raises(InvalidInput, match="has 20 training prompts, it had 21 in iteration 0"):
        walk(pools_spec()).learn(0, (replace(drawn, num_prompts=21),))


def chain(job: JobSpec, drawn: Sequence[tuple[DrawnPrompts, ...]], *, dead: int = -1) -> list[AuditRecord]:
    return [
        commit_record(
            number,
            {
                f"{number}/train/{i}": DIGEST
                for i in range(job.rollout.batches_per_iteration)
                if (number, i) != (dead, 1)
            },
            abandoned={f"{dead}/train/1": "died"} if number == dead else {},
            drawn=of_iteration,
        )
        for number, of_iteration in enumerate(drawn)
    ]


def gaps(job: JobSpec, records: Sequence[AuditRecord]) -> tuple[str, ...]:
    entries, previous = [], ""
    for record in records:
        linked = replace(record, previous=previous)
        previous = record_digest(linked)
        entries.append(AuditEntry(record=linked, digest=previous))
    return verify_run(entries, job, complete=True, digests_on_disk={}).gaps


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("lag", LAGS)
def test_the_audit_draws_again_and_finds_no_gap(lag: int, mixed: bool) -> None:
    job = pools_spec(lag, mixed=mixed, deterministic=False, rollout__on_failed_batch="abandon")
    records = chain(job, run(job, mixed=mixed, dead=4), dead=4)
    assert [gap for gap in gaps(job, records) if "draw" in gap] == []


IS_NOT = "is not what the pass rates before it give"
OTHER_GROUPS = "has pass rates of other groups than those that were trained"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda one: replace(one, places=(one.places[1], one.places[0], *one.places[2:])),
            f"iteration 6: the draw {IS_NOT}",
        ),
        (lambda one: replace(one, num_easy=one.num_easy + 1), f"iteration 6: the draw {IS_NOT}"),
        (lambda one: replace(one, passed=(-1, *one.passed[1:])), f"iteration 6: the draw {OTHER_GROUPS}"),
        (lambda one: replace(one, passed=(99, *one.passed[1:])), f"iteration 6: the draw {OTHER_GROUPS}"),
        (lambda one: replace(one, passed=one.passed[1:]), "iteration 6: its prompts can't be drawn again"),
        (lambda one: replace(one, places=(10**9, *one.places[1:])), f"iteration 6: the draw {IS_NOT}"),
        (lambda one: replace(one, num_prompts=SIZE - 1), "iteration 6: its prompts can't be drawn again"),
        # What passed is bound to the batches by nothing but the draws that follow.
        (
            lambda one: replace(one, passed=tuple(4 - passed for passed in one.passed)),
            f"iteration 7: the draw {IS_NOT}",
        ),
    ],
)
def test_the_audit_names_a_draw_that_was_changed(change: Any, found: str) -> None:
    job = pools_spec()
    made = run(job)
    made[6] = (change(made[6][0]),)
    first, *_ = gaps(job, chain(job, made))
    assert first.startswith(found)


def test_the_audit_names_a_record_without_its_draw_or_with_one_too_many() -> None:
    job = pools_spec()
    records = chain(job, run(job))
    without = [replace(record, drawn=()) if record.iteration == 3 else record for record in records]
    assert gaps(job, without)[0].startswith("iteration 3: it doesn't say what was drawn")
    plain = pools_spec(dataset={"type": "addition"})
    assert gaps(plain, records)[0].startswith("iteration 0: it doesn't say what was drawn")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hard_threshold": 0.75}, "hard_threshold: must be below easy_threshold"),
        ({"easy_fraction": 0.8}, "easy_fraction: and hard_fraction add up to more than 1"),
    ],
)
def test_pools_that_overlap_or_are_more_than_all_are_refused(changes: dict[str, float], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        check_spec(pools_spec(dataset={"type": "addition", "difficulty_pools": POOLS | changes}))


ROWS: dict[str, Any] = {
    "type": "jsonl",
    "train_path": "rows.jsonl",
    "difficulty_pools": {},
    "curriculum": {"column": "level", "iterations": 3},
}


TWO_SOURCES: dict[str, Any] = {
    "type": "mixture",
    "sources": [{"name": name, "dataset": {"type": "addition"}} for name in "ab"],
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"rollout__max_resamples": 1},
            r"rollout.max_resamples: drops groups that difficulty_pools needs",
        ),
        ({"mixed": True, "rollout__max_resamples": 1}, "that difficulty_pools needs"),
        (
            {"lag": 2, "iterations": 3},
            "difficulty_pools: has no effect: all 3 iterations are opened before the first one is measured",
        ),
        ({"iterations": 1}, "has no effect: all 1 iterations are opened"),
        ({"dataset": ROWS}, "curriculum: and difficulty_pools both choose which prompts are drawn"),
        (
            {"algorithm": {"loss": "sft", "advantage": "none"}, "rollout__group_size": 1, "reward": {}},
            'dataset.difficulty_pools: has no effect with algorithm.loss = "sft"',
        ),
        ({"dataset": TWO_SOURCES | {"difficulty_pools": {}}}, "unknown field `difficulty_pools`"),
    ],
)
def test_what_contradicts_difficulty_pools_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        check_spec(pools_spec(**changes))


def test_the_shortest_job_with_a_measured_draw_is_taken() -> None:
    assert pools_spec(2, iterations=4).num_open == 3
