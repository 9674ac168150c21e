"""What the trainer sees of the live generators."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec.structs import replace

from broker.presence import Presence
from contracts.errors import DeadlineExceeded, FencedOff
from contracts.monitor import GeneratorSeen, ServiceSeen
from onbeat.loop.watches import LOADS_FOR_S, LOOK_EVERY_S, MOST_NAMED, TURN_PATIENCE_S, GeneratorWatch
from tests.builders import job_spec


class Board(Presence):
    """Generators that a test names, and a clock; no server."""

    def __init__(self, *infos: dict[str, Any]) -> None:
        self.infos = list(infos)
        self.now_s = 0.0

    def live(self) -> list[GeneratorSeen]:
        return [GeneratorSeen(worker_id=f"g{number}", **info) for number, info in enumerate(self.infos)]

    def watch(
        self, *, deterministic: bool = True, deadline_s: float = 60.0, dependency_s: float = 1e9, **options: Any
    ) -> GeneratorWatch:
        spec = job_spec(deterministic=deterministic)
        timeouts = replace(spec.timeouts, no_generator_s=deadline_s, dependency_s=dependency_s)
        spec = replace(spec, timeouts=timeouts)
        return GeneratorWatch(presence=self, spec=spec, job_id="job", clock=lambda: self.now_s, **options)

    def looks(self, watch: GeneratorWatch, *seen: list[dict[str, Any]]) -> list[frozenset[str]]:
        """What each look of the watch tells, while it sees these generators."""
        told = []
        for infos in seen:
            self.infos = infos
            told.append(watch.check())
            self.now_s += LOOK_EVERY_S
        return told


def test_the_weights_that_live_generators_load_and_refuse_are_told_apart() -> None:
    board = Board(
        {"loading_weights": ("job/weights/v000002",)},
        {"loading_weights": ("job/weights/v000003",), "rejected_weights": "job/weights/v000003"},
        {},
    )
    watch = board.watch()
    assert watch.loading(before=4) == {"job/weights/v000002", "job/weights/v000003"}
    assert watch.loading(before=3) == {"job/weights/v000002"}
    assert watch.check() == {"job/weights/v000003"}


def test_a_version_that_a_generator_names_for_ever_is_given_up_and_a_later_one_has_its_own_time() -> None:
    second, third = "job/weights/v000002", "job/weights/v000003"
    board = Board({"loading_weights": (second, third, "elsewhere", "../v1", "v-1", f"v{9999 * '7'}")})
    watch = board.watch()
    assert watch.loading(before=2) == frozenset()
    board.now_s += 10 * LOADS_FOR_S
    assert watch.loading(before=3) == {second}, "its time begins when the window has left it"
    board.now_s += 0.5 * LOADS_FOR_S
    assert watch.loading(before=4) == {second, third}
    board.now_s += 0.5 * LOADS_FOR_S
    assert watch.loading(before=5) == {third}
    assert watch.loading(before=5) == {third}, "naming it again brings it no more time"
    board.now_s += 0.5 * LOADS_FOR_S
    assert watch.loading(before=5) == frozenset()


def test_a_job_without_a_generator_ends_at_its_deadline_and_one_that_comes_back_starts_it_again() -> None:
    board = Board()
    watch = board.watch(deadline_s=3 * LOOK_EVERY_S)
    board.looks(watch, [], [], [{}], [], [], [])
    with pytest.raises(DeadlineExceeded, match="a live generator"):
        watch.check()


def test_a_deterministic_job_waits_for_a_generator_that_serves_such_jobs_and_says_so() -> None:
    vllm, plain = {"not_reproducible": "vllm"}, {"not_reproducible": ""}
    board = Board(vllm, plain)
    watch = board.watch(deadline_s=2 * LOOK_EVERY_S)
    board.looks(watch, [vllm, plain], [vllm], [vllm])
    with pytest.raises(DeadlineExceeded, match=r"a live generator for a deterministic job.*deterministic = false"):
        watch.check()


def test_a_deterministic_job_whose_kind_of_engine_is_gone_ends_with_an_error_that_names_both_kinds() -> None:
    other = {"wrong_engine": ("another", "job"), "engine": "vllm on H100"}
    board = Board({"wrong_engine": ("another",)}, other)
    watch = board.watch(deadline_s=2 * LOOK_EVERY_S, kind=lambda: "vllm on H200")
    seen = ([{"wrong_engine": ("another",)}, other], [other], [{"not_reproducible": "vllm"}, other])
    assert board.looks(watch, *seen) == [frozenset()] * 3
    with pytest.raises(DeadlineExceeded, match=r"this job \(vllm on H200\); those that live have \(vllm on H100\)"):
        watch.check()


def test_any_generator_will_do_for_a_job_that_is_not_deterministic() -> None:
    board = Board({"not_reproducible": "vllm"})
    watch = board.watch(deadline_s=0.0, deterministic=False)
    assert board.looks(watch, *[board.infos] * 3) == [frozenset()] * 3


def test_a_colocated_trainer_has_its_turn_once_no_live_generator_is_awake_for_the_job() -> None:
    board = Board({"awake_for": "job"}, {"awake_for": "another"}, {"awake_for": "job"})
    watch = board.watch(sleep=lambda _: None)
    looks: list[int] = []

    def check() -> None:
        looks.append(len(board.infos))
        board.infos[(0, 2)[len(looks) - 1]]["awake_for"] = ""

    watch.wait_for_turn("job", check)
    assert looks == [3, 3]


def test_a_generator_that_hangs_in_its_turn_holds_the_trainer_up_for_a_moment_only(
    caplog: pytest.LogCaptureFixture,
) -> None:

    board = Board({"awake_for": "job"})

    def sleep(seconds: float) -> None:
        board.now_s += seconds

    watch = board.watch(sleep=sleep)
    watch.wait_for_turn("job", lambda: None)
    assert board.now_s == pytest.approx(TURN_PATIENCE_S, abs=0.1)
    assert "g0 may still hold memory" in caplog.text


def test_a_wait_for_the_turn_ends_with_the_trainer_s_lease() -> None:
    board = Board({"awake_for": "job"})
    watch = board.watch(sleep=lambda _: None)

    def fenced_off() -> None:
        raise FencedOff("epoch 1 is over")

    with pytest.raises(FencedOff):
        watch.wait_for_turn("job", fenced_off)


AWAY = {"services": (ServiceSeen(name="reward service", away_s=4.0, why="at http://r: no answer: ConnectError"),)}


def test_a_service_that_no_generator_reaches_ends_the_job_at_its_deadline_by_its_name() -> None:
    board = Board(AWAY, AWAY)
    watch = board.watch(deadline_s=1000.0, dependency_s=2 * LOOK_EVERY_S)
    board.looks(watch, [AWAY, AWAY], [AWAY, AWAY], [AWAY, {}], [AWAY, AWAY], [AWAY, AWAY])
    with pytest.raises(DeadlineExceeded, match=r"the reward service at http://r: no answer: Conn.*dependency_s"):
        watch.check()


@pytest.mark.parametrize("deterministic", [True, False])
def test_generators_that_leave_the_job_alone_count_as_absent_and_their_reason_ends_it(deterministic: bool) -> None:
    reasons = {"other": "why", "job": "version 22 is not at /mnt"}
    alone = {"leaves_alone": reasons, "rejected_weights": "job/weights/v000022"}
    board = Board(alone, alone)
    watch = board.watch(deadline_s=2 * LOOK_EVERY_S, deterministic=deterministic)
    told = board.looks(watch, [alone, alone], [alone, {}], [alone, alone], [alone, alone])
    assert told[0] == {"job/weights/v000022"}, "its trainer looks after the version all the same"
    with pytest.raises(DeadlineExceeded, match="g0 doesn't serve it: version 22 is not at /mnt") as late:
        watch.check()
    assert "(fix that, and `onbeat resume` goes on;" in str(late.value)
    assert "start one" not in str(late.value), "another generator would leave it alone for the same reason"


def test_the_cure_is_of_what_is_missing_at_the_deadline_not_of_what_was_missing_at_first() -> None:
    """A generator is killed, and the one that replaces it finds that the model's folder has changed."""
    alone = {"leaves_alone": {"job": "generation_config.json has changed (put it back)"}}
    board = Board()
    watch = board.watch(deadline_s=2 * LOOK_EVERY_S)
    board.looks(watch, [], [alone])
    with pytest.raises(DeadlineExceeded, match=r"has changed \(put it back\) \(fix that, and `onbeat resume` goes on;"):
        watch.check()
    board = Board()
    watch = board.watch(deadline_s=2 * LOOK_EVERY_S)
    board.looks(watch, [alone], [])
    with pytest.raises(DeadlineExceeded, match=r"for a live generator \(start one with `python -m producer`"):
        watch.check()


