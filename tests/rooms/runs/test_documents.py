"""The blocks of the documents for Python do what stands there; no process is started (README's: a real program)."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

import onbeat
from consumer.gradient.losses.base import PolicyLoss
from contracts.environments.messages import Message, ToolCall
from contracts.environments.service import EnvironmentTable, table_of
from contracts.rewards import MathVerifyReward, PluginReward
from contracts.spec.datasets import HuggingFaceDataset, JsonlDataset, RowColumns
from contracts.spec.job import JobSpec
from contracts.spec.rules import judged
from onbeat.training.inputs import put_below
from onbeat.training.run import Run
from onbeat.training.start import reading_of
from reward_service.player.player import Playable, load
from tests.e2e.stand_in_gateway import FakeGateway
from tests.rooms.runs.running_stack import running_gateway

DOCS = Path(__file__).parents[3] / "docs"
MODEL = DOCS.parent / "configs" / "models" / "two-digit-addition"


def blocks(page: str, language: str, containing: str) -> str:
    """The one block of a page that has this text."""
    found = re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    (block,) = [block for block in found if containing in block]
    return block


def run_block(text: str, **names: Any) -> dict[str, Any]:
    """Runs it as a cell of a notebook is: its functions have their source."""
    cell = f"<cell {hash(text)}>"
    linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    names = {"__name__": "__main__"} | names
    exec(compile(text, cell, "exec"), names)
    return names


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGateway]:
    monkeypatch.delenv("ONBEAT_GATEWAY_URL", raising=False)
    monkeypatch.setenv("ONBEAT_RUN_ROOT", str(tmp_path / "runs"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-model").symlink_to(MODEL)  # that of the pages' jobs, in the folder of the reader
    monkeypatch.chdir(tmp_path)
    with running_gateway(monkeypatch) as server:
        yield server


def test_start_trains_the_first_job_with_a_function_and_rows(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[str] = []
    monkeypatch.setattr(Run, "save_model", lambda run, directory: saved.append(directory))
    (tmp_path / "my-job.toml").write_text(blocks("commands.md", "toml", 'name = "word problems"'))
    run_block(blocks("python.md", "python", "reward=brief"))
    assert capsys.readouterr().out.split()[:5] == ["0", "0.5", "1", "0.75", "True"]
    assert saved == ["my-model"]
    ((_, spec),) = gateway.submitted
    (component,) = spec.reward.components
    assert isinstance(component, PluginReward)
    assert isinstance(spec.dataset, JsonlDataset)
    assert (spec.iterations, component.entry_point, spec.dataset.chat is not None) == (50, "brief", True)
    assert len(Path(spec.dataset.train_path).read_text().splitlines()) == 1600


def test_start_trains_with_a_tool_of_the_program(gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "my-job.toml").write_text(
        blocks("commands.md", "toml", 'name = "word problems"').replace("chat = {}", "")
    )
    run_block(blocks("python.md", "python", "tools=[look_up"), onbeat=onbeat)
    ((_, spec),) = gateway.submitted
    environment = spec.environment
    assert environment is not None
    assert environment.params == {"tools": "look_up,calculator", "answer": "text"}
    source = Path(environment.file).read_text()
    playable = load(table_of(replace(environment, source=source)))
    assert isinstance(playable, Playable)
    observation = playable.make().reset({"question": "What is the capital of Japan?", "reference": "Tokyo"}, 0)
    assert [tool.name for tool in observation.tools] == ["look_up", "calculate"]


def played(name: str, source: str, **params: Any) -> Any:
    playable = load(EnvironmentTable(name=name, source=source, params=params))
    assert isinstance(playable, Playable)
    return playable.make()


def assistant(content: str, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls)


def test_the_environments_of_their_page_are_played_as_it_says() -> None:
    guess = played("GuessTheNumber", blocks("environments.md", "python", "class GuessTheNumber"), largest=10)
    assert guess.reset({}, 42).messages == "Guess my number, from 0 to 9."
    assert (guess.step(assistant("3"), 0).reward, guess.step(assistant(" 2 "), 1).reward) == (0.0, 1.0)
    capitals = played("Capitals", blocks("environments.md", "python", "class Capitals"), answer="text")
    capitals.reset({"question": "The capital of France?", "reference": "Paris"}, 0)
    call = ToolCall(name="look_up", arguments='{"country": "France"}')
    assert capitals.step(assistant("", call), 0).messages[0].content == "Paris"
    assert capitals.step(assistant("Paris"), 1).reward == 1.0


class Corridor:
    """Has the interface of a Gymnasium environment: the agent must step forward as often as the seed's last digit."""

    action_space = SimpleNamespace(n=2)  # 0 stands still, 1 steps forward

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        assert 0 <= seed < 2**31
        self.left = seed % 10
        self.num_steps = 0
        return self.left, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.num_steps += 1
        self.left -= action
        return self.left, float(self.left == 0), self.left == 0, self.num_steps == 3, {}


