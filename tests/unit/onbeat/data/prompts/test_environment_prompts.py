"""Prompts that an environment opens: what they hold, and what is refused before the first token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from contracts.encoding.arrays import unpack_int32
from contracts.environments.messages import Message, Tool, messages_digest
from contracts.environments.service import EnvironmentFacts, Failure, FailureReason, InitialObservation, Task
from contracts.errors import InvalidInput
from contracts.rollouts import Prompt
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.source import PromptSource
from tests.builders import char_tokenizer, job_spec
from tests.refusals import refusal_of
from tests.unit.onbeat.data.rendering.chat_models import CHATML, FORGETFUL, chat_tokenizer

TOKENIZER = char_tokenizer()
PLAYED = "dataset.sources[1].environment"
"""The table of `environment_spec(is_in_mixture=True)`."""


class Service:
    """The reward service: an initial observation says its task and seed."""

    def __init__(self, *, deterministic: bool = True, problem: str = "", opens: str = "{split} {index}") -> None:
        self.deterministic = deterministic
        self.problem = problem
        self.opens = opens
        self.tools: tuple[Tool, ...] = ()
        self.failures: list[FailureReason] = []
        self.tasks: list[Task] = []
        self.repeated_tasks: list[Task] = []

    def facts(self, environment: EnvironmentSpec) -> EnvironmentFacts:
        if environment.name != "known":
            raise InvalidInput(f"`{environment.name}` is no environment", field="environment.name")
        return EnvironmentFacts(deterministic=self.deterministic, version="1")

    def observations(self, environment: EnvironmentSpec, tasks: Sequence[Task]) -> list[InitialObservation | Failure]:
        self.tasks += tasks
        return [self._observation(task) for task in tasks]

    def repeatability(self, environment: EnvironmentSpec, tasks: Sequence[Task]) -> str:
        self.repeated_tasks += tasks
        return self.problem

    def _observation(self, task: Task) -> InitialObservation | Failure:
        if self.failures:
            return Failure(reason=self.failures.pop(), detail="as asked")
        text = self.opens.format(**json.loads(task.task))
        return InitialObservation(messages=(Message(role="user", content=text),), tools=self.tools)


def environment_spec(*, is_in_mixture: bool = False, **changes: Any) -> JobSpec:
    """is_in_mixture: the environment plays the second source of two."""
    environment = changes.pop("environment", {})
    if environment is not None:
        environment = {"name": "known", "renderer": "text", "max_tokens": 32} | environment
    values: dict[str, Any] = {"dataset": {"type": "environment", "num_train_prompts": 20}, "reward__components": []}
    if is_in_mixture:
        tasks = {"name": "tasks", "dataset": values["dataset"], "environment": environment}
        sums = {"name": "sums", "dataset": {"type": "addition"}}
        values["reward__components"] = [{"type": "exact", "sources": ["sums"]}]
        values["dataset"], environment = {"type": "mixture", "sources": [sums, tasks]}, None
    return job_spec(environment=environment, **(values | changes))


def source(service: Service | None, *, tokenizer: Any = TOKENIZER, context_tokens: int = 512, **changes: Any) -> Any:
    asked = environment_spec(**changes)
    examples, end_ids = job_examples(asked, SpecRoot(Path())), [tokenizer.eos_token_id]
    return PromptSource(
        examples, spec=asked, tokenizer=tokenizer, context_tokens=context_tokens, environments=service, end_ids=end_ids
    )


def all_prompts(made: PromptSource) -> list[Prompt]:
    return [*made.training_prompts(0), *made.evaluation_prompts()]


def test_a_prompt_is_its_observation_and_says_how_a_session_begins_with_it() -> None:
    service = Service()
    prompts = all_prompts(source(service))
    assert len(service.tasks) == 28
    for prompt in prompts:
        assert prompt.environment
        task = json.loads(prompt.environment.task)
        assert prompt.prompt_id == f"{task['split']}/{task['index']}"
        text = f"{task['split']} {task['index']}"
        assert TOKENIZER.decode(unpack_int32(prompt.token_ids)) == text == prompt.text
        assert prompt.environment.observation_digest == messages_digest((Message(role="user", content=text),))
    assert {prompt.prompt_id.partition("/")[0] for prompt in prompts} == {"train", "evaluation"}


def test_a_seed_is_of_the_job_and_the_task_and_held_out_ones_are_the_same_in_every_job() -> None:
    seeds = [
        {prompt.prompt_id: prompt.environment.seed for prompt in all_prompts(source(Service(), seed=seed))}
        for seed in (0, 0, 1)
    ]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == len(seeds[0])
    for name in set(seeds[0]) & set(seeds[2]):
        assert (seeds[0][name] == seeds[2][name]) == name.startswith("evaluation/")


def test_a_task_of_a_data_set_has_its_question_and_reference() -> None:
    service = Service(opens="{question}")
    prompts = all_prompts(source(service, dataset={"type": "addition"}))
    for prompt in prompts:
        task = json.loads(prompt.environment.task)
        assert task == {"question": prompt.text, "reference": prompt.reference, "entry": ""}
        assert prompt.reference


def test_the_job_s_environment_opens_the_tasks_of_a_further_set_too() -> None:
    of_set = {"name": "hard", "dataset": {"type": "environment"}, "num_prompts": 3}
    *_, first, second, third = all_prompts(source(Service(), evaluation__sets=[of_set]))
    assert {prompt.source for prompt in (first, second, third)} == {"hard"}
    assert [prompt.text for prompt in (first, second, third)] == ["evaluation 0", "evaluation 1", "evaluation 2"]


def test_a_source_s_environment_opens_its_tasks_and_prompts_of_others_need_room_for_one_turn() -> None:
    """A sum of six characters and a trajectory of 32 tokens would not fit."""
    service = Service(opens="{index}")
    made = source(service, context_tokens=35, is_in_mixture=True)
    assert made.environment == "tasks: 1"
    assert {prompt.source: bool(prompt.environment) for prompt in all_prompts(made)} == {"tasks": True, "sums": False}
    assert {task["split"] for task in map(json.loads, (one.task for one in service.tasks))} == {"train", "evaluation"}


def test_an_environment_that_is_not_deterministic_is_refused_in_a_deterministic_job_only() -> None:
    with refusal_of("deterministic", match="is not deterministic"):
        source(Service(deterministic=False))
    assert all_prompts(source(Service(deterministic=False), deterministic=False))


def test_a_repeated_task_that_dies_is_named_before_anything_is_opened() -> None:
    service = Service(problem="the initial observation of train/0 differs")
    with pytest.raises(InvalidInput, match="doesn't behave the same twice: the initial observation of train/0 differs"):
        source(service)
    assert (len(service.repeated_tasks), service.tasks) == (4, [])


@pytest.mark.parametrize(
    ("failures", "is_repaired"),
    [(["timeout"], True), (["crashed", "lost", "raised"], True), (["bad_task"], False), (["timeout"] * 80, False)],
)
def test_an_observation_that_fails_is_asked_for_again_where_that_can_help(
    failures: list[FailureReason], is_repaired: bool
) -> None:
    service = Service()
    service.failures = failures
    if is_repaired:
        assert len(all_prompts(source(service))) == 16
        return
    with pytest.raises(InvalidInput, match=f"does not open train/0: {failures[0]}: as asked"):
        source(service)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("rollout.max_prompt_tokens", {"rollout__max_prompt_tokens": 6}),
        ("environment.max_tokens", {"context_tokens": 38}),
        ("environment.name", {"environment": {"name": "other"}}),
        ("environment.renderer", {"tools": True}),
        ("environment.name", {"problem": "it is random"}),
    ],
)
@pytest.mark.parametrize("is_in_mixture", [False, True])
def test_what_has_no_room_or_no_meaning_is_refused_by_its_field(
    field: str, changes: dict[str, Any], *, is_in_mixture: bool
) -> None:
    changes = dict(changes)
    service = Service(problem=changes.pop("problem", ""))
    if changes.pop("tools", False):
        service.tools = (Tool(name="look_up", description="Looks a word up."),)
    with refusal_of(field.replace("environment", PLAYED) if is_in_mixture else field):
        source(service, is_in_mixture=is_in_mixture, **changes)


def test_an_empty_observation_and_a_missing_service_are_refused() -> None:
    with pytest.raises(InvalidInput, match="is empty"):
        source(Service(opens=""))
    with pytest.raises(InvalidInput, match="no reward service"):
        source(None)


def test_the_chat_template_is_tried_on_an_observation_of_the_job() -> None:
    chat: dict[str, Any] = {"environment": {"renderer": "chat"}}
    made = all_prompts(source(Service(), tokenizer=chat_tokenizer(CHATML), **chat))
    assert made[0].text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    with refusal_of("model.path", match="rewrites history") as error:
        source(Service(), tokenizer=chat_tokenizer(FORGETFUL), **chat)
    for is_in_mixture, field in ((False, "environment"), (True, PLAYED)):
        with pytest.raises(InvalidInput, match="which is no special token") as error:
            source(Service(), is_in_mixture=is_in_mixture, **chat)
        assert error.value.cure
        assert f" as {field}.chat_format, " in error.value.cure