@pytest.mark.parametrize(
    ("generators", "unfit"),
    [
        ([("v", "lacks a")], {"v": "g0: lacks a"}),
        ([("v", "lacks a"), ("v", "lacks a")], {"v": "g0: lacks a"}),
        ([("v", "lacks a"), ("v", "")], {}),
        ([("v", "lacks a"), ("", "")], {}),
        ([("v", "lacks a"), ("w", "lacks a")], {}),
        ([("v", "")], {}),
        ([], {}),
    ],
)
def test_a_version_is_unfit_once_each_generator_that_may_serve_the_job_refuses_its_tensors(
    generators: list[tuple[str, str]], unfit: dict[str, str]
) -> None:
    infos = [
        {"rejected_weights": folder, "unfit_weights": why, "leaves_alone": {"job": why}} for folder, why in generators
    ]
    others = [{"wrong_engine": ("job",)}, {"not_reproducible": "vllm"}]
    board = Board(*infos, *others)
    watch = board.watch()
    board.looks(watch, board.infos)
    assert watch.unfit == unfit


def test_a_version_that_stays_refused_is_looked_at_ever_more_seldom() -> None:
    board = Board({"rejected_weights": "v"})
    watch = board.watch(deadline_s=1e9)
    told = [number * LOOK_EVERY_S for number, one in enumerate(board.looks(watch, *[board.infos] * 200)) if one]
    pauses = [after - before for before, after in itertools.pairwise(told)]
    assert pauses[:6] == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    assert set(pauses[6:]) == {64.0}
    assert board.looks(watch, [{}], [{"rejected_weights": "v"}])[1] == {"v"}, "another refusal of it is told at once"


def test_generators_that_come_and_go_are_told_once_but_for_those_of_the_first_look() -> None:
    board = Board({}, {})
    watch = board.watch()
    board.looks(watch, board.infos)
    assert watch.take_changes() == []
    for infos, came, gone in (([{}], (), ("g1",)), ([{}], (), ()), ([{}, {}, {}], ("g1", "g2"), ()), ([], (), 3)):
        board.looks(watch, infos)
        changes = watch.take_changes()
        assert watch.take_changes() == []
        if came or gone:
            (change,) = changes
            assert change.came == came
            assert change.gone == (("g0", "g1", "g2") if gone == 3 else gone)
            assert change.num_live == len(infos)
        else:
            assert changes == []


def test_an_event_names_a_bounded_number_of_generators() -> None:
    board = Board(*[{} for _ in range(2 * MOST_NAMED)])
    watch = board.watch()
    board.looks(watch, board.infos, [])
    (change,) = watch.take_changes()
    assert (len(change.gone), change.num_live) == (MOST_NAMED, 0)
