"""One new kind of each, as a person would add it by docs/extend.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One place of a row, changed."""

    line: str
    """What goes into the table, the union, the list of names or the class there."""
    imports: str = ""
    above: str = ""
    """What stands above it: the type that the line names."""


@dataclass(frozen=True, kw_only=True)
class Addition:
    """One kind, added as its row says."""

    edits: tuple[Edit, ...]
    """One for each place of the row, in order."""
    files: tuple[str, ...] = ()
    """Contents of each new file of the row, in order."""
    says: Any = None
    """What the process in the copy must say of it."""


ADDITIONS: Mapping[str, Addition] = {
    "a loss": Addition(
        files=(
            """
from consumer.gradient.losses.base import TOKEN_MEAN, LossInputs, PolicyLoss, PolicyTerm


def reinforce(inputs: LossInputs) -> PolicyTerm:
    nowhere = inputs.loss_mask & False
    token_loss = -inputs.advantages.unsqueeze(1) * inputs.logprobs
    return PolicyTerm(token_loss=token_loss, clipped_low=nowhere, clipped_high=nowhere)


NOVEL = PolicyLoss(surrogate=reinforce, normaliser=TOKEN_MEAN)
""",
        ),
        edits=(
            Edit(line='"novel": NOVEL, ', imports="from consumer.gradient.losses.novel import NOVEL"),
            Edit(line='"novel": LossKind(clip_range=(0.1, 0.3)), '),
        ),
        says=[[0.1, 0.3], 5.0],
    ),
    "an advantage": Addition(
        files=(
            """
def halved(rewards, epsilon):
    return (rewards - rewards.mean(axis=1, keepdims=True)) / 2.0
""",
        ),
        edits=(
            Edit(
                line='"novel": Advantage(of_groups=halved), ',
                imports="from consumer.gradient.advantages.novel import halved",
            ),
            Edit(line='"novel": AdvantageKind(), '),
        ),
        says=[[0.25, -0.25]],
    ),
    "a data set": Addition(
        files=(
            """
from onbeat.prompts.datasets.examples import Example, ExampleSets


def load_novel(spec, request):
    example = Example(example_id="train/1", question=spec.question, reference=str(request.seed))
    return ExampleSets(train=(example,), evaluation=())
""",
        ),
        edits=(
            Edit(
                line="NovelDataset: load_novel, ",
                imports="from onbeat.prompts.datasets.novel import load_novel\n"
                "from contracts.spec_tables.datasets import NovelDataset",
            ),
            Edit(
                line=" | NovelDataset",
                above='class NovelDataset(DatasetTable, tag="novel", frozen=True, kw_only=True):\n'
                '    """One question."""\n\n'
                '    question: Line\n    """It."""\n'
                '    chat: ChatSpec | None = None\n    """A template."""\n',
            ),
        ),
        says=["why?", "3"],
    ),
    "a tracker": Addition(
        files=(
            """
class NovelTracker:
    def __init__(self, folder, spec):
        self.name = f"{folder.job_id} {spec.name}"

    def log(self, step, values):
        pass

    def close(self):
        pass
""",
        ),
        edits=(Edit(line=', "novel"'),),
        says="job-1 job",
    ),
    "an engine": Addition(
        files=(
            """
class NovelEngine:
    def __init__(self, setup, options):
        self.said = [setup.model.path, options.warmth]
""",
        ),
        edits=(
            Edit(
                line='NovelOptions: ("producer.engine.novel.engine", "NovelEngine"), ',
                imports="from contracts.engines import NovelOptions",
            ),
            Edit(
                line=" | NovelOptions",
                above='class NovelOptions(EngineOptions, tag="novel", frozen=True, kw_only=True):\n'
                '    """It samples nothing."""\n\n'
                "    @property\n    def is_reproducible(self) -> bool:\n        return True\n\n"
                '    warmth: float = 0.5\n    """It."""\n',
            ),
        ),
        says=["qwen3", 1.5],
    ),
    "a store of weights": Addition(
        files=(
            """
from onbeat.weights.files.store import FolderFiles, FolderStore, FolderWriter


class NovelWriter(FolderWriter):
    transport = "novel"


class NovelStore(FolderStore):
    def begin(self, plan):
        return NovelWriter(plan, self.folder.weight_root)


class NovelFiles(FolderFiles):
    pass
""",
        ),
        edits=(
            Edit(
                line='"novel": Store(trainer=lambda of: NovelStore(of.folder, wait_s=60.0), '
                "receiver=lambda root, *_: NovelFiles(root)), ",
                imports="from onbeat.weights.novel.store import NovelFiles, NovelStore",
            ),
            Edit(
                line=" | NovelWeights",
                above='class NovelWeights(Transport, tag="novel", frozen=True, kw_only=True):\n    """By pigeon."""\n',
            ),
        ),
        says=["WholePublisher", "NovelFiles", "novel", True],
    ),
    "a scorer (reward)": Addition(
        files=(
            """
def score(component, item):
    return component.bonus + len(item.completion)
""",
        ),
        edits=(
            Edit(
                line="NovelReward: Scorer(score=novel.score), ",
                imports="from contracts.rewards import NovelReward\nfrom reward_service.scorers import novel",
            ),
            Edit(
                line=" | NovelReward",
                above='class NovelReward(Component, tag="novel", frozen=True, kw_only=True):\n'
                '    """How long it is, and more."""\n\n'
                '    bonus: float = 0.5\n    """More."""\n',
            ),
        ),
        says={"novel": 5.0},
    ),
    "an environment": Addition(
        files=(
            """
from onbeat.environments.author import Environment, Reply


class Novel(Environment):
    def reset(self, task, seed):
        return f"say {seed}"

    def step(self, message, turn):
        return Reply("yes", reward=2.0, done=True)
""",
        ),
        edits=(),
        says=["say 3", 2.0, True],
    ),
    "an endpoint of the gateway": Addition(
        files=(
            """
from fastapi import APIRouter

router = APIRouter(prefix="/v1/novel")


@router.get("")
def novel() -> dict[str, str]:
    return {"said": "hello"}
""",
        ),
        edits=(Edit(line="novel.router, ", imports="from gateway.api import novel"),),
        says=[401, 200, {"said": "hello"}],
    ),
    "a transition in Redis": Addition(
        files=(
            """
-- novel: {by} -> {count}
return {redis.call('HINCRBY', COUNTERS, 'novel', a.by)}
""",
        ),
        edits=(Edit(line='"novel": (TRAINER,), '),),
        says=[3, 5],
    ),
    "a command": Addition(
        files=(
            '''
def novel(name: str) -> None:
    """Says hello."""
    print(f"hello {name}")
''',
        ),
        edits=(Edit(line='"novel": "novel", '),),
        says=[0, "hello you"],
    ),
    "a setting of the processes": Addition(
        edits=(Edit(line='novel_s: Start = 2.0\n    """It."""\n'),),
        says=[2.0, 7.5, "| `ONBEAT_NOVEL_S` | number > 0, ≤ 86400 | `2.0` | It. |"],
    ),
    "a key of a job": Addition(
        edits=(Edit(line='novel_prompts: Prompts = 2\n    """It."""\n'),),
        says=[2, 7, "| `novel_prompts` | integer ≥ 1, ≤ 4096 | `2` | It. |"],
    ),
    "a metric of an iteration": Addition(
        edits=(
            Edit(line="num_novel: int = number(lambda its: len(its.ordered))\n"),
            Edit(line='num_novel: int = 0\n    """Of them."""\n'),
        ),
        says=[1, 4.0],
    ),
}
