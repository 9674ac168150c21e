"""Procedural tasks of reasoning-gym: deterministic by seed, offline, each with its own scorer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from contracts.errors import InvalidInput
from contracts.known_tasks import INSTALL, ITS_SCORERS, check_generated, check_version
from contracts.spec.datasets import ReasoningGymDataset
from onbeat.data.prompts.examples import Example, ExampleSets, Request

Entry = Mapping[str, Any]
"""An entry that reasoning-gym generates: question, answer, metadata."""

TRAIN_SEEDS = 2**30
EVALUATION_SEED = 2**31
"""reasoning-gym seeds item i with seed + i, so that neighbouring seeds share items: the two ranges are far apart.

The held-out set does not depend on the job's seed: scores of two seeds are comparable.
"""
CANDIDATES_PER_EVALUATION_PROMPT = 8
"""Items drawn for each held-out prompt before a task counts as too small to have so many different questions."""


def load_reasoning_gym(spec: ReasoningGymDataset, request: Request) -> ExampleSets:
    """Generates both sets; every question occurs once. Raises InvalidInput that names the field of the spec."""
    check_generated(spec)
    _check_package()
    num_evaluation = request.num_evaluation
    seed = request.seed
    num_candidates = num_evaluation * CANDIDATES_PER_EVALUATION_PROMPT
    seen: set[str] = set()
    evaluation: list[Example] = []
    if num_evaluation:
        candidates = _generate(spec, size=num_candidates, seed=EVALUATION_SEED)
        unseen = _unseen_examples(candidates, spec=spec, pool="evaluation", seen=seen)
        evaluation = list(itertools.islice(unseen, num_evaluation))
    if len(evaluation) < num_evaluation:
        raise InvalidInput(
            f"{num_evaluation} prompts are asked for, {spec.task} made {len(evaluation)} different questions in "
            f"{num_candidates} draws",
            field="evaluation.num_prompts",
            cure="ask for fewer, or widen dataset.params",
        )
    if not request.trains:
        return ExampleSets(train=(), evaluation=tuple(evaluation))
    pool = _generate(spec, size=spec.num_train_prompts, seed=seed % TRAIN_SEEDS)
    train = tuple(_unseen_examples(pool, spec=spec, pool="train", seen=seen))
    if not train:
        raise InvalidInput(
            f"all {spec.num_train_prompts} training questions of {spec.task} are also held out",
            field="dataset.num_train_prompts",
            cure="ask for more, lower evaluation.num_prompts, or widen dataset.params",
        )
    return ExampleSets(train=train, evaluation=tuple(evaluation))


def _check_package() -> None:
    """Raises InvalidInput where the package isn't installed, or is another version than the known one."""
    try:
        installed = version("reasoning_gym")
    except PackageNotFoundError as error:
        raise InvalidInput("the package reasoning-gym is not installed", field="dataset.type", cure=INSTALL) from error
    check_version(installed)


def _generate(spec: ReasoningGymDataset, *, size: int, seed: int) -> Iterator[Entry]:
    """Makes `size` entries of the task, one by one."""
    import reasoning_gym  # it takes seconds, which only its own jobs should pay

    try:
        items = reasoning_gym.create_dataset(spec.task, size=size, seed=seed, **spec.params)
        for index in range(size):
            yield items[index]
    # What the tasks raise for an unknown name, a wrong type, a value out of range, and values that no entry fits.
    except (TypeError, ValueError, AssertionError, LookupError, ArithmeticError) as error:
        raise InvalidInput(
            f"{spec.task} refuses its parameters: {error}",
            field="dataset.params",
            cure=f"the parameters are the fields of reasoning-gym's config of {spec.task}; size and seed are set here",
        ) from error


def _unseen_examples(
    entries: Iterator[Entry], *, spec: ReasoningGymDataset, pool: str, seen: set[str]
) -> Iterator[Example]:
    """Yields examples of the questions that are not in `seen` yet, which grows."""
    for index, entry in enumerate(entries):
        if index == 0 and spec.task in ITS_SCORERS:
            _check_scores_from_json(spec.task, entry)
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        yield Example(
            example_id=f"{pool}/{index}",
            question=entry["question"] + spec.question_suffix,
            reference="" if entry["answer"] is None else str(entry["answer"]),
            task_entry=json.dumps({"task": spec.task, "entry": entry}, default=_fraction_text),
        )


def _fraction_text(value: object) -> str:
    """Returns a fraction as "3/4": a few entries of gsm_symbolic have some among the variables of their metadata.

    Raises TypeError for another type, as json itself does: its text might not be what the task's scorer needs.
    """
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _check_scores_from_json(task: str, entry: Entry) -> None:
    """Raises InvalidInput where the entry's JSON, from which the reward service scores, loses what the scorer needs."""
    import reasoning_gym

    # Its own annotation says that the scorer takes no arguments.
    score = cast(Callable[[Any, Entry], float], reasoning_gym.get_score_answer_fn(task))
    try:
        scored_from_json = score(entry["answer"], json.loads(json.dumps(entry, default=_fraction_text)))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise _unscorable(task) from error
    if scored_from_json != score(entry["answer"], entry):
        raise _unscorable(task)


def _unscorable(task: str) -> InvalidInput:
    return InvalidInput(
        f"{task} scores an entry differently once it has been JSON, as it travels to the reward service",
        field="dataset.task",
        cure="choose another task",
    )
