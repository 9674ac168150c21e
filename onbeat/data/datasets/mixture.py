"""A mixture's data sets, and those of an evaluation, loaded as if each were the job's, and joined under their names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from contracts.errors import InvalidInput
from contracts.spec.datasets import MixtureDataset, MixtureSource
from contracts.spec.rollout import EvaluationSet
from onbeat.data.datasets.held_out import disjoint
from onbeat.data.datasets.kinds import load_source
from onbeat.data.prompts.examples import Example, ExampleSets, Request

OF_ONE = re.compile(r"\bevaluation\.num_prompts\b|\bdataset\b")
"""Keys, in a field or a cure, that a job with one data set has."""


def load_mixture(spec: MixtureDataset, request: Request) -> ExampleSets:
    """Loads each with its share of the held-out examples. Raises InvalidInput that names the source's field.

    A question that one source holds out is trained in none.
    """
    train: list[Example] = []
    held_out: list[Example] = []
    for number, (source, num_evaluation) in enumerate(zip(spec.sources, held_out_shares(spec, request), strict=True)):
        loaded = _loaded(source, f"dataset.sources[{number}].dataset", num_evaluation, request)
        train += loaded.train
        held_out += loaded.evaluation
    return disjoint(train, held_out, source="the mixture", field="dataset.sources", trains=request.trains)


def load_sets(sets: Sequence[EvaluationSet], dataset: ExampleSets, request: Request) -> ExampleSets:
    """Joins what each set holds out behind what a job's own data set does, of which none is trained then.

    dataset: the job's. Raises InvalidInput that names the set's field.
    """
    held_out = list(dataset.evaluation)
    trains = request.trains
    request = replace(request, trains=False)
    for number, evaluation_set in enumerate(sets):
        field = f"evaluation.sets[{number}].dataset"
        held_out += _loaded(evaluation_set, field, evaluation_set.num_prompts, request).evaluation
    return disjoint(dataset.train, held_out, source="the data set", field="dataset", trains=trains)


def held_out_shares(spec: MixtureDataset, request: Request) -> list[int]:
    """Cuts the held-out examples by weight: what is left over goes to the largest remainders."""
    total = math.fsum(source.weight for source in spec.sources)
    shares = [request.num_evaluation * source.weight / total for source in spec.sources]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda place: (counts[place] - shares[place], place))
    for place in by_remainder[: request.num_evaluation - sum(counts)]:
        counts[place] += 1
    return counts


def _loaded(source: MixtureSource | EvaluationSet, field: str, num_evaluation: int, request: Request) -> ExampleSets:
    try:
        loaded = load_source(source.dataset, replace(request, num_evaluation=num_evaluation))
    except InvalidInput as error:
        places = {"dataset": field, "evaluation.num_prompts": "evaluation.num_prompts"}
        if isinstance(source, EvaluationSet):
            places["evaluation.num_prompts"] = field.replace("dataset", "num_prompts")
        named, cure = (OF_ONE.sub(lambda key: places[key[0]], text or "") for text in (error.field, error.cure))
        raise InvalidInput(
            f"source `{source.name}`: {error.problem}", field=named or field, cure=cure or None
        ) from error
    train, held_out = (
        tuple(
            replace(
                example,
                source=source.name,
                example_id=f"{source.name}/{example.example_id}",
                field=example.field.replace("dataset", field, 1),
            )
            for example in examples
        )
        for examples in (loaded.train, loaded.evaluation)
    )
    return ExampleSets(train=train, evaluation=held_out)
