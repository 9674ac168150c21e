"""The command line against a real HTTP server with the gateway's routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.encoding.wire import encode_json
from contracts.errors import HubFetching
from contracts.events import (
    CheckpointWritten,
    HealthChanged,
    IterationCommitted,
    MemoryMeasured,
    Rewound,
    StateChanged,
    TrainerStarted,
)
from contracts.jobs import HealthProblem, JobState
from contracts.run_folder import RunFolder
from contracts.spec.job import ForkSpec
from onbeat.audit.folder import AuditFile
from onbeat.base.shipped import shipped_root
from onbeat.cli import run
from onbeat.client.gateway import GatewayClient, parse_events
from onbeat.client.progress import JobProgress
from onbeat.terminal.job_view import event_line
from tests.e2e.stand_in_gateway import JOB, KEY, TASK, FakeGateway, events_of, metrics_of

pytestmark = pytest.mark.usefixtures("restored_process")


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "test"\niterations = 2\n[model]\npath = "x"\n[dataset]\ntype = "addition"\n'
        '[reward]\ncomponents = [{ type = "exact" }]\n'
    )
    return path


def only_object(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Exactly one JSON object, on one line of stdout."""
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def save_spec(gateway: FakeGateway, run_root: Path) -> RunFolder:
    folder = RunFolder(run_root, JOB)
    folder.path.mkdir(parents=True)
    folder.spec.write_bytes(encode_json(gateway.spec))
    return folder


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["jobs"], "jobs"),
        (["watch", JOB], "job_id"),
        (["delete", JOB, "--yes"], "deleted"),
        (["submit", "job.toml"], "job_id"),
    ],
)
@pytest.mark.usefixtures("gateway", "spec_file")
def test_every_command_prints_exactly_one_object_with_json(
    command: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--json"]) == 0
    assert key in only_object(capsys)


def test_a_submitted_spec_carries_flags_settings_and_an_idempotency_key(
    gateway: FakeGateway, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--seed", "7", "--schedule", "synchronous", "--set", "optimizer.learning_rate=1e-3"]
    assert run(["submit", str(spec_file), *flags, "--idempotency-key", "once"]) == 0
    ((key, spec),) = gateway.submitted
    assert key == "once"
    assert (spec.seed, spec.schedule, spec.optimizer.learning_rate) == (7, "synchronous", 1e-3)
    assert JOB in capsys.readouterr().out
    assert run(["submit", str(spec_file), "--run-dir", "other"]) == 0
    assert f"follow it: onbeat watch {JOB} --run-dir other\n" in capsys.readouterr().out


def test_watch_prints_a_line_an_iteration_and_its_exit_code_is_the_jobs(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["watch", JOB]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "iteration 0  reward 0.500  version 0 → 1  1 batch  2.0 s  20 tokens/s  1 of 2" in lines[3]
    assert "held-out reward under version 2: sampled 0.700, greedy 0.700 (2 prompts)" in lines
    gateway.final = JobState.FAILED
    assert run(["watch", JOB]) == 1
    assert "job failed: the loss is not finite" in capsys.readouterr().out


def test_submit_and_wait_fails_when_the_job_fails(
    gateway: FakeGateway, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.final = JobState.FAILED
    assert run(["submit", str(spec_file), "--wait", "--json"]) == 1
    assert only_object(capsys)["state"] == "failed"


def test_resume_asks_for_the_iterations_and_follows_the_job(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume", JOB, "--iterations", "9", "--wait", "--json"]) == 0
    assert only_object(capsys)["state"] == "succeeded"
    assert run(["resume", JOB]) == 0
    assert f"{JOB}  succeeded   follow it: onbeat watch {JOB}" in capsys.readouterr().out
    assert run(["resume", JOB, "--run-dir", "other"]) == 0
    assert f"follow it: onbeat watch {JOB} --run-dir other\n" in capsys.readouterr().out
    assert [asked.iterations for asked in gateway.resumed] == [9, None, None]


def test_resume_widens_the_sums(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["resume", JOB, "--wider-sums", "12"]) == 0
    assert (gateway.resumed[-1].wider_sums, gateway.resumed[-1].iterations) == (12, None)
    capsys.readouterr()
    for wrong in ("0", "25"):
        assert run(["resume", JOB, "--wider-sums", wrong]) == 2
        assert "--wider-sums" in capsys.readouterr().err


def test_resume_states_scores_for_what_components_an_environment_and_stages_cannot_judge(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume", JOB, "--on-unscorable", "math_verify=-0.5", "--on-unscorable", "plugin_2=fail"]) == 0
    assert gateway.resumed[-1].on_unscorable == {"math_verify": -0.5, "plugin_2": "fail"}
    assert run(["resume", JOB, "--on-failure", "environment=0", "--on-failure", "llm_judge=fail"]) == 0
    assert gateway.resumed[-1].on_failure == {"environment": 0.0, "llm_judge": "fail"}
    assert gateway.resumed[-1].on_unscorable == {}
    for flag, key in (("--on-unscorable", "on_unscorable"), ("--on-failure", "on_failure")):
        for wrong in ("math_verify", "math_verify=none", "math_verify=1e9", "math_verify=nan"):
            assert run(["resume", JOB, flag, wrong]) == 2
            told = capsys.readouterr().err
            assert flag in told or key in told


def test_the_events_of_a_resumed_job_go_on_after_its_first_end(gateway: FakeGateway) -> None:
    gateway.earlier = events_of(JobState.FAILED)
    with GatewayClient(gateway.url, KEY) as client:
        found = [event for _, event in client.events(JOB)]
    assert [event.state for event in found if isinstance(event, StateChanged)] == [
        JobState.RUNNING,
        JobState.FAILED,
        JobState.RUNNING,
        JobState.SUCCEEDED,
    ]


def test_an_event_that_this_version_does_not_know_is_passed_over() -> None:
    known = Rewound(at_s=1.0, iteration=2, committed=4, trainer_epoch=7)
    text = 'id: 1-0\nevent: eclipse\ndata: {"type": "eclipse", "moon": 1}\n\n'
    text += f"id: 2-0\nevent: rewound\ndata: {encode_json(known).decode()}\n\n"
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, text=text)
    assert list(parse_events(answer)) == [("2-0", known)]


def test_a_rewind_is_a_line_of_what_is_done_again(gateway: FakeGateway) -> None:
    with GatewayClient(gateway.url, KEY) as client:
        progress = JobProgress(client.job(JOB))
    said = event_line(Rewound(at_s=1.0, iteration=2, committed=4, trainer_epoch=7), progress)
    assert said == "rewound to iteration 2: 3 committed iterations to be done again"
    said = event_line(Rewound(at_s=1.0, iteration=5, committed=4, trainer_epoch=8), progress)
    assert said == "rewound to iteration 5: what was in work is sampled anew"


def test_a_trainers_start_and_what_its_largest_micro_batch_takes_are_a_line_each(gateway: FakeGateway) -> None:
    with GatewayClient(gateway.url, KEY) as client:
        progress = JobProgress(client.job(JOB))
    started = TrainerStarted(at_s=1.0, trainer_epoch=7, next_iteration=0, resumed=False)
    assert event_line(started, progress) == "a trainer starts at iteration 0"
    measured = MemoryMeasured(at_s=1.0, device="cuda", num_tokens=8192, peak_bytes=11 * 2**30, usable_bytes=24 * 2**30)
    assert event_line(measured, progress) == (
        "the largest micro-batch of this spec, 8,192 tokens, takes 11 GiB at the peak, of 24 GiB (cuda)"
    )


def test_what_is_wrong_with_a_job_is_a_line_when_that_changes(gateway: FakeGateway) -> None:
    with GatewayClient(gateway.url, KEY) as client:
        progress = JobProgress(client.job(JOB))
    equal = HealthProblem(rule="groups_equal", since=9, problem="all are", cure="take others")
    gone = HealthProblem(rule="entropy_gone", since=12, problem="0.01 nats", cure="raise it")
    said = event_line(HealthChanged(at_s=1.0, iteration=12, problems=(equal, gone)), progress)
    assert said == "health: still groups are equal; entropy is gone since iteration 12: 0.01 nats (raise it)"
    said = event_line(HealthChanged(at_s=1.0, iteration=20, problems=()), progress)
    assert said == "health: well again after iteration 20"


def test_an_event_stream_that_breaks_off_is_taken_up_after_its_last_event(gateway: FakeGateway) -> None:
    gateway.break_after = 4
    with GatewayClient(gateway.url, KEY) as client:
        found = [event_id for event_id, _ in client.events(JOB)]
    assert gateway.last_event_ids == [None, "4"]
    assert found == ["1", "2", "3", "4", "5", "6", "7"]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["watch", "unknown"], "onbeat: job: there is no such job (GET /v1/jobs lists them)"),
        (["delete", "job-none", "--yes"], "onbeat: job: there is no such job"),
        (
            ["delete", JOB],
            "onbeat: --yes: a deleted job cannot be restored, nor its weights and checkpoints (add --yes to delete)",
        ),
        (["cancel", JOB], "onbeat: state: a succeeded job cannot become cancelling"),
        (
            ["jobs", "--api-key", "of-another-stack"],
            "onbeat: --api-key: the key is wrong (give the stack's, or its folder by --run-dir)",
        ),
        (["watch", "../jobs"], "onbeat: job: `../jobs` is not a job id (`onbeat jobs` lists them)"),
        (
            ["submit", "absent.toml"],
            "onbeat: absent.toml: does not exist (`onbeat init` writes a project with one; those that come with Onbeat "
            f"are in {shipped_root() / 'configs'})",
        ),
        (["nonsense"], "onbeat: No such command 'nonsense'. (onbeat --help)"),
    ],
)
@pytest.mark.usefixtures("gateway")
def test_bad_input_is_one_line_and_exit_code_2(
    command: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [line]
    assert captured.out == ""


@pytest.mark.usefixtures("gateway")
def test_an_error_with_json_is_one_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "unknown", "--json"]) == 2
    assert only_object(capsys) == {
        "error": {
            "type": "NotFound",
            "field": "job",
            "problem": "there is no such job",
            "cure": "GET /v1/jobs lists them",
        }
    }


def test_verify_asks_the_gateway_and_fails_on_a_gap(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_spec(gateway, tmp_path / "runs")
    assert run(["verify", JOB, "--json"]) == 0
    assert only_object(capsys)["verified"] is True
    folder.weights_of(1).mkdir(parents=True)
    (folder.weights_of(1) / "weights-00001-of-00001.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    assert run(["verify", JOB, "--json"]) == 1
    (gap,) = only_object(capsys)["gaps"]
    assert gap.startswith(f"{JOB}/weights/v000001: the files have digest")


@pytest.mark.usefixtures("gateway")
def test_verify_has_a_worker_check_where_the_run_folder_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", JOB]) == 0
    captured = capsys.readouterr()
    assert "verified  job-0a1b: 0 iterations" in captured.out
    assert captured.err.splitlines() == [f"verify {TASK} queued", f"verify {TASK} done"]
    assert run(["verify", JOB, "--json"]) == 0
    verdict = only_object(capsys)
    assert (verdict["verified"], verdict["task_id"]) == (True, TASK)


def test_verify_needs_no_gateway_where_the_run_folder_holds_the_chain(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_spec(gateway, tmp_path / "kept")
    with GatewayClient(gateway.url, KEY) as client:
        kept = AuditFile(status=client.job(JOB), entries=tuple(client.audit(JOB)))
    folder.audit.write_bytes(encode_json(kept))
    monkeypatch.setenv("ONBEAT_GATEWAY_URL", "http://127.0.0.1:9")
    assert run(["verify", JOB, "--run-dir", str(tmp_path / "kept")]) == 0
    assert "verified  job-0a1b: 2 iterations, 2 training and 2 evaluation batches" in capsys.readouterr().out
    monkeypatch.setenv("ONBEAT_RUN_ROOT", str(tmp_path / "kept"))
    assert run(["verify", JOB]) == 0


@pytest.mark.parametrize("command", [["verify", JOB], ["export", JOB, "out"]])
def test_a_job_that_wrote_no_spec_was_not_trained(
    command: list[str], gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command[0] == "export":
        assert run(command) == 2
        assert "there is no such job" in capsys.readouterr().err, "the gateway is asked"
    RunFolder(tmp_path / "runs", JOB).path.mkdir(parents=True)
    assert run(command) == 2
    said = f"onbeat: job: {JOB} ended before it wrote its spec, or has yet to begin, so nothing was trained ("
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("command", [["verify", JOB], ["export", JOB, "out"]])
@pytest.mark.usefixtures("gateway")
def test_without_a_stack_an_unknown_job_is_told_of_the_run_folder(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ONBEAT_GATEWAY_URL")
    assert run(command) == 2
    line = capsys.readouterr().err
    assert f"and {JOB} has no folder there (name the folder of the job's stack or demo with --run-dir DIR)" in line


def test_progress_folds_events_and_estimates_the_time_left(gateway: FakeGateway) -> None:
    gateway.final = JobState.RUNNING
    progress = JobProgress(gateway.status())
    for event in events_of(JobState.RUNNING)[:4]:
        progress.apply(event)
    assert progress.curve == [0.5]
    assert progress.evaluation_latest is not None
    assert progress.evaluation_latest.sampled == 0.4
    assert progress.left_s == 0.0
    progress.apply(IterationCommitted(at_s=9.0, metrics=metrics_of(0, 0.6), weights_digest=""))
    assert progress.curve == [0.6]


def test_evaluate_submits_the_model_with_what_the_spec_says_of_evaluations_and_follows_it(
    gateway: FakeGateway, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", "models/other", str(spec_file), "--set", "evaluation.num_prompts=16"]) == 0
    ((_, spec),) = gateway.submitted
    assert (spec.model.path, spec.iterations, spec.evaluation.num_prompts) == ("models/other", 0, 16)
    assert f"{JOB}  succeeded" in capsys.readouterr().out
    assert run(["evaluate", "models/other", str(spec_file), "--json"]) == 0
    assert only_object(capsys)["job_id"] == JOB
    gateway.final = JobState.FAILED
    assert run(["evaluate", "models/other", str(spec_file)]) == 1


def test_a_sweep_submits_each_combination_under_one_tag_and_shows_a_table(
    gateway: FakeGateway, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--set", "optimizer.learning_rate=1e-4,1e-3", "--set", "iterations=5"]
    assert run(["sweep", str(spec_file), *flags]) == 0
    specs = [spec for _, spec in gateway.submitted]
    assert [(spec.optimizer.learning_rate, spec.iterations) for spec in specs] == [(1e-4, 5), (1e-3, 5)]
    assert [spec.name for spec in specs] == ["test, learning_rate=1e-4", "test, learning_rate=1e-3"]
    assert len({spec.tags[0] for spec in specs}) == 1
    head, *rows = capsys.readouterr().out.splitlines()[1:]
    assert head.split()[:3] == ["learning_rate", "job", "state"]
    assert [row.split()[:3] for row in rows] == [["1e-4", JOB, "succeeded"], ["1e-3", JOB, "succeeded"]]
    assert run(["sweep", str(spec_file), *flags, "--json"]) == 0
    answer = only_object(capsys)
    assert [job["values"]["optimizer.learning_rate"] for job in answer["jobs"]] == [1e-4, 1e-3]
    gateway.final = JobState.FAILED
    assert run(["sweep", str(spec_file), *flags]) == 1
    assert run(["sweep", str(spec_file), *flags, "--no-wait"]) == 0
    assert run(["sweep", str(spec_file), "--set", "seed=1"]) == 2
    assert "is no sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["submit", "SPEC"],
        ["evaluate", "models/other", "SPEC"],
        ["sweep", "SPEC", "--set", "iterations=5,6"],
        ["resume", JOB],
        ["resume", JOB, "--set", "optimizer.learning_rate=1e-5"],
    ],
    ids=" ".join,
)
def test_each_command_that_hands_in_a_job_shows_how_far_a_fetch_from_the_hub_is(
    gateway: FakeGateway,
    spec_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    monkeypatch.setattr(HubFetching, "retry_after_s", 0)
    # For a fork, which begins at a checkpoint.
    checkpoint = CheckpointWritten(at_s=0.5, iteration=0, directory="checkpoints/i000000", weights_digest="0" * 64)
    gateway.earlier = [checkpoint]
    gateway.fetches = ["fetches hub:people/model: 1 of 2 GB", "fetches hub:people/model: 2 of 2 GB"]
    said = list(gateway.fetches)
    assert run([str(spec_file) if word == "SPEC" else word for word in command]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("fetches")] == said
    assert gateway.submitted or gateway.resumed


def test_resume_with_other_keys_forks_the_job_at_its_newest_checkpoint(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ["--set", "optimizer.learning_rate=1e-5"]
    assert run(["resume", JOB, *change, "--iterations", "9"]) == 2
    assert "has no checkpoint to go on from" in capsys.readouterr().err
    checkpoint = CheckpointWritten(at_s=0.5, iteration=1, directory="checkpoints/i000001", weights_digest="0" * 64)
    gateway.earlier = [checkpoint]
    assert run(["resume", JOB, *change, "--iterations", "9"]) == 0
    ((_, spec),) = gateway.submitted
    assert isinstance(spec.fork, ForkSpec)
    assert (spec.fork.job, spec.fork.version, spec.iterations) == (JOB, 2, 7)
    assert (spec.optimizer.learning_rate, spec.rollout) == (1e-5, gateway.spec.rollout)
    assert spec.name == "test, learning_rate=1e-5"
    assert gateway.resumed == []
    assert f"goes on from version 2 of {JOB}" in capsys.readouterr().err
    assert run(["resume", JOB, *change]) == 2
    assert "iterations: 2 of 2 are trained already (give more in all, as --iterations 4)" in capsys.readouterr().err
    assert run(["resume", JOB, *change, "--wider-sums", "3"]) == 2
    assert "--wider-sums: has no effect with --set" in capsys.readouterr().err
    gateway.final = JobState.RUNNING
    assert run(["resume", JOB, *change, "--iterations", "9"]) == 2
    assert "a running job can't be gone on from" in capsys.readouterr().err
