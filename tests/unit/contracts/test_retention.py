"""Ages of what stays of a job: the spec's, else the stack's, under the ceilings of that, each after the one before."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from contracts.errors import InvalidInput
from contracts.settings import StackSettings, settings_from
from contracts.spec.retention import KeptFor, RecordingSpec, RetentionSpec, check_retention, kept_for
from tests.builders import job_spec
from tests.refusals import refusal_of

LONG = 36500.0


@pytest.mark.parametrize(
    ("asked", "settings", "ages"),
    [
        (UNSET, {}, (30.0, LONG, LONG)),
        (RetentionSpec(), {}, (30.0, LONG, LONG)),
        (RetentionSpec(keys_days=2.0, files_days=3.0, result_days=4.0), {}, (2.0, 3.0, 4.0)),
        (RetentionSpec(keys_days=2.0), {"keep_files_days": 5.0}, (2.0, 5.0, LONG)),
        (UNSET, {"keep_files_days": 5.0}, (30.0, 30.0, LONG)),
        (RetentionSpec(keys_days=90.0), {"max_keys_days": 10.0, "max_result_days": 40.0}, (10.0, LONG, LONG)),
        (UNSET, {"max_keys_days": 10.0, "max_files_days": 20.0, "max_result_days": 40.0}, (10.0, 20.0, 40.0)),
    ],
)
def test_ages_follow_one_another_and_keep_to_the_ceilings(
    asked: RetentionSpec, settings: dict[str, float], ages: tuple[float, float, float]
) -> None:
    assert kept_for(asked, StackSettings(**settings)) == KeptFor(*ages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "field", "problem"),
    [
        (RetentionSpec(files_days=2.0), "files_days", "2 days are over before what it follows, after 30"),
        (RetentionSpec(keys_days=3.0, files_days=2.0), "files_days", "after 3"),
        (RetentionSpec(keys_days=1.0, files_days=9.0, result_days=8.0), "result_days", "after 9"),
        (RetentionSpec(keys_days=51.0), "keys_days", "this stack keeps that for 50 days at most"),
        (RetentionSpec(keys_days=1.0, files_days=61.0), "files_days", "for 60 days at most"),
    ],
)
def test_an_age_that_would_not_hold_is_refused_by_its_name(asked: RetentionSpec, field: str, problem: str) -> None:
    settings = StackSettings(max_keys_days=50.0, max_files_days=60.0)
    with refusal_of(f"retention.{field}", match=problem):
        check_retention(asked, settings)


def test_ages_that_hold_are_taken() -> None:
    check_retention(UNSET, StackSettings())
    check_retention(RetentionSpec(keys_days=1.0, files_days=1.0, result_days=1.0), StackSettings())


@pytest.mark.parametrize("evaluations", [True, False])
def test_an_evaluation_is_recorded_by_its_own_setting_whatever_the_share_of_training(evaluations: bool) -> None:
    recording = RecordingSpec(share=1e-9 if evaluations else 1.0, evaluations=evaluations)
    assert recording.takes("3/evaluate/0", purpose="evaluate", seed=0) is evaluations
    assert recording.takes("3/train/0", purpose="train", seed=0) is not evaluations


@pytest.mark.parametrize("days", [0.0, 0.99, -1.0, 36501.0, float("nan"), float("inf")])
def test_less_than_a_day_and_more_than_a_hundred_years_are_refused(days: float) -> None:
    """A repeated submission is answered for a day: what it names must be there."""
    with pytest.raises(InvalidInput, match="keys_days"):
        job_spec(retention__keys_days=days)
    with pytest.raises(InvalidInput, match="KEEP_KEYS_DAYS"):
        settings_from({"ONBEAT_KEEP_KEYS_DAYS": str(days)})
