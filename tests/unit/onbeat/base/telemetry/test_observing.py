"""A number that only observes is absent where it can't be had; it ends nothing."""

from __future__ import annotations

import pytest

from contracts.errors import FencedOff
from onbeat.base.telemetry.observing import MISSED, observed
from tests.any_exception import ALL


@pytest.mark.parametrize("kind", [kind for kind, make in ALL.items() if isinstance(make(), Exception)])
def test_whatever_an_observation_raises_its_number_is_absent_said_once_and_counted(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    what = f"the cost of a batch, {kind}"

    def observe() -> float:
        raise ALL[kind]()

    assert [observed(what, observe) for _ in range(3)] == [None] * 3
    assert MISSED[what] == 3
    assert len([record for record in caplog.records if what in record.getMessage()]) == 1


def test_an_observation_that_goes_well_is_what_it_returns() -> None:
    assert observed("the answer", lambda: 42) == 42
    assert MISSED["the answer"] == 0


def test_an_error_of_ours_is_no_lost_number() -> None:
    """It says that Redis, a lease or the job is at its end."""

    def observe() -> float:
        raise FencedOff("epoch 3 is over")

    with pytest.raises(FencedOff):
        observed("the trainer's metrics", observe)
