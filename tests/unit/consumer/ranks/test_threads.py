"""Several batches at the same time in one process: the bits of one after the other, and what goes on beside what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep, Trained
from consumer.ranks import threads
from consumer.ranks.assembly import make_ranks
from consumer.ranks.base import Ranks
from consumer.ranks.dry_pass import longest_row
from consumer.ranks.threads import (
    ONE_BY_ONE,
    Passes,
    Room,
    ThreadedRank,
    input_tokens,
    passes_at_once,
    with_threads,
)
from contracts.errors import ContractViolation, DeadlineExceeded
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from tests.builders import batch_of, job_spec, rollout, rollout_batch, tiny_model_folder
from tests.trajectories import ENVIRONMENT, played_batch

DEADLINE_S = 60.0
BATCHES = 5
BOTH = Passes(while_sampled=2, then=2)
KL: dict[str, Any] = {"algorithm__kl_coefficient": 0.1}
UPDATES: dict[str, Any] = {"algorithm__updates_per_iteration": 3, "algorithm__clip_low": 0.01}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "updates, KL": UPDATES | KL,
    "mini-batches, KL": {"algorithm__mini_batches": BATCHES, "algorithm__updates_per_iteration": 2} | KL,
    "split, KL in the reward": {"trainer__max_tokens_per_micro_batch": 24}
    | KL
    | {"algorithm__kl_placement": "reward", "algorithm__kl_estimator": "k1"},
    "padded, bfloat16, recomputed": {
        "trainer__packing": "padded",
        "model__dtype": "bfloat16",
        "trainer__gradient_checkpointing": True,
    },
    "trajectories, credit by turn, updates": {"environment": ENVIRONMENT, "algorithm__credit": "turn"} | UPDATES,
    "late deviation, untied": {"algorithm__advantage": "reinforce++_baseline", "model__path": "llama"},
    "a critic": {"algorithm": {"advantage": "gae", "updates_per_iteration": 2, "value_clip": 0.01}},
}


def spec_of(**changes: Any) -> JobSpec:
    return job_spec(**({"optimizer__learning_rate": 1e-3, "rollout__batches_per_iteration": BATCHES} | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tiny_model_folder(path)
    tiny_model_folder(path, "llama", tied=False)
    return path


def learner_of(folder: Path, **changes: Any) -> Learner:
    return make_learner(StackSettings(model_root=str(folder)), spec_of(**changes))


def threaded(learner: Learner, passes: Passes) -> ThreadedRank:
    ranks = with_threads(learner, passes)
    assert isinstance(ranks, ThreadedRank)
    return ranks


def batches(iteration: int, *, plays: bool = False) -> list[RolloutBatch]:
    make = played_batch if plays else rollout_batch
    return [
        make(seed=BATCHES * iteration + number, batch_id=f"{iteration}/train/{number}") for number in range(BATCHES)
    ]


def wait_for(ranks: Ranks, number: int) -> list[Trained]:
    trained: list[Trained] = []
    while len(trained) < number:
        trained += ranks.train(wait_s=DEADLINE_S)
    return trained


def train_all(ranks: Ranks, batches: Sequence[RolloutBatch]) -> list[Trained]:
    """Hands the batches over, and waits until all are trained."""
    trained = [one for batch in batches for one in ranks.train(batch)]
    return trained + wait_for(ranks, len(batches) - len(trained))


def weights_after_training(ranks: Ranks, *, passes_dry: bool = False) -> dict[str, torch.Tensor]:
    """Two iterations; the second one is trained with weights that the first has moved.

    passes_dry: before each of them the largest micro-batch goes through the model.
    """
    algorithm = ranks.learner.spec.algorithm
    parts = range(algorithm.num_mini_batches)
    steps = [(update, part) for update in range(algorithm.updates_per_iteration) for part in parts]
    for iteration in range(2):
        if passes_dry:
            passed = ranks.dry_pass(longest_row(ranks.learner.spec, longest_prompt=4, context_tokens=64))
            assert passed.peak_bytes > 0
        train_all(ranks, batches(iteration, plays=ranks.learner.spec.environment is not None))
        for update, part in steps:
            if update or part:
                ranks.train_again(lambda: None, part)
            is_last = (update, part) == steps[-1]
            ranks.step(OptimizerStep(iteration=iteration, divisor=3.0, learning_rate=1e-3, is_last=is_last))
    ranks.close()
    return ranks.learner.policy.state_tensors()


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_threads_make_the_weights_of_one_bit_for_bit_with_dry_passes_between(variant: str, folder: Path) -> None:
    expected = weights_after_training(Ranks(learner_of(folder, **VARIANTS[variant])))
    actual = weights_after_training(threaded(learner_of(folder, **VARIANTS[variant]), BOTH), passes_dry=True)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


def test_a_learner_beside_another_shares_the_weights_and_none_of_its_gradients(folder: Path) -> None:
    learner = learner_of(folder)
    beside = learner.beside(1)
    own, others = learner.policy.trained_parameters(), beside.policy.trained_parameters()
    assert own.keys() == others.keys()
    for name, parameter in own.items():
        assert others[name] is not parameter
        assert others[name].data_ptr() == parameter.data_ptr()
    model: Any = beside.policy.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # a tied head stays tied
    assert beside.train(batches(0)[0]).rank == 1
    assert all(parameter.grad is None for parameter in (*own.values(), *others.values()))
    assert learner.accumulator.sums is beside.accumulator.sums
    assert learner.accumulator.sums is not None
    assert bool(learner.accumulator.sums.any())


class Gate:
    """Passes that end when they are let go."""

    def __init__(self) -> None:
        self._train = Learner.train
        self.begun: list[str] = []
        self.num_begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def train(self, learner: Learner, batch: RolloutBatch) -> Trained:
        self.begun.append(batch.batch_id)
        self.num_begun.release()
        assert self.may_end.acquire(timeout=DEADLINE_S)
        return self._train(learner, batch)


@pytest.fixture
def gated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ThreadedRank, Gate]]:
    def make(passes: Passes, **changes: Any) -> tuple[ThreadedRank, Gate]:
        gate = Gate()
        monkeypatch.setattr(Learner, "train", lambda learner, batch: gate.train(learner, batch))
        return threaded(learner_of(folder, **changes), passes), gate

    return make


def test_a_second_batch_begins_once_everything_is_sampled_and_not_before(
    gated: Callable[..., tuple[ThreadedRank, Gate]],
) -> None:
    ranks, gate = gated(Passes(while_sampled=1, then=2))
    first, second, third = batches(0)[:3]
    for batch in (first, second, third):
        ranks.train(batch)
    assert gate.num_begun.acquire(timeout=DEADLINE_S)
    gate.may_end.release()
    wait_for(ranks, 1)
    # One has ended, and one has begun since: never two at once.
    assert gate.num_begun.acquire(timeout=DEADLINE_S)
    assert not gate.num_begun.acquire(timeout=0)
    ranks.train(is_sampled=True)
    assert gate.num_begun.acquire(timeout=DEADLINE_S)
    gate.may_end.release(2)
    wait_for(ranks, 2)
    ranks.step(OptimizerStep(iteration=0, divisor=3.0, learning_rate=1e-3, is_last=True))
    # The next iteration is being sampled.
    for batch in batches(1)[:2]:
        ranks.train(batch)
    assert gate.num_begun.acquire(timeout=DEADLINE_S)
    gate.may_end.release()
    wait_for(ranks, 1)
    assert gate.num_begun.acquire(timeout=DEADLINE_S)
    gate.may_end.release()
    wait_for(ranks, 1)
    ranks.close()


def test_batches_go_beside_each_other_while_their_tokens_are_those_of_one_pass() -> None:
    room = Room(batches=3, tokens=100)
    entered, left = threading.Event(), threading.Event()

    def enter() -> None:
        with room.taken(60):
            entered.set()
        left.set()

    with room.taken(50):
        other = threading.Thread(target=enter)
        other.start()
        with room.taken(50):
            pass
        assert not entered.is_set()
    assert left.wait(DEADLINE_S)
    other.join(DEADLINE_S)
    # One that is larger than all of it goes through in passes of that size, by itself.
    with room.taken(10_000):
        assert room._sizes == [100]


def test_an_error_of_a_thread_is_raised_where_its_batch_was_handed_over(folder: Path) -> None:
    ranks = threaded(learner_of(folder), BOTH)
    ranks.train(batch_of([([5], [rollout([1], 1.0), rollout([10_000], 0.0)])]))
    with pytest.raises(ContractViolation, match="has a token outside"):
        wait_for(ranks, 1)
    ranks.close()


def test_a_further_update_that_hangs_ends_after_the_time_of_an_iteration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = threaded(learner_of(folder, timeouts__iteration_s=1.0, **UPDATES), BOTH)
    train_all(ranks, batches(0))
    let_go = threading.Event()
    monkeypatch.setattr(Learner, "train_kept", lambda *_: let_go.wait(DEADLINE_S))
    with pytest.raises(DeadlineExceeded, match=r"for the passes of 5 batches of a further update"):
        ranks.train_again(lambda: None)
    let_go.set()
    ranks.close()


def test_a_trainer_that_ends_begins_no_batch_that_a_thread_has_taken_up_and_that_waits_for_room(
    gated: Callable[..., tuple[ThreadedRank, Gate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, gate = gated(Passes(while_sampled=1, then=2))
    for batch in batches(0)[:2]:
        ranks.train(batch)
    assert gate.num_begun.acquire(timeout=DEADLINE_S)
    first = ranks._threads[0]
    join = first.join

    def end_the_first_batch(timeout: float) -> None:
        gate.may_end.release(2)
        join(timeout)

    monkeypatch.setattr(first, "join", end_the_first_batch)
    ranks.close()
    assert len(gate.begun) == 1
    assert not any(thread.is_alive() for thread in ranks._threads)


def test_a_further_update_has_every_thread_although_no_batch_was_told_to_be_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = threaded(learner_of(folder, **UPDATES), Passes(while_sampled=1, then=2))
    for batch in batches(0)[:2]:
        train_all(ranks, [batch])
    meeting, train_kept = threading.Barrier(2), Learner.train_kept

    def met(learner: Learner, one: Any) -> Trained:
        meeting.wait(DEADLINE_S / 6)
        return train_kept(learner, one)

    monkeypatch.setattr(Learner, "train_kept", met)
    assert len(ranks.train_again(lambda: None)) == 2
    ranks.close()


@pytest.mark.parametrize(
    ("settings", "changes", "expected"),
    [
        ({}, {}, Passes(while_sampled=1, then=2)),
        ({"max_passes": 1}, {}, ONE_BY_ONE),
        ({"max_passes": 3}, {}, Passes(while_sampled=3, then=3)),
        ({"max_passes": 64}, {}, Passes(while_sampled=BATCHES, then=BATCHES)),
        ({"max_passes": 3, "threads": 4}, {}, Passes(while_sampled=3, then=3)),
        ({"threads": 2}, {}, ONE_BY_ONE),
        ({"device": "cuda"}, {}, ONE_BY_ONE),
        ({}, {"trainer__lora": {"rank": 2}}, ONE_BY_ONE),
        ({}, {"trainer__accumulation": "float", "deterministic": False}, ONE_BY_ONE),
        ({"max_passes": 3}, {"algorithm__loss": {"type": "plugin", "entry_point": "mine"}}, ONE_BY_ONE),
        ({}, {"rollout__batches_per_iteration": 1}, ONE_BY_ONE),
    ],
)
def test_how_many_batches_a_trainer_takes_at_once(
    settings: dict[str, Any], changes: dict[str, Any], expected: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 16)
    assert passes_at_once(StackSettings(**settings), spec_of(**changes)) == expected
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    if not settings:
        assert passes_at_once(StackSettings(), spec_of(**changes)) == ONE_BY_ONE


def test_a_model_that_fills_the_memory_gets_no_second_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StackSettings(model_root=str(folder), max_passes=2)
    ranks = make_ranks(settings, spec_of())
    assert isinstance(ranks, ThreadedRank)
    ranks.close()
    monkeypatch.setattr(threads, "memory_bytes", lambda: 1 << 16)
    assert type(make_ranks(settings, spec_of())) is Ranks


def test_a_model_that_cannot_be_copied_is_trained_one_batch_at_a_time(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = learner_of(folder)
    model: Any = learner.policy.model
    model.held = threading.Lock()
    assert type(with_threads(learner, BOTH)) is Ranks
    assert "one batch is trained at a time: Qwen3ForCausalLM can't be copied" in caplog.text


def test_the_tokens_of_a_batch_hold_its_padding() -> None:
    batch = batch_of([([5, 6, 7], [rollout([1, 2], 1.0), rollout([3], 0.0)]), ([5], [rollout([1], 1.0)] * 2)])
    assert input_tokens(batch, packing="shared_prompt") == 3 + 1 + 5
    assert input_tokens(batch, packing="padded") == 4 * (3 + 2)
