"""A run as a program has it, over a real HTTP gateway; no process is started."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import onbeat
import onbeat.client
from contracts.answers import AuditVerdict
from contracts.encoding.wire import encode_json
from contracts.errors import DeadlineExceeded, InvalidInput, JobFailed, NotFound, Unavailable
from contracts.jobs import JobState, JobStatus
from contracts.rewards import PluginReward
from onbeat.client.progress import JobProgress
from onbeat.commands.exports.audit_file import read_audit
from onbeat.commands.exports.verify_command import verdict_text
from onbeat.stack.access import StackFile, write_stack_file
from onbeat.terminal import follow
from onbeat.terminal.output import TextConsole
from onbeat.training import driver, progress_line
from onbeat.training.progress_line import Hidden, NotebookOutput, StartLine, TerminalLine, as_html, shown_for
from tests.e2e.stand_in_gateway import JOB, KEY, FakeGateway, events_of
from tests.rooms.runs.running_stack import RunningStack, running_gateway, stacks
from tests.unit.onbeat.terminal.test_output import HOSTILE, assert_is_text, terminal

HERE = Path(__file__).parents[3]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGateway]:
    for name in ("ONBEAT_GATEWAY_URL", "ONBEAT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ONBEAT_RUN_ROOT", str(tmp_path / "runs"))
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    monkeypatch.setenv("ONBEAT_MODEL_ROOT", str(tmp_path / "models"))
    monkeypatch.setattr(follow, "LAST_EVENTS_S", 0.2)  # the stream of a job that ran goes on in this gateway
    with running_gateway(monkeypatch) as server:
        yield server


def end(server: FakeGateway, state: JobState) -> None:
    server.final = state


def on_own_stack(server: FakeGateway, **options: Any) -> onbeat.Run:
    return onbeat.train(server.spec, **options)


def at_gateway(server: FakeGateway, **options: Any) -> onbeat.Run:
    return onbeat.train(server.spec, url=server.url, key=KEY, **options)


def found_again(server: FakeGateway, **options: Any) -> onbeat.Run:
    return onbeat.attach(JOB, url=server.url, key=KEY, **options)


def left_behind(server: FakeGateway, **options: Any) -> onbeat.Run:
    """A job of which the run folder is all that there is."""
    with on_own_stack(server) as run:
        run.verify()
    lines = [encode_json(event.metrics) for event in events_of(server.final) if hasattr(event, "metrics")]
    run.folder.metrics.write_bytes(b"\n".join(lines))
    return onbeat.attach(JOB, run_dir=run.folder.run_root, **options)


WAYS = pytest.mark.parametrize("way", [on_own_stack, at_gateway, found_again, left_behind])


@WAYS
def test_a_program_has_the_iterations_the_result_and_the_verdict(gateway: FakeGateway, way: Any) -> None:
    with way(gateway) as run:
        assert [(entry.number, entry.reward_mean) for entry in run] == [(0, 0.5), (1, 0.75)]
        assert [entry.number for entry in run] == [0, 1]
        assert [entry.iteration for entry in run.metrics] == [0, 1]
        assert run.result().policy_version == run.status.policy_version == 2
        assert (run.id, run.folder.job_id) == (JOB, JOB)
        if way is not found_again and way is not at_gateway:
            assert run.verify().verified
            assert read_audit(run.folder)[0].state is JobState.SUCCEEDED
        else:
            assert run.page == f"{gateway.url}/#/jobs/{JOB}?key={KEY}"
            assert run.verify().records == 0  # the gateway's own verdict: the run folder isn't here


@WAYS
def test_a_failed_job_ends_the_loop_and_the_wait_with_its_reason(gateway: FakeGateway, way: Any) -> None:
    gateway.final = JobState.FAILED
    with way(gateway) as run:
        seen = []
        with pytest.raises(JobFailed, match=f"{JOB}: failed: the loss is not finite"):
            seen.extend(entry.number for entry in run)
        with pytest.raises(JobFailed, match="the loss is not finite"):
            run.result()
        assert run.status.state is JobState.FAILED
        if run.folder.path.is_dir():
            run.verify()
            run.folder.spec.unlink()  # as a trainer leaves it that ends before it has begun
            with pytest.raises(JobFailed, match="the loss is not finite"):
                run.verify()


def test_a_stack_is_stopped_as_soon_as_its_job_has_ended(gateway: FakeGateway, tmp_path: Path) -> None:
    run = on_own_stack(gateway)
    run.result()
    assert stacks[0].num_stops == 1
    assert run.page == ""
    assert run.folder.run_root.parent == tmp_path / "runs"
    assert run.folder.run_root.name.startswith("train-")
    second = on_own_stack(gateway)
    second.result()
    assert second.folder.run_root != run.folder.run_root


@pytest.mark.parametrize("way", [on_own_stack, at_gateway])
def test_iterations_come_while_the_job_runs(gateway: FakeGateway, way: Any) -> None:
    gateway.final = JobState.RUNNING
    with way(gateway) as run:
        entries = iter(run)
        assert [next(entries).number, next(entries).number] == [0, 1]
        with pytest.raises(DeadlineExceeded, match="waited 0 s for the job's end"):
            run.result(timeout_s=0.0)
        assert run.status.state is JobState.RUNNING
        end(gateway, JobState.SUCCEEDED)
        assert list(entries) == []


def test_a_run_that_is_closed_before_its_end_is_cancelled_and_its_stack_stopped(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver, "CANCEL_DEADLINE_S", 0.0)
    gateway.final = JobState.RUNNING
    with on_own_stack(gateway):
        assert stacks[0].num_stops == 0
    assert stacks[0].num_stops == 1
    assert [record.getMessage() for record in caplog.records if record.name == driver.__name__] == [
        "could not cancel: state: a succeeded job cannot become cancelling",
        f"waited 0 s for {JOB} to be cancelled: stopping without it",
    ]


def test_a_program_is_told_that_the_gateway_of_its_own_stack_stays_away(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def follow(*_: Any, **__: Any) -> Any:
        raise DeadlineExceeded("waited 60 s for the gateway")

    monkeypatch.setattr(driver, "follow", follow)
    with on_own_stack(gateway) as run, pytest.raises(DeadlineExceeded, match="waited 60 s for the gateway"):
        run.result()
    assert stacks[0].num_stops == 1


def test_a_cancelled_job_ends_the_loop(gateway: FakeGateway) -> None:
    gateway.final = JobState.RUNNING
    with on_own_stack(gateway) as run:
        run.cancel()
        entries = iter(run)
        next(entries)
        end(gateway, JobState.CANCELLED)
        assert [entry.number for entry in entries] == [1]
        assert run.result().state is JobState.CANCELLED, "its own cancel is no failure"


def test_a_job_that_another_cancels_has_no_result(gateway: FakeGateway) -> None:
    gateway.final = JobState.CANCELLED
    with on_own_stack(gateway) as run, pytest.raises(JobFailed, match=f"{JOB}: cancelled: not by this program: "):
        run.result()


def test_ctrl_c_in_a_wait_stops_the_stack(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "CANCEL_DEADLINE_S", 0.0)
    gateway.final = JobState.RUNNING
    run = on_own_stack(gateway)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run._shown, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.result()
    assert stacks[0].num_stops == 1


def test_what_ends_the_stack_is_raised_where_the_program_waits(gateway: FakeGateway) -> None:
    gateway.final = JobState.RUNNING
    run = on_own_stack(gateway)

    def dies() -> None:
        raise Unavailable("died too often", field="gateway")

    stacks[0].tick = dies  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(Unavailable, match="died too often"):
        run.result()
    with pytest.raises(Unavailable, match="died too often"):
        assert run.status
    assert stacks[0].num_stops == 1


@pytest.mark.parametrize(("problem", "kept"), [(InvalidInput("no"), False), (Unavailable("broke"), True)])
def test_what_is_refused_leaves_no_folder_and_what_broke_leaves_its_logs(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception, kept: bool
) -> None:
    monkeypatch.setattr(RunningStack, "problem", problem)
    with pytest.raises(type(problem)):
        on_own_stack(gateway, run_dir=tmp_path / "mine", dataset=[{"prompt": "1+1=", "reference": "2"}])
    assert (tmp_path / "mine").exists() is kept
    with pytest.raises(InvalidInput, match=r"rollout\.colour"):
        on_own_stack(
            gateway, run_dir=tmp_path / "other", dataset=[{"prompt": "", "reference": ""}], rollout={"colour": 1}
        )
    assert not (tmp_path / "other").exists()


def test_rows_and_functions_go_to_a_stack_of_this_user_by_files_and_to_no_other(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def brief(completion: str) -> float:
        return 1.0 / len(completion)

    runs = tmp_path / "up"
    runs.mkdir()
    write_stack_file(runs, StackFile(gateway_url=gateway.url, api_key=KEY, pid=1))
    onbeat.train(gateway.spec, reward=brief, run_dir=runs).close()
    (component,) = gateway.submitted[-1][1].reward.components
    assert isinstance(component, PluginReward)
    assert Path(component.file).parent == runs / "inputs"
    assert stacks == []
    with pytest.raises(InvalidInput, match="reads only files below its own model root"):
        at_gateway(gateway, reward=brief)
    monkeypatch.setenv("ONBEAT_GATEWAY_URL", gateway.url)
    monkeypatch.setenv("ONBEAT_API_KEY", KEY)
    onbeat.train(gateway.spec).close()
    assert stacks == []


def test_the_file_of_a_stack_that_was_killed_names_no_gateway(gateway: FakeGateway, tmp_path: Path) -> None:
    runs = tmp_path / "killed"
    runs.mkdir()
    write_stack_file(runs, StackFile(gateway_url="http://127.0.0.1:1", api_key=KEY, pid=2**22 + 1))
    with on_own_stack(gateway, run_dir=runs) as run:
        assert run.result().policy_version == 2
    assert len(stacks) == 1


@pytest.mark.parametrize("option", ["model_root", "generators", "stage_workers", "threads"])
def test_an_option_that_would_do_nothing_is_refused_by_its_name(gateway: FakeGateway, option: str) -> None:
    with pytest.raises(InvalidInput, match=f"{option}: has no effect with a gateway"):
        at_gateway(gateway, **{option: 1})
    with pytest.raises(InvalidInput, match="key: has no effect without a gateway"):
        onbeat.train(gateway.spec, key=KEY)
    assert gateway.submitted == []


def test_a_job_that_is_nowhere_is_not_found(gateway: FakeGateway, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="has no folder there"):
        onbeat.attach("job-00", run_dir=tmp_path)
    with pytest.raises(NotFound, match="there is no such job"):
        onbeat.attach("job-00", url=gateway.url, key=KEY)


def trained_verified_and_attached_again(server: FakeGateway) -> int:
    """Does all that a program does with a run, and returns the policy version of its end."""
    with onbeat.train(server.spec) as run:
        assert [entry.number for entry in run] == [0, 1]
        assert run.result().state is JobState.SUCCEEDED
        assert run.verify().verified
        assert run.status.job_id == JOB
        assert len(run.metrics) == 2
    with onbeat.attach(JOB, run_dir=run.folder.run_root) as again:
        return again.result().policy_version


def test_a_run_is_used_within_a_running_event_loop_as_in_a_cell_of_a_notebook(gateway: FakeGateway) -> None:
    async def cell() -> int:
        return trained_verified_and_attached_again(gateway)

    assert asyncio.run(cell()) == 2
    assert stacks[0].num_stops == 1


def test_an_event_loop_goes_on_while_a_thread_of_it_has_the_run(gateway: FakeGateway) -> None:
    async def scenario() -> int:
        beats = 0
        training = asyncio.create_task(asyncio.to_thread(trained_verified_and_attached_again, gateway))
        while not training.done():
            await asyncio.sleep(0)
            beats += 1
        assert await training == 2
        return beats

    assert asyncio.run(scenario()) > 1
    assert stacks[0].num_stops == 1


def test_a_line_is_there_while_the_program_waits_and_gone_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress_line, "TextConsole", lambda stderr: TextConsole(file=screen, force_terminal=True))
    line = shown_for(True)
    assert isinstance(line, TerminalLine)
    line.update(None)
    line.update(progress())
    line.pause()
    assert "starting redis and every other process" in screen.getvalue()
    assert "job  running  reward 0.750" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the line is erased
    line.pause()
    assert isinstance(shown_for(None), StartLine)
    assert isinstance(shown_for(False), Hidden)


def test_a_program_off_a_terminal_gets_one_line_that_names_the_job_its_folder_and_its_page(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with on_own_stack(gateway, run_dir=tmp_path / "run") as run:
        run.result()
    device = "cpu: torch sees no GPU"
    folder = f"{JOB} runs in {tmp_path / 'run' / JOB}; device {device}; page {gateway.url}/#/jobs/{JOB}"
    assert capsys.readouterr().err == f"{folder}\n"
    at_gateway(gateway).close()
    assert capsys.readouterr().err == f"{JOB} is at {gateway.url}/#/jobs/{JOB}\n"
    at_gateway(gateway, progress=False).close()
    assert capsys.readouterr().err == ""


def test_a_notebook_has_one_output_that_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)

    def display(text: str, *, display_id: bool) -> Any:
        shown.append(text)
        return handle

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    output = shown_for(None)
    assert isinstance(output, NotebookOutput)
    for known in (None, progress(), progress()):
        output.update(known)
    output.pause()
    assert shown[0] == "<i>starting redis and every other process</i>"
    assert shown[1] == shown[2] == as_html(progress())
    assert "<b>job &lt;b&gt;</b>" in as_html(progress(name="job <b>"))
    assert "2 of 4 iterations" in shown[1]


def progress(name: str = "job") -> JobProgress:
    status = JobStatus(job_id=JOB, name=name, state=JobState.RUNNING, schedule="periodic", iterations=4, created_s=1.0)
    known = JobProgress(status)
    for event in events_of(JobState.RUNNING):
        known.apply(event)
    return known


def test_importing_onbeat_imports_nothing_heavy() -> None:
    heavy = "torch transformers numpy redis fastapi httpx rich msgspec contracts"
    program = f"import onbeat, sys; print(*[name for name in {heavy.split()} if name in sys.modules], sep=',')"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=HERE)
    assert told.stdout == "\n"
    slow = "torch transformers matplotlib fastapi"
    program = f"import onbeat, sys; onbeat.train; print(*[name for name in {slow.split()} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=HERE)
    assert told.stdout == "\n"


@pytest.mark.parametrize("package", [onbeat, onbeat.client], ids=lambda package: package.__name__)
def test_each_name_of_a_package_is_imported_from_the_module_that_its_table_names(package: ModuleType) -> None:
    assert sorted(package.MODULES) == sorted(package.__all__)
    for name, module in package.MODULES.items():
        part = getattr(package, name)
        assert (part.__name__, part.__module__) == (name, module)


def test_a_name_that_onbeat_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module onbeat has no attribute trian"):
        assert onbeat.trian  # pyright: ignore[reportAttributeAccessIssue]


def test_what_others_wrote_is_text_in_a_verdict() -> None:
    verdict = AuditVerdict(
        job_id=HOSTILE,
        verified=False,
        records=0,
        iterations=0,
        batches_trained=0,
        batches_evaluated=0,
        rewinds=0,
        digests_recomputed=0,
        gaps=(HOSTILE,),
    )
    console, shown = terminal()
    console.print(verdict_text(verdict))
    assert_is_text(shown.getvalue())
