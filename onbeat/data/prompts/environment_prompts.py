"""Prompts of a job with an environment: the initial observation of each task, as the model's tokens.

    example ─▶ Task {what, seed} ─ reward service ─▶ InitialObservation
                                                       └─ renderer ─▶ Prompt {tokens, task, seed, digest}

Everything that can be wrong with an environment before the first token is found here: that it is unknown, refuses its
parameters or a task, isn't what it says of itself, or has initial observations that no prompt of this job has room for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import UNSET

from contracts.encoding.arrays import pack_int32
from contracts.environments.messages import messages_digest
from contracts.environments.service import RETRYABLE, EnvironmentFacts, Failure, InitialObservation, Task
from contracts.errors import InvalidInput
from contracts.rollouts import Prompt, PromptTask
from contracts.spec.datasets import EnvironmentDataset, environment_field
from contracts.spec.environment import EnvironmentSpec, environment_at
from contracts.spec.job import JobSpec
from onbeat.data.prompts.examples import Example
from onbeat.data.rendering.factory import check_renderer, make_renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENED_AT_ONCE = 1024
NUM_REPEATED_TASKS = 4
"""Tasks that are played twice before the job starts."""
UNDETERMINED_CURE = "its class has to say deterministic = False, and the job deterministic = false"


class EnvironmentQueries(Protocol):
    """The reward service, as a trainer asks it at a job's start. Each raises EnvironmentUnavailable."""

    def facts(self, environment: EnvironmentSpec) -> EnvironmentFacts:
        """Raises InvalidInput that names the field of an environment that is unknown, or refuses its parameters."""
        ...

    def observations(
        self, environment: EnvironmentSpec, tasks: Sequence[Task]
    ) -> Sequence[InitialObservation | Failure]:
        """Answers one for each task, in order."""
        ...

    def repeatability(self, environment: EnvironmentSpec, tasks: Sequence[Task]) -> str:
        """Plays the tasks twice, and says what was different the second time; "" where nothing was."""
        ...


def check_determinism(spec: JobSpec, environment: EnvironmentSpec, facts: EnvironmentFacts) -> None:
    """Raises InvalidInput where a deterministic job would play an environment that isn't."""
    if spec.deterministic and not facts.deterministic:
        raise InvalidInput(
            f"environment `{environment.name}` is not deterministic",
            field="deterministic",
            cure="set it to false: the same spec then gives other weights each time",
        )


class OpenedPrompts:
    """Makes the prompts of one job's examples."""

    def __init__(
        self,
        spec: JobSpec,
        source: str,
        *,
        service: EnvironmentQueries | None,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        check_length: Callable[[Example, int], None],
    ) -> None:
        """source: of `JobSpec.environments`. end_ids: tokens that end what the model samples. check_length: raises for
        a prompt of so many tokens.

        Raises InvalidInput that names the field of an environment that this job can't have.
        """
        self._field = environment_field(spec.dataset, source)
        if service is None:
            raise InvalidInput(
                "no reward service is set, so the environment's tasks can't be opened", field=self._field
            )
        self._spec = spec
        self._environment = spec.environments[source]
        self._service = service
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._check_length = check_length
        self._is_tried = False
        with environment_at(self._field):
            self._renderer = make_renderer(tokenizer, self._environment.renderer, self._environment.chat_format)
            facts = service.facts(self._environment)
        self.version = facts.version
        """The environment that the service plays: a package and its version."""
        check_determinism(spec, self._environment, facts)

    def __call__(self, examples: Sequence[Example], *, held_out: bool) -> list[Prompt]:
        """Returns a prompt for each example. Raises InvalidInput that names the field, and the example.

        held_out: examples that are not trained; their seeds are the same in every job, so that scores are comparable.
        """
        prompts: list[Prompt] = []
        for start in range(0, len(examples), OPENED_AT_ONCE):
            chunk = examples[start : start + OPENED_AT_ONCE]
            tasks = [self._task(example, held_out=held_out) for example in chunk]
            if not self._is_tried:
                self._try(tasks[:NUM_REPEATED_TASKS])
            with environment_at(self._field):
                observations = self._opened(chunk, tasks)
                for example, task, observation in zip(chunk, tasks, observations, strict=True):
                    prompts.append(self._prompt(example, task, observation))
        return prompts

    def _task(self, example: Example, *, held_out: bool) -> Task:
        """Returns the task of an example, and its seed: a function of the job's seed and the example's name."""
        if example.messages and [message.role for message in example.messages] != ["user"]:
            raise self._refusal(example, "it opens with one question, and this prompt has other messages")
        what: dict[str, str | int] = {
            "question": example.question,
            "reference": example.reference,
            "entry": example.task_entry,
        }
        if isinstance(self._spec.tables[example.source], EnvironmentDataset):
            *_, split, index = example.example_id.split("/")
            what = {"split": split, "index": int(index)}
        name = f"{'held out' if held_out else self._spec.seed}/{example.example_id}"
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 2
        return Task(task=msgspec.json.encode(what).decode(), seed=seed)

    def _try(self, tasks: Sequence[Task]) -> None:
        """Has a few tasks played twice. Raises InvalidInput for an environment that isn't what it says of itself."""
        self._is_tried = True
        problem = self._service.repeatability(self._environment, tasks)
        if problem:
            raise InvalidInput(
                f"environment `{self._environment.name}` doesn't behave the same twice: {problem}",
                field=f"{self._field}.name",
                cure=UNDETERMINED_CURE,
            )

    def _opened(self, examples: Sequence[Example], tasks: Sequence[Task]) -> list[InitialObservation]:
        observations: dict[int, InitialObservation] = {}
        for attempt in range(1, self._environment.max_attempts + 1):
            waiting = [place for place in range(len(tasks)) if place not in observations]
            answers = self._service.observations(self._environment, [tasks[place] for place in waiting])
            for place, answer in zip(waiting, answers, strict=True):
                if isinstance(answer, InitialObservation):
                    observations[place] = answer
                elif answer.reason not in RETRYABLE or attempt == self._environment.max_attempts:
                    raise self._refusal(examples[place], f"{answer.reason}: {answer.detail}")
            if len(observations) == len(tasks):
                break
        return [observations[place] for place in range(len(tasks))]

    def _prompt(self, example: Example, task: Task, observation: InitialObservation) -> Prompt:
        token_ids = self._renderer.open(observation.messages, observation.tools)
        self._check_length(example, len(token_ids))
        if self._end_ids:
            check_renderer(
                self._renderer,
                self._tokenizer,
                messages=observation.messages,
                tools=observation.tools,
                end_ids=self._end_ids,
            )
            self._end_ids = ()  # one conversation shows what the template does with all of them
        return Prompt(
            prompt_id=example.example_id,
            index=0,
            token_ids=pack_int32(token_ids),
            text=str(self._tokenizer.decode(token_ids)),
            reference=example.reference,
            task_entry=example.task_entry,
            metadata=example.metadata or UNSET,
            source=example.source or UNSET,
            environment=PromptTask(
                task=task.task,
                seed=task.seed,
                observation_digest=messages_digest(observation.messages, observation.tools),
            ),
        )

    def _refusal(self, example: Example, problem: str) -> InvalidInput:
        return InvalidInput(
            f"environment `{self._environment.name}` does not open {example.origin or example.example_id}: {problem}",
            field=example.field,
            cure="name the environment that these tasks are for, or fix the task",
        )