def test_an_environment_of_gymnasium_is_played_by_the_class_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = SimpleNamespace(make=lambda env: {"Corridor-v1": Corridor}[env]())
    monkeypatch.setitem(sys.modules, "gymnasium", gymnasium)
    source = blocks("environments.md", "python", "class Numbered")

    corridor = played("Numbered", source, env="Corridor-v1")
    observation = corridor.reset({}, 2**31 + 2)
    assert observation.messages == "You see 2. Answer with an action from 0 to 1."
    replies = [corridor.step(assistant(text), turn) for turn, text in enumerate(["2", "right", "1", " 1 "])]
    assert [reply.messages for reply in replies[:2]] == ["That is no action."] * 2
    assert [(reply.messages, reply.reward, reply.done) for reply in replies[2:]] == [
        ("You see 1.", 0.0, False),
        ("You see 0.", 1.0, True),
    ]

    corridor.reset({}, 9)
    replies = [corridor.step(assistant("0"), turn) for turn in range(3)]
    assert [(reply.done, reply.truncated) for reply in replies] == [(False, False), (False, False), (True, True)]


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """What `onbeat.train` is given in this test, which trains nothing."""
    specs = []

    def train(**given: Any) -> Any:
        specs.append(judged(reading_of(None, given, put=put_below(tmp_path / "inputs"))))
        return type("Trained", (), {"save_model": lambda self, directory: None})()

    monkeypatch.setattr(onbeat, "train", train, raising=False)
    return specs


def test_a_job_of_trl_is_the_job_beside_it(specs: list[JobSpec]) -> None:
    rewards = blocks("from-trl.md", "python", "def right(completions")
    names = run_block(rewards)
    text = blocks("from-trl.md", "python", "# Onbeat, with the same `right`")
    run_block(text, onbeat=onbeat, right=names["right"], dataset=[{"prompt": "1+1=", "reference": "2"}] * 100)
    (spec,) = specs
    assert (spec.rollout.group_size, spec.rollout.sampling.max_new_tokens, spec.iterations) == (8, 256, 200)
    assert (spec.algorithm.kl_coefficient, spec.algorithm.loss) == (0.04, "dapo")


def test_the_job_of_the_hub_is_a_spec_with_its_names(specs: list[JobSpec]) -> None:
    """tests/rooms/hub/test_job_of_the_hub.py trains such a job, from a hub on loopback."""
    run_block(blocks("hub.md", "python", '"hub:Qwen/Qwen3-0.6B"'))
    (spec,) = specs
    assert isinstance(spec.dataset, HuggingFaceDataset)
    assert isinstance(spec.dataset.columns, RowColumns)
    assert spec.model.path == "hub:Qwen/Qwen3-0.6B"
    folder = "hub:datasets/openai/gsm8k/main"
    assert spec.dataset.files() == {"path": f"{folder}/train", "evaluation_split": f"{folder}/test"}
    assert (spec.dataset.columns.prompt, spec.dataset.columns.reference_after) == ("question", "####")
    assert [type(component) for component in spec.reward.components] == [MathVerifyReward]
    assert (spec.iterations, spec.rollout.sampling.max_new_tokens) == (100, 256)


@pytest.mark.parametrize("page", ["from-trl.md", "from-verl.md", "from-prime-rl.md"])
def test_each_key_that_a_page_of_names_gives_as_ours_is_one(page: str) -> None:
    known = set(re.findall(r"^\| `([\w.]+)` \|", (DOCS / "configuration.md").read_text(), re.MULTILINE))
    rows = [row.split(" | ") for row in (DOCS / page).read_text().splitlines() if row.startswith("`") and " | " in row]
    assert len(rows) > 20
    for row in rows:
        for name in re.findall(r"`([a-z_.]+)`", row[1]):
            parts = name.split(".")
            assert parts[-1] in known, f"{page}: {name}"


