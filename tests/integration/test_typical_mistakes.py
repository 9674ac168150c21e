"""What a new user does wrong, each with the one line that names the field and the cure.

CLI        a spec, a flag or a variable, refused before anything is asked
STACK      what a running stack refuses: keys, ports, folders, jobs, models, data, plug-ins
TRAINER    what needs the model or the data: the job fails with the reason, before its first iteration
REWARD     what a reward function of one's own returns
INTERRUPT  Ctrl-C, at each phase
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

import consumer.trainer.job_run as job_run
from broker.connection.client import connect
from broker.fence import FenceState
from broker.job_store import JobStore
from broker.monitor import _generators_waited_for
from contracts.jobs import JobState
from contracts.monitor import GeneratorSeen
from contracts.rewards import PluginReward, RewardItem, Unscorable
from contracts.settings import StackSettings
from onbeat.base.process import child_process
from onbeat.base.process.waiting import Waiting
from onbeat.cli import run
from onbeat.client.spec_file import parse_spec
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import MODULES, EmbeddedStack
from reward_service.scorers.rubric import score_component
from tests.builders import job_spec
from tests.until import until

pytestmark = pytest.mark.usefixtures("restored_process")

MODEL = Path(__file__).parents[2] / "configs" / "models" / "two-digit-addition"
JOB = """
name = "mistaken"
iterations = 2
model = { path = "model" }
dataset = { type = "jsonl", train_path = "train.jsonl" }
reward = { components = [{ type = "exact" }] }
rollout = { batches_per_iteration = 1, prompts_per_batch = 2, group_size = 2, sampling = { max_new_tokens = 5 } }
evaluation = { num_prompts = 0 }
timeouts = { no_generator_s = 0.2 }
"""
REWARDS = """
def nothing(**_): pass
def words(**_): return "0.5"
def raises(*, completion, **_): return {}["answer"]
def short(text): return 1.0
"""
SUBMIT = ["submit", "job.toml", "--set"]

CLI = {
    "a misspelt key": ([*SUBMIT, "iteratons=3"], r"iteratons: unknown key \(did you mean iterations\?"),
    "a misspelt key of a table": (
        [*SUBMIT, "optimizer.learning_rat=3"],
        r"optimizer\.learning_rat: unknown key \(did you mean learning_rate\?",
    ),
    "a key of another type of data set": (
        [*SUBMIT, "dataset.task=chess"],
        r'dataset\.task: unknown key \(only with type = "reasoning_gym"\)',
    ),
    "an unknown kind of reward": (
        [*SUBMIT, "reward.components=[{type='exakt'}]"],
        r"reward\.components\[0\]\.type: invalid value 'exakt' \(did you mean exact\? One of exact, numeric, ",
    ),
    "an unknown schedule": ([*SUBMIT, "schedule=async"], r"schedule: .*'async' \(one of bounded, colocated, "),
    "a word for a number": ([*SUBMIT, "iterations=many"], r"iterations: expected `int`, got `str`"),
    "a number out of its range": (
        [*SUBMIT, "optimizer.learning_rate=-1"],
        r"optimizer\.learning_rate: expected `float` > 0\.0",
    ),
    "a group of one": (
        [*SUBMIT, "rollout.group_size=1"],
        r"rollout\.group_size: must be 2 or more .* \(raise group_size, or ",
    ),
    "a lag where there is none": ([*SUBMIT, "max_policy_lag=1"], r"max_policy_lag: 1 .* \(set it to 0, or schedule = "),
    "a setting without its value": (
        [*SUBMIT, "seed"],
        r"--set: `seed` is not key\.path=value \(write it as --set optimizer",
    ),
    "a spec that isn't there": (
        ["submit", "jbo.toml"],
        r"jbo\.toml: does not exist \(`onbeat init` writes a project with one; those that come with Onbeat are in ",
    ),
    "a spec that is no TOML": (["submit", "torn.toml"], r"torn\.toml: is not TOML: .*line 1, column 10"),
    "a misspelt flag": (["submit", "job.toml", "--wiat"], r"No such option: --wiat .*--wait"),
    "a misspelt command": (["sumbit", "job.toml"], r"No such command 'sumbit'\. Did you mean 'submit'\?"),
    "a misspelt variable": (["ONBEAT_ENGIN=vllm", "jobs"], r"ONBEAT_ENGIN: .*\(did you mean ONBEAT_ENGINE\?\)"),
    "a variable with a word for a number": (["ONBEAT_THREADS=all", "jobs"], r"ONBEAT_THREADS: `all` is not a number"),
    "no stack": (["jobs", "--run-dir", "none"], r"gateway: no stack is running in none \(start one with `onbeat up`"),
    "a gateway that is away": (
        ["jobs", "--gateway", "http://127.0.0.1:9"],
        r"gateway: no answer .*check that `onbeat up` is run",
    ),
    "a gateway without http": (
        ["jobs", "--gateway", "127.0.0.1:9"],
        r"gateway: .* is not an address \(write it as http://HOST:PORT\)",
    ),
    "a run folder that is a file": (["up", "--run-dir", "job.toml"], r"--run-dir: .*\(choose a folder that you can"),
    "a Redis that is away": (
        ["ONBEAT_REDIS_URL=redis://127.0.0.1:9/0", "up", "--run-dir", "own"],
        r"redis: Redis does not answer: .*\(check that it is running and that ONBEAT_REDIS_URL is right\)",
    ),
    "a profile that isn't there": (["up", "--profile", "none.toml"], r"--profile: none\.toml: No such file"),
}
STACK = {
    "another key": (["ONBEAT_API_KEY=other", "jobs"], r"--api-key: the key is wrong \(give the stack's, or its f"),
    "no key": (
        ["jobs", "--gateway", "URL", "--run-dir", "none"],
        r"--api-key: a bearer key is needed \(give the stack's, or its f",
    ),
    "a port in use": (
        ["up", "--port", "PORT", "--run-dir", "own"],
        r"--port: port \d+ is in use \(choose another, or ",
    ),
    "a second stack in a folder": (
        ["up"],
        r"--run-dir: .*: process \d+ runs a stack there.* \(stop it by `onbeat down`, or choose ",
    ),
    "a job that isn't there": (["watch", "job-0123456789ab"], r"job_id: there is no job .*\(`onbeat jobs` lists them"),
    "a resume of a running job": (["resume", "JOB"], r"state: a running job cannot be resumed \(wait for its end\)"),
    "the removal of a running job": (["delete", "JOB", "--yes"], r"state: a running job .*removed \(cancel it first"),
    "a removal without a yes": (["delete", "JOB"], r"--yes: .*cannot be restored.* \(add --yes to delete"),
    "a model's name on a hub": (
        [*SUBMIT, "model.path=Qwen/Qwen3-0.6B"],
        r"model\.path: there is no Qwen/Qwen3-0\.6B in the model root /.* \(name a path from one of these folders; .*; "
        r'nothing is downloaded by a path; of the hub it is written as "hub:Qwen/Qwen3-0\.6B"\)',
    ),
    "a model's folder without a model": (
        [*SUBMIT, "model.path=empty"],
        r"model\.path: .*/empty` has no config\.json \(name",
    ),
    "a model without a tokenizer": (
        [*SUBMIT, "model.path=wordless"],
        r"model\.path: .*no tokenizer files \(save the tokeni",
    ),
    "a model without weights": (
        [*SUBMIT, "model.path=weightless"],
        r"model\.path: .*no weights \(it needs .*model\.safetensors\)",
    ),
    "a model without a chat template": (
        [*SUBMIT, "dataset.chat={}"],
        r"dataset\.chat: the model's tokenizer has no chat template \(leave dataset\.chat out, and use",
    ),
    "a line that is no JSON": (
        [*SUBMIT, "dataset.train_path=torn.jsonl"],
        r"dataset\.train_path: .*torn\.jsonl:2: the line is no JSON: .*\(write one JSON object a line: ",
    ),
    "a line without a reference": (
        [*SUBMIT, "dataset.train_path=half.jsonl"],
        r"dataset\.train_path: .*half\.jsonl:1: there is no column `reference` .*name the column by dataset",
    ),
    "more prompts held out than there are": (
        [*SUBMIT, "evaluation.num_prompts=64"],
        r"evaluation\.num_prompts: 64 of the 4 lines .*\(use at most 3, or name a dataset\.evaluation_path\)",
    ),
    "a path out of the model root": ([*SUBMIT, "model.path=/etc"], r"model\.path: .* leads out .*ONBEAT_EXTRA_ROOTS\)"),
    "data that isn't there": (
        [*SUBMIT, "dataset.train_path=tran.jsonl"],
        r"dataset\.train_path: there is no tran\.jsonl in the model root /.* \(name a path from one of these folders; ",
    ),
    "a reward that isn't installed": (
        [*SUBMIT, "reward.components=[{type='plugin', entry_point='brevity'}]"],
        r"reward\.components\[0\]\.entry_point: no package offers `brevity` .*installed: .*nothing",
    ),
    "a reward whose module isn't there": (
        [*SUBMIT, "reward.components=[{type='exact'}, {type='plugin', entry_point='lost'}]"],
        r"reward\.components\[1\]\.entry_point: `lost` .* cannot be imported: ModuleNotFoundError.*\(fix the package",
    ),
    "a reward with other arguments": (
        [*SUBMIT, "reward.components=[{type='plugin', entry_point='short'}]"],
        r"reward\.components\[0\]\.entry_point: `short` can't be called: it needs `text` \(it is given those of prompt",
    ),
    "a reward that returns None": (
        [*SUBMIT, "reward.components=[{type='plugin', entry_point='nothing'}]"],
        r"reward\.components\[0\]\.entry_point: .*`nothing` returned None, not a number: return a float on every path",
    ),
    "a reward that returns a text": (
        [*SUBMIT, "reward.components=[{type='plugin', entry_point='words'}]"],
        r"reward\.components\[0\]\.entry_point: .*`words` returned str, not a number: return a float on every path",
    ),
    "an unknown environment": (
        [*SUBMIT, "environment={name='gess', max_tokens=64}"],
        r"environment\.name: no package offers `gess` .*\(install its package there; installed: agent, ",
    ),
}
TRAINER: dict[str, tuple[list[str], str]] = {
    "a prompt that is too long": (
        ["rollout.max_prompt_tokens=2"],
        r"rollout\.max_prompt_tokens: prompt train/\d has \d tokens, .* or leave such prompts out by rollout",
    ),
    "an answer beyond the model's context": (
        ["rollout.sampling.max_new_tokens=4000"],
        r"rollout\.sampling\.max_new_tokens: .* the model's context holds 512 \(lower it, ",
    ),
    "a tracker that isn't installed": (
        ["trackers=['wandb']"],
        r'trackers: `wandb` is not installed .*\(pip install "onbeat\[wandb\]"\)',
    ),
    "no generator": ([], r"waited 2 s for a live generator \(start one with `python -m producer`, raise timeouts\.n"),
}
REWARD = {"a reward that raises": ("raises", r"KeyError: 'answer'")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(write_root(folder)))
        patch.setenv("PYTHONPATH", str(folder / "site"))
        yield folder


def write_root(folder: Path) -> Path:
    """Makes the folder a model root as a new user has it; returns where its package of rewards is."""
    for name in ("model", "wordless", "weightless"):
        shutil.copytree(MODEL, folder / name)
    for path in (*(folder / "wordless").glob("tokenizer*"), *(folder / "weightless").glob("*.safetensors")):
        path.unlink()
    (folder / "empty").mkdir()
    (folder / "job.toml").write_text(JOB)
    (folder / "torn.toml").write_text('name = "x\n')
    lines = [f'{{"prompt": "1+{number}=", "reference": "{number + 1}"}}' for number in range(4)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "torn.jsonl").write_text(f'{lines[0]}\n{{"prompt" "1+1="}}')
    (folder / "half.jsonl").write_text('{"prompt": "1+1="}')
    info = folder / "site" / "mistaken-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mistaken\nVersion: 1.0\n")
    offers = "".join(f"{name} = mistaken:{name}\n" for name in ("nothing", "words", "raises", "short"))
    (info / "entry_points.txt").write_text(f"[onbeat.rewards]\nlost = not_there:lost\n{offers}")
    (folder / "site" / "mistaken.py").write_text(REWARDS)
    return folder / "site"


@pytest.fixture(scope="module")
def stack(root: Path) -> Iterator[EmbeddedStack]:
    """A gateway and a reward service with their Redis, in which no job is trained."""
    modules = {name: MODULES[name] for name in ("gateway", "reward_service")}
    with EmbeddedStack(StackOptions(run_root=root / "runs", model_root=root, threads=1), modules=modules) as started:
        yield started


@pytest.fixture(scope="module")
def running_job(stack: EmbeddedStack) -> str:
    assert stack.redis is not None
    with closing(connect(StackSettings(redis_url=stack.redis.url))) as broker:
        jobs = JobStore(broker)
        job_id, _ = jobs.create(parse_spec(tomllib.loads(JOB)))
        jobs.move(job_id, JobState.RUNNING)
    return job_id


def told(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs `NAME=VALUE … command …`, and returns its one line."""
    while words[0].startswith("ONBEAT_"):
        name, _, value = words[0].partition("=")
        monkeypatch.setenv(name, value)
        words = words[1:]
    assert run(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("mistake", CLI)
def test_what_is_wrong_by_itself_is_refused_at_once(
    mistake: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(root)
    words, expected = CLI[mistake]
    assert re.match(f"onbeat: (?:spec: )?{expected}", line := told(words, monkeypatch, capsys)), line


@pytest.mark.parametrize("mistake", STACK)
def test_what_a_stack_refuses(
    mistake: str,
    stack: EmbeddedStack,
    running_job: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(root)
    words, expected = STACK[mistake]
    stands_for = {"JOB": running_job, "PORT": stack.gateway_url.rpartition(":")[2], "URL": stack.gateway_url}
    line = told([stands_for.get(word, word) for word in words], monkeypatch, capsys)
    assert re.match(f"onbeat: {expected}", line), line


@pytest.mark.parametrize("mistake", TRAINER)
def test_what_a_trainer_finds_in_model_and_data_fails_the_job(
    mistake: str, root: Path, settings: StackSettings
) -> None:
    changes, expected = TRAINER[mistake]
    settings = replace(settings, model_root=str(root))
    with closing(connect(settings)) as broker:
        jobs = JobStore(broker)
        job_id, _ = jobs.create(parse_spec(tomllib.loads(JOB), changes))
        job_run.train(settings, broker, jobs.spec(job_id), job_id)
        fields = jobs.fields(job_id)
    assert fields["state"] == b"failed"
    assert re.match(expected, reason := fields["reason"].decode()), reason


def test_a_job_without_a_generator_says_so_while_it_waits() -> None:
    fence = FenceState(
        state="open", committed=-1, versions={}, trainer_epoch=1, lease_until_s=0.0, engine="torch 2, a CPU"
    )
    spec = job_spec(deterministic=True)
    assert "none is running: start one with `onbeat up`" in _generators_waited_for("job-1", spec, fence, [])
    other = GeneratorSeen(worker_id="g1", engine="torch 2, a GPU", wrong_engine=("job-1",))
    assert _generators_waited_for("job-1", spec, fence, [other]) == (
        "a live generator of the kind of engine that samples this job (torch 2, a CPU); those that live have "
        "(torch 2, a GPU)"
    )
    assert _generators_waited_for("job-1", job_spec(deterministic=False), fence, [other]) == ""


@pytest.mark.parametrize("mistake", REWARD)
@pytest.mark.usefixtures("root")
def test_what_a_reward_of_ones_own_returns_names_the_function_and_the_cure(mistake: str) -> None:
    name, expected = REWARD[mistake]
    item = RewardItem(prompt="1+1=", completion="2", reference="2")
    result = score_component("plugin", PluginReward(entry_point=name), item)
    assert isinstance(result, Unscorable)
    assert re.search(expected, result.detail)


def interrupted(root: Path, *words: str, when: str, module: str = "onbeat") -> tuple[int, str]:
    """Exit code and last words of a command that gets Ctrl-C once this stands in its output."""
    command = [sys.executable, "-X", "importtime", "-m", module, *words]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        waiting = Waiting(f"`{when}` of {module}", deadline_s=120.0)
        while when not in process.stdout.readline():
            waiting.poke()
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stdout if not line.startswith("import time:")]
        return process.wait(120), "".join(said)


@pytest.mark.parametrize("module", ["onbeat", "consumer", *MODULES.values()])
def test_ctrl_c_while_a_program_is_imported_is_no_traceback(module: str, root: Path) -> None:
    began = interrupted(root, "jobs", when=" onbeat.base.process.own_packages\n", module=module)
    assert began == (-signal.SIGINT, "")


def test_ctrl_c_while_a_stack_starts_ends_what_has_started(root: Path) -> None:
    folder = root / "begun"
    process = subprocess.Popen(
        [sys.executable, "-m", "onbeat", "up", "--run-dir", folder.name],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until((folder / "logs" / "gateway.log").exists, "the log of a gateway that starts")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, said) == (0, "stopping every process\n")
    assert not child_process.marked("ONBEAT_RUN_ROOT", str(folder))


def test_ctrl_c_while_one_waits_for_a_job_says_that_it_goes_on(
    stack: EmbeddedStack, root: Path, running_job: str
) -> None:
    code, said = interrupted(root, "watch", running_job, when="job queued")
    assert code == 130
    assert f"{running_job} goes on: onbeat watch {running_job}, or onbeat cancel {running_job}\n" in said
    assert said.endswith("onbeat: interrupted\n")
