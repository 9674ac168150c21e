"""What a person sees of a job: in the panel, in an iteration's line; and nothing of what it doesn't have."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console, RenderableType

from contracts.encoding.wire import encode
from contracts.events import BatchDead, IterationCommitted
from contracts.jobs import EvaluationScore, JobState, SetScore, WindowIteration
from onbeat.client.progress import JobProgress
from onbeat.terminal.job_view import iteration_line
from onbeat.terminal.panel import environment_in_words, kind_in_words, panel
from onbeat.terminal.words import lags_of
from tests.contract.golden_files import golden, iteration_metrics, trajectory_metrics
from tests.e2e.stand_in_gateway import FakeGateway, events_of, metrics_of
from tests.unit.onbeat.terminal.test_output import STATUS, assert_is_text, terminal

WINDOW = tuple(
    WindowIteration(
        iteration=iteration,
        oldest_version=iteration - 2,
        newest_version=iteration - 2,
        batches_expected=8,
        batches_published=published,
        batches_dead=dead,
    )
    for iteration, published, dead in ((7, 7, 1), (8, 3, 0), (9, 0, 0))
)
PERIODIC = msgspec.structs.replace(golden("JobStatus"), schedule="periodic", max_policy_lag=0)
DELAYED = msgspec.structs.replace(golden("JobStatus"), schedule="delayed", max_policy_lag=2, window=WINDOW)
OF_A_LAG = msgspec.structs.replace(
    iteration_metrics(lag_counts=(0, 0, 4), lag_mean=2.0),
    mismatch_k3=0.0123,
    effective_sample_share=0.931,
    loss_metrics={"corrected_share": 0.012},
)


def shown(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def progress(status: object, metrics: object) -> JobProgress:
    found = JobProgress(status=status)  # type: ignore[arg-type]
    found.apply(IterationCommitted(at_s=1.0, metrics=metrics, weights_digest="ab" * 32))  # type: ignore[arg-type]
    return found


def test_the_panel_of_a_lagging_job_shows_each_open_iteration_and_how_stale_the_last_one_was() -> None:
    text = shown(panel(progress(DELAYED, OF_A_LAG)))
    for part in (
        "iteration 7 ← version 5 (lag 2)   7 of 8 in   1 dead",
        "iteration 8 ← version 6 (lag 2)   3 of 8 in",
        "iteration 9 ← version 7 (lag 2)   0 of 8 in",
        "lag 2   K3 0.0123   effective samples 93.1%   corrected 1.2%",
        "delayed · lag 2",
    ):
        assert part in text


def test_the_line_of_an_iteration_has_its_lag_and_what_it_costs() -> None:
    line = iteration_line(OF_A_LAG, progress(DELAYED, OF_A_LAG))
    assert "tokens/s  lag 2  K3 0.0123  effective samples 93.1%  corrected 1.2%" in line


def test_a_job_without_a_lag_is_shown_as_ever() -> None:
    own = tuple(msgspec.structs.replace(one, oldest_version=7, newest_version=7) for one in WINDOW[:1])
    of_periodic = progress(msgspec.structs.replace(PERIODIC, window=own), iteration_metrics())
    text = shown(panel(of_periodic))
    assert "periodic · on-policy" in text
    assert "lag" not in text
    assert "window" not in text
    assert "lag" not in iteration_line(iteration_metrics(), of_periodic)


@pytest.mark.parametrize(
    ("counts", "mean", "words"),
    [
        ((0, 8), 1.0, "lag 1"),
        ((8, 0), 0.0, "lag 0"),
        ((2, 6), 0.75, "lag 0.8 (2 batches of 0, 6 of 1)"),
        ((1, 0, 3), 1.5, "lag 1.5 (1 batch of 0, 3 of 2)"),
    ],
)
def test_batches_are_told_by_their_lag(counts: tuple[int, ...], mean: float, words: str) -> None:
    assert lags_of(iteration_metrics(lag_counts=counts, lag_mean=mean)) == words


def test_a_bounded_job_says_that_its_lag_is_the_most() -> None:
    assert kind_in_words(msgspec.structs.replace(DELAYED, schedule="bounded")) == "bounded · lag 2 at most"
    assert kind_in_words(msgspec.structs.replace(PERIODIC, schedule="colocated")) == "colocated · on-policy"


def test_a_job_with_an_environment_shows_what_was_played_and_no_other_does() -> None:
    of_environment = trajectory_metrics(num_begun_again=2, environment={"calls\x1b[2J": 1.5})
    committed = msgspec.structs.replace(iteration_metrics(), trajectories=of_environment)
    seen = progress(PERIODIC, committed)
    words = environment_in_words(of_environment)
    assert words == (
        "reward 0.625   2.25 turns, 8 at most   75% done, 25% at max_turns   35.5 tokens of observations"
        "   2 begun again   calls\\x1b[2J 1.50"
    )
    assert "2.25 turns, 8 at most" in shown(panel(seen))
    assert "tokens/s  2.25 turns, 75% done, 2 begun again  " in iteration_line(committed, seen)
    failed = msgspec.structs.replace(of_environment, max_turns_share=0.125, failed_share=0.125, num_begun_again=0)
    assert "12.5% at max_turns, 12.5% at a failure   35.5" in environment_in_words(failed)
    stated = msgspec.structs.replace(committed, trajectories=failed, num_unscorable=3)
    assert "75% done  3 unscorable" in iteration_line(stated, seen)
    assert "3 completions of the last iteration got the score that the spec states" in shown(
        panel(progress(PERIODIC, stated))
    )
    assert committed.numbers()["turns_mean"] == 2.25
    assert committed.labelled()["environment"]["calls\x1b[2J"] == 1.5
    assert "environment" not in shown(panel(progress(PERIODIC, iteration_metrics())))
    assert b"trajectories" not in encode(iteration_metrics())


def test_a_job_with_a_teacher_shows_how_far_it_is_and_no_other_does() -> None:
    taught = msgspec.structs.replace(iteration_metrics(), loss_metrics={"kl_to_teacher": 0.75})
    seen = progress(PERIODIC, taught)
    assert "KL 0.750 a token" in shown(panel(seen))
    assert "tokens/s  KL to teacher 0.75" in iteration_line(taught, seen)
    assert taught.numbers()["kl_to_teacher"] == 0.75
    assert "teacher" not in shown(panel(progress(PERIODIC, iteration_metrics())))
    assert "kl_to_teacher" not in iteration_metrics().numbers()


def test_the_live_panel_shows_what_an_onlooker_asks_for(gateway: FakeGateway) -> None:
    progress = JobProgress(gateway.status())
    for event in events_of(JobState.SUCCEEDED):
        progress.apply(event)
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(panel(progress))
    text = console.export_text()
    for part in (
        "0.750",
        "▁█",
        "sampled 0.400 → 0.700",
        "version 2",
        "1 (stale 1) rejected",
        "3 copies of late batches   2 won",
        "2 of 2 iterations",
        "20 tokens/s",
    ):
        assert part in text
    fast = msgspec.structs.replace(metrics_of(1, 0.75), wall_s=0.0423, waiting_s=0.01, bubble_s=9.0)
    progress.apply(IterationCommitted(at_s=9.0, metrics=fast, weights_digest=""))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(panel(progress))
    speed = "42.3 ms an iteration   trainer waited 23.6%   no generator sampled for 9.0 s before it"
    assert speed in console.export_text()
    assert iteration_line(metrics_of(1, 0.75), progress).startswith("iteration 1  reward 0.750  version 1 → 2")


def test_the_panel_has_a_line_for_each_further_set_of_an_evaluation() -> None:
    before, latest = (
        EvaluationScore(
            iteration=iteration,
            policy_version=iteration,
            sampled=0.5,
            num_prompts=8,
            sets={"aime": SetScore(sampled=of_set, greedy=0.25, num_prompts=4)},
        )
        for iteration, of_set in ((0, 0.125), (3, 0.375))
    )
    seen = JobProgress(msgspec.structs.replace(PERIODIC, evaluation_before=before, evaluation_latest=latest))
    assert "aime   sampled 0.125 → 0.375   greedy 0.250" in shown(panel(seen))
    seen = JobProgress(msgspec.structs.replace(PERIODIC, evaluation_before=before, evaluation_latest=before))
    assert "aime   sampled 0.125   greedy 0.250" in shown(panel(seen))


def test_what_others_wrote_is_text_in_the_panel() -> None:
    console, text = terminal()
    console.print(panel(JobProgress(STATUS)))
    assert_is_text(text.getvalue())


def test_the_panel_names_the_batch_that_was_given_up_last_and_why_as_text() -> None:
    job = JobProgress(STATUS)
    assert "given up" not in shown(panel(job))
    for number in (1, 2):
        job.apply(BatchDead(at_s=1.0, batch_id=f"0/train/{number}", reason=f"no score \x1b[2J {number}"))
    text = shown(panel(job))
    assert "batch 0/train/2: no score" in text
    assert "0/train/1" not in text
    assert_is_text(text)
