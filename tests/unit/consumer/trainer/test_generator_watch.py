"""What the trainer sees of the live generators."""

from __future__ import annotations

import pytest

from broker.presence import LOADING_WEIGHTS, NOT_REPRODUCIBLE, REJECTED_WEIGHTS, GeneratorInfo, Presence
from consumer.trainer.generator_watch import LOOK_EVERY_S, GeneratorWatch
from contracts.errors import DeadlineExceeded


class Board(Presence):
    """Generators that a test names; no server."""

    def __init__(self, *infos: dict[str, str]) -> None:
        self.infos = list(infos)

    def live(self) -> list[GeneratorInfo]:
        return [
            GeneratorInfo(generator_id=f"g{number}", seen_s=0.0, info=info) for number, info in enumerate(self.infos)
        ]


def test_the_weights_that_live_generators_load_and_refuse_are_told_apart() -> None:
    board = Board(
        {LOADING_WEIGHTS: "job/weights/v000002", REJECTED_WEIGHTS: ""},
        {LOADING_WEIGHTS: "job/weights/v000003", REJECTED_WEIGHTS: "job/weights/v000003"},
        {},
    )
    watch = GeneratorWatch(board, deadline_s=60.0, deterministic=True)
    assert watch.loading() == {"job/weights/v000002", "job/weights/v000003"}
    assert watch.check() == {"job/weights/v000003"}


def test_a_job_without_a_generator_ends_at_its_deadline_and_one_that_comes_back_starts_it_again() -> None:
    now_s = 0.0
    board = Board()
    watch = GeneratorWatch(board, deadline_s=3 * LOOK_EVERY_S, deterministic=True, clock=lambda: now_s)
    for infos in ([], [], [{}], [], [], []):
        board.infos = infos
        watch.check()
        now_s += LOOK_EVERY_S
    with pytest.raises(DeadlineExceeded, match="a live generator"):
        watch.check()


def test_a_deterministic_job_waits_for_a_generator_that_serves_such_jobs_and_says_so() -> None:
    now_s = 0.0
    vllm, plain = {NOT_REPRODUCIBLE: "vllm"}, {NOT_REPRODUCIBLE: ""}
    board = Board(vllm, plain)
    watch = GeneratorWatch(board, deadline_s=2 * LOOK_EVERY_S, deterministic=True, clock=lambda: now_s)
    for infos in ([vllm, plain], [vllm], [vllm]):
        board.infos = infos
        watch.check()
        now_s += LOOK_EVERY_S
    with pytest.raises(DeadlineExceeded, match=r"a live generator for a deterministic job.*deterministic = false"):
        watch.check()


def test_any_generator_will_do_for_a_job_that_is_not_deterministic() -> None:
    now_s = 0.0
    board = Board({NOT_REPRODUCIBLE: "vllm"})
    watch = GeneratorWatch(board, deadline_s=0.0, deterministic=False, clock=lambda: now_s)
    for _ in range(3):
        assert watch.check() == frozenset()
        now_s += LOOK_EVERY_S