def test_start_loads_the_exported_model_and_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my-model").symlink_to(MODEL)
    monkeypatch.chdir(tmp_path)
    run_block(blocks("commands.md", "python", "from_pretrained"))
    assert re.match(r"12\+34=\d", capsys.readouterr().out)


def test_the_plug_ins_of_extend_are_taken_as_they_stand() -> None:
    brevity = run_block(blocks("extend.md", "python", "def brevity"))["brevity"]
    assert (brevity("short"), brevity("long " * 20)) == (1.0, 0.0)
    shortest = run_block(blocks("extend.md", "python", "def shortest"))["shortest"]
    assert shortest(completions=["aa", "b", "ccc", "cc"], group_size=2) == [0.0, 1.0, 0.0, 1.0]
    assert isinstance(run_block(blocks("extend.md", "python", "def reinforce"))["MINE"], PolicyLoss)
    train, held_out = run_block(blocks("extend.md", "python", "def riddles"))["riddles"](
        params={"count": 5}, num_evaluation=2, seed=0
    )
    assert [example.question for example in held_out] == ["0+0=", "1+1="]
    assert [example.reference for example in train] == ["4", "6", "8"]


def test_the_function_of_log_probs_of_extend_computes_those_of_the_model() -> None:
    """tests/integration/test_client.py has a generator that shows versions by it."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    given: list[Any] = []
    producer = SimpleNamespace(proves=lambda *arguments: given.extend(arguments))
    text = blocks("extend.md", "python", "producer.proves(model, logprobs)")
    logprobs = run_block(text, torch=torch, model=model, producer=producer)["logprobs"]
    assert given == [model, logprobs]
    token_ids = np.arange(14, dtype=np.int64).reshape(2, 7) % model.config.vocab_size
    computed = logprobs(token_ids, 3)
    assert computed.shape == (2, 3)
    for row, ids in enumerate(torch.from_numpy(token_ids)):
        expected = model(input_ids=ids[None]).logits[0].log_softmax(dim=-1)
        for place in range(3):
            assert computed[row, place].item() == pytest.approx(expected[3 + place, ids[4 + place]].item(), abs=1e-4)


RUN = {
    "environments.md": ("class GuessTheNumber", "class Capitals", "class Numbered"),
    "extend.md": (
        "def brevity",
        "def shortest",
        "def reinforce",
        "def riddles",
        "producer.proves(model, logprobs)",
    ),
    "from-trl.md": ("# Onbeat, with the same `right`", "def right(completions"),
    "commands.md": ("from_pretrained",),
    "hub.md": ('"hub:Qwen/Qwen3-0.6B"',),
    "python.md": ("reward=brief", "tools=[look_up"),
}
"""Page → what tells its Python blocks apart that this module runs; tests/rooms/runs/test_train_process.py runs
README's."""
PARTS = {
    "change.md": {"class ConfidenceTerm": "tests/unit/consumer/gradient/terms/test_a_new_term.py"},
    "environments.md": {"episode.base_url": "tests/rooms/environments/test_agents.py"},
    "extend.md": {
        "async def serve_and_train": "tests/integration/test_client.py",
        'Stage("job-1", "variety", redis_url': "tests/integration/test_client.py",
        "as stage:\n    for rows in stage:": "examples/stage.py",
        "producer.make_model()": "examples/generator.py",
        "consumer.begin(model)": "examples/trainer.py",
        "class Drawing": "tests/rooms/trackers/test_trackers.py",
    },
    "from-trl.md": {"# TRL\ntrainer =": "tests/contract/test_trl_job.py"},
    "start.md": dict.fromkeys(
        ("from itertools import product", "def all_or_half"), "tests/rooms/projects/test_tutorial.py"
    ),
}
"""Blocks that leave out what a whole program has → the program that does the same, which a test runs, or that test."""


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_each_python_block_is_run_or_is_a_part_of_what_is_run(page: str) -> None:
    """docs/life-of-a-batch.md has excerpts, which tests/unit/docs/test_life_of_a_batch.py compares with the code."""
    found = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    marks = [*RUN.get(page, ()), *PARTS.get(page, ())]
    assert all((DOCS.parent / path).is_file() for path in PARTS.get(page, {}).values())
    for block in found if page != "life-of-a-batch.md" else ():
        compile(block.replace("…", "..."), page, "exec")
        assert sum(mark in block for mark in marks) == 1, block
    assert all(sum(mark in block for block in found) == 1 for mark in marks)
