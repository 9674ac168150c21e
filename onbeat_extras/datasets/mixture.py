"""A mixture's data sets, loaded as if each were the job's, and joined under their names."""

from __future__ import annotations

import math
from dataclasses import replace

from contracts.errors import InvalidInput
from contracts.spec_tables.datasets import MixtureDataset, MixtureSource
from onbeat.prompts.examples import Example, ExampleSets, Request, load_dataset
from onbeat_extras.datasets.held_out import disjoint


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
    return disjoint(train, held_out, source="the mixture", field="dataset.sources")


def held_out_shares(spec: MixtureDataset, request: Request) -> list[int]:
    """Cuts the held-out examples by weight: what is left over goes to the largest remainders."""
    total = math.fsum(source.weight for source in spec.sources)
    shares = [request.num_evaluation * source.weight / total for source in spec.sources]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda place: (counts[place] - shares[place], place))
    for place in by_remainder[: request.num_evaluation - sum(counts)]:
        counts[place] += 1
    return counts


def _loaded(source: MixtureSource, field: str, num_evaluation: int, request: Request) -> ExampleSets:
    try:
        loaded = load_dataset(
            source.dataset, num_evaluation=num_evaluation, seed=request.seed, model_root=request.model_root
        )
    except InvalidInput as error:
        of_dataset = error.field is not None and error.field.startswith("dataset")
        place = error.field.replace("dataset", field, 1) if error.field and of_dataset else error.field
        raise InvalidInput(f"source `{source.name}`: {error.problem}", field=place, cure=error.cure) from error
    train, held_out = (
        tuple(
            replace(
                one,
                source=source.name,
                example_id=f"{source.name}/{one.example_id}",
                field=one.field.replace("dataset", field, 1),
            )
            for one in examples
        )
        for examples in (loaded.train, loaded.evaluation)
    )
    return ExampleSets(train=train, evaluation=held_out)
