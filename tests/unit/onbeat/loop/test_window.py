"""The window: which iterations are opened by a start and by a commit, who may answer them, and what is let go."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from broker.openings import IterationOpening
from contracts.schedule import Schedule, ScheduleName
from contracts.versions import WeightManifest
from onbeat.data.prompts.prompt_batches import PromptBatches
from onbeat.loop.window import Window
from tests.builders import manifest


def digest_of(version: int) -> str:
    return f"{version:x}" * 64


class TwoBatches(PromptBatches):
    """Two training batches an iteration; iterations 0, 2, 4 … and the last one are evaluated by one batch each."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def training(self, iteration: int, manifest: WeightManifest) -> tuple[Any, ...]:
        number = manifest.policy_version
        return (f"{iteration}/train by {number}",) * 2 if iteration < self.iterations else ()

    def num_evaluation(self, iteration: int) -> int:
        return int(iteration % 2 == 0)

    def evaluation(self, iteration: int, manifest: WeightManifest) -> tuple[Any, ...]:
        return (f"{iteration}/evaluation by {manifest.policy_version}",) * self.num_evaluation(iteration)


class Opened:
    """An IterationOpening, of batches that are words."""

    def __init__(self, opening: IterationOpening | None) -> None:
        assert opening is not None
        self.number, self.later = opening.iteration, opening.num_later
        self.versions = (opening.oldest_version, opening.newest_version)
        self.batches: list[Any] = list(opening.batches)


def window(name: ScheduleName, lag: int, *, iterations: int = 6, versions: range = range(1)) -> Window:
    made = Window(Schedule(name, lag), TwoBatches(iterations), last_iteration=iterations)
    for version in versions:
        made.add(manifest(version, digest_of(version)))
    return made


def test_without_a_lag_one_iteration_is_open_and_its_evaluation_goes_out_with_it() -> None:
    one = window("periodic", 0)
    (first,) = map(Opened, one.begin(0))
    assert first.batches == ["0/train by 0", "0/train by 0", "0/evaluation by 0"]
    assert (first.versions, first.later) == ((0, 0), 0)
    one.add(manifest(1, digest_of(1)))
    assert Opened(one.opened_by(0)).versions == (1, 1)
    asked = one.turn_to(1)
    assert (asked.samplers, asked.weights_digest) == ({1: digest_of(1)}, digest_of(1))
    assert [one.policy_version for one in one.manifests] == [1]


@pytest.mark.parametrize(("name", "newest"), [("delayed", [0, 0, 0]), ("bounded", [0, 1, 2])])
def test_a_start_opens_the_whole_window_and_only_evaluates_the_version_that_is_there(
    name: ScheduleName, newest: list[int]
) -> None:
    openings = [Opened(one) for one in window(name, 2).begin(0)]
    assert [one.number for one in openings] == [0, 1, 2]
    assert [one.versions for one in openings] == [(0, last) for last in newest]
    assert [one.batches[-1] for one in openings] == ["0/evaluation by 0", "1/train by 0", "2/train by 0"]
    assert [one.later for one in openings] == [0, 0, 1]


def test_a_commit_opens_the_iteration_that_its_version_is_the_oldest_of_and_evaluates_the_next() -> None:
    lagging = window("delayed", 2)
    lagging.begin(0)
    lagging.add(manifest(1, digest_of(1)))
    opened = Opened(lagging.opened_by(0))
    assert (opened.number, opened.versions, opened.batches) == (3, (1, 1), ["3/train by 1"] * 2)
    assert lagging.evaluation(1) == ()
    lagging.turn_to(1)
    lagging.add(manifest(2, digest_of(2)))
    lagging.opened_by(1)
    assert lagging.evaluation(2) == ("2/evaluation by 2",)
    asked = lagging.turn_to(2)
    assert asked.batches == ("2/train by 0", "2/train by 0", "2/evaluation by 2")
    assert (asked.samplers, asked.weights_digest) == ({0: digest_of(0)}, digest_of(2))
    assert [number for number, _ in lagging.ahead_of(2)] == [3, 4]


def test_bounded_lets_every_version_from_the_oldest_to_its_own_sample_an_iteration() -> None:
    bounded = window("bounded", 2, versions=range(1, 4))
    bounded.begin(3)
    assert bounded.turn_to(3).samplers == {version: digest_of(version) for version in (1, 2, 3)}


def test_the_last_iterations_open_nothing_and_one_that_only_evaluates_has_no_batch_at_first() -> None:
    lagging = window("delayed", 2, versions=range(2, 5))
    last = Opened(lagging.begin(4)[-1])
    assert (last.number, last.batches, last.later) == (6, [], 1)
    lagging.add(manifest(5, digest_of(5)))
    assert lagging.opened_by(4) is None
    lagging.turn_to(5)
    lagging.add(manifest(6, digest_of(6)))
    assert lagging.turn_to(6).batches == ("6/evaluation by 6",)


def test_a_turn_lets_go_what_is_older_than_the_window_needs() -> None:
    lagging = window("delayed", 2, versions=range(1, 4))
    lagging.begin(3)
    lagging.turn_to(3)
    assert lagging.digests == {version: digest_of(version) for version in (1, 2, 3)}
    lagging.add(manifest(4, digest_of(4)))
    lagging.opened_by(3)
    # The checkpoint of the commit comes before the turn, and takes 2 and 3 with it.
    assert (list(lagging.older_than(4)), lagging.oldest_version(3)) == ([2, 3], 1)
    lagging.turn_to(4)
    assert list(lagging.digests) == [2, 3, 4]
    assert [number for number, _ in lagging.ahead_of(3)] == [4, 5, 6]


def test_a_version_that_is_published_anew_takes_the_place_of_what_it_was() -> None:
    one = window("periodic", 0)
    one.add(replace(manifest(0, digest_of(0)), transport="redis"))
    assert [made.transport for made in one.manifests] == ["redis"]
