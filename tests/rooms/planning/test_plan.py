"""`onbeat plan`: the comparison of schedules, its advice, its pictures, its JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.schedule import Schedule
from onbeat import cli
from onbeat.planning import lanes
from onbeat.planning.pipeline.costs import Machines
from onbeat.planning.plan import candidates, choose, compare, machines_for
from onbeat.planning.predictions import Prediction, Range, RedisLoad, predict
from tests.builders import job_spec
from tests.rooms.planned import NO_WAITS, batch, costs

DEMO = Path(__file__).parents[3] / "configs" / "demo.toml"
RATES = """
[generator]
tokens_per_s = 9000.0
[trainer]
tokens_per_s = 30000.0
step_s = 0.008
[sync]
publish_s = 0.003
load_s = 0.008
[lengths]
distribution = "lognormal"
mean = 3.5
sigma = 0.2
prompt_tokens = 6.0
"""


def prediction(schedule: str, seconds: float, *, lag: int = 0, generators: int = 1) -> Prediction:
    return Prediction(
        schedule=schedule,  # type: ignore[arg-type]
        max_policy_lag=lag,
        generators=generators,
        world_size=1,
        iteration_s=Range(mean=seconds, low=seconds, high=seconds),
        bound_s=seconds,
        job_s=seconds,
        tokens_per_s=1.0,
        generators_busy=0.5,
        trainer_busy=0.5,
        lag_mean=0.0,
        redis=RedisLoad(scripts_per_s=1.0, bytes_per_s=1.0, most_resident_bytes=1.0),
    )


def spec(**changes: object):
    return job_spec(**{"iterations": 20, "evaluation__num_prompts": 0, "rollout__batches_per_iteration": 8, **changes})


def test_each_schedule_is_tried_and_lags_that_the_job_is_too_short_for_are_not() -> None:
    assert [(one.name, one.max_policy_lag) for one in candidates([1, 5], 4)] == [
        ("colocated", 0),
        ("synchronous", 0),
        ("periodic", 0),
        ("delayed", 1),
        ("bounded", 1),
    ]


def test_what_is_nearly_as_fast_with_fewer_generators_and_less_lag_is_preferred() -> None:
    periodic, delayed, bounded = (
        prediction("periodic", 1.04),
        prediction("delayed", 1.01, lag=1),
        prediction("bounded", 1.0, lag=1),
    )
    assert choose([bounded, delayed, periodic]) is periodic
    assert choose([bounded, delayed, prediction("periodic", 1.2)]) is delayed
    more = prediction("periodic", 0.99, generators=4)
    assert choose([more, delayed]) is delayed
    assert choose([prediction("periodic", 0.5, generators=4), delayed]).generators == 4


def test_the_advice_names_the_limit_and_what_a_lag_gains() -> None:
    stated = costs(batch(1.0, 1.0), batch(3.0, 3.0), step_s=1.0, waits=replace(NO_WAITS, load_s=2.0))
    plan = compare(spec(), stated, Machines(), schedules=candidates([1], 20), generators=[1], replications=2, seed=0)
    assert (plan.recommended.schedule, plan.recommended.max_policy_lag) == ("delayed", 1)
    assert plan.recommended_without_lag.schedule == "periodic"
    gain = plan.recommended_without_lag.iteration_s.mean / plan.recommended.iteration_s.mean
    assert f"{gain:.2f} times as fast as the best without a lag, periodic with 1 generator" in plan.reason
    assert "the trainer is the limit" in plan.reason


def test_colocated_is_shown_at_best_and_recommended_only_with_a_stated_gain() -> None:
    stated = costs(batch(1.0, 1.0))
    schedules = [Schedule("colocated"), Schedule("synchronous")]
    shown = compare(spec(), stated, Machines(), schedules=schedules, generators=[1], replications=1, seed=0)
    assert shown.predictions[0].is_at_best
    assert shown.predictions[0].iteration_s.mean == pytest.approx(8.0)
    assert shown.recommended.schedule == "synchronous"
    assert any("--colocated" in warning for warning in shown.warnings)
    known = Machines(generator_gain=1.6, trainer_gain=1.6, is_gain_known=True)
    stated_gain = compare(spec(), stated, known, schedules=schedules, generators=[1], replications=1, seed=0)
    assert stated_gain.recommended.schedule == "colocated"
    assert stated_gain.recommended.iteration_s.mean == pytest.approx(10.0)


def test_all_devices_are_generators_and_ranks_together_or_the_cores_of_the_machine() -> None:
    apart = machines_for(Schedule("colocated"), Machines(num_generators=3, world_size=1))
    assert (apart.generator_gain, apart.trainer_gain) == (4 / 3, 4.0)
    cores = machines_for(Schedule("colocated"), Machines(num_generators=2, num_cores=8, threads=2))
    assert (cores.generator_gain, cores.trainer_gain, cores.num_cores) == (2.0, 4.0, 0)
    assert machines_for(Schedule("periodic"), Machines(num_cores=8)) == Machines(num_cores=8)


def test_an_iteration_that_outlasts_its_deadline_is_said() -> None:
    slow = costs(batch(1000.0, 1.0))
    plan = compare(spec(), slow, Machines(), schedules=[Schedule("periodic")], generators=[1], replications=1, seed=0)
    assert any("more than timeouts.iteration_s = 3600 s" in warning for warning in plan.warnings)


def test_a_prediction_is_never_below_its_bound_and_its_spread_is_in_order() -> None:
    tailed = costs(*[batch(1.0, 1.0)] * 7, batch(9.0, 2.0), step_s=0.5)
    for schedule in candidates([1, 2], 20):
        machines = machines_for(schedule, Machines(num_generators=2))
        found = predict(spec(), schedule, machines, tailed, replications=3)
        assert found.iteration_s.low <= found.iteration_s.mean <= found.iteration_s.high
        assert found.iteration_s.mean >= 0.97 * found.bound_s
        assert 0.0 < found.trainer_busy <= 1.0
        assert 0.0 < found.generators_busy <= 1.0


def test_the_command_prints_one_object_with_a_row_for_each_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rates.toml").write_text(RATES)
    flags = ["--rates", str(tmp_path / "rates.toml"), "--generators", "1..2", "--replications", "1"]
    assert cli.run(["plan", str(DEMO), *flags, "--set", "iterations=6", "--lags", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["schedule"], row["generators"]) for row in found["predictions"]] == [
        (name, number) for number in (1, 2) for name in ("colocated", "synchronous", "periodic", "delayed", "bounded")
    ]
    assert found["recommended"] in found["predictions"]


def test_the_command_shows_the_advice_and_draws_every_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rates.toml").write_text(RATES)
    picture = tmp_path / "lanes.svg"
    flags = ["--rates", str(tmp_path / "rates.toml"), "--replications", "1", "--set", "iterations=8", "--lags", "1"]
    assert cli.run(["plan", str(DEMO), *flags, "--set", "name=$\\nonsense{$", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "recommended" in text
    assert "generator 1" in text
    drawn = picture.read_text()
    assert all(f"<!-- {name}" in drawn for name in ("colocated", "synchronous", "periodic", "delayed", "bounded"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--from: give either a finished job or rates"),
        (["--rate", "generator.tokens_per_s=1"], "trainer"),
        (["--from", "job-0123456789ab", "--rates", "x.toml"], "give either a finished job or rates"),
        (["--from", "nowhere"], "nowhere"),
        (["--rates", "missing.toml"], "no such file"),
        (["--rates", "RATES", "--rate", "generator"], "--rate: `generator` is not key.path=value"),
        (["--rates", "RATES", "--rate", "generator.tokens_per_s=0"], "generator.tokens_per_s: expected `float` > 0.0"),
        (["--rates", "RATES", "--rate", "generator.speed=1"], "unknown field `speed`"),
        (["--rates", "RATES", "--generators", "0"], "--generators: `0` is not in order"),
        (["--rates", "RATES", "--generators", "4..2"], "is not in order"),
        (["--rates", "RATES", "--generators", "1..99"], "99 numbers"),
        (["--rates", "RATES", "--generators", "many"], "is neither N nor N..M"),
        (["--rates", "RATES", "--generators", "30"], "18 would never have one"),
        (["--rates", "RATES", "--lags", "0"], "--lags: `0` are no lags"),
        (["--rates", "RATES", "--lags", "17"], "from 1 to 16"),
        (["--rates", "RATES", "--colocated", "fast"], "--colocated: `fast` is not G,T"),
        (["--rates", "RATES", "--colocated", "0.5,1"], "at least as fast"),
        (["--rates", "RATES", "--picture", "lanes.exe"], "is no kind of picture"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    (tmp_path / "rates.toml").write_text(RATES)
    given = [str(tmp_path / "rates.toml") if flag == "RATES" else flag for flag in flags]
    assert cli.run(["plan", str(DEMO), *given, "--run-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_lane_in_the_terminal_shows_which_iteration_it_works_on_and_where_it_waits() -> None:
    plan = predict(spec(), Schedule("synchronous"), Machines(), costs(batch(1.0, 1.0), step_s=4.0), replications=1)
    drawn = lanes.lanes_of(spec(), plan, Machines(), costs(batch(1.0, 1.0), step_s=4.0), shown_s=40.0)
    trainer, generator = lanes.as_text(drawn, width=20)
    assert trainer == ("trainer", "....2222ss....3333ss")
    assert generator == ("generator 1", "2222......3333......")
