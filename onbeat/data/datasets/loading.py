"""Loads a job's data set and checks it against the job's rewards.

A reference that a reward can't compare, as far as that is known without the scorer's own parser, fails a job at its
start, or when it is submitted, not at the batch that holds the example.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts import rewards
from contracts.errors import InvalidInput
from contracts.spec.datasets import DatasetSpec, MixtureDataset
from contracts.spec.job import JobSpec
from contracts.spec.rollout import EvaluationSet
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.kinds import load_source
from onbeat.data.datasets.mixture import load_mixture, load_sets
from onbeat.data.datasets.references import check_needs_no_reference, check_reference
from onbeat.data.prompts.examples import ExampleSets, Request
from onbeat.data.prompts.file_rows import DatasetRoom


def job_examples(spec: JobSpec, root: SpecRoot) -> ExampleSets:
    """Loads a job's data set as `load_dataset` does."""
    return load_dataset(
        spec.dataset,
        num_evaluation=spec.evaluation.num_prompts,
        seed=spec.seed,
        model_root=root,
        components=spec.reward.components,
        learns_given=spec.algorithm.learns_given,
        trains=spec.iterations > 0,
        reads_references=_reads_references(spec),
        sets=spec.evaluation.sets or (),
    )


def _reads_references(spec: JobSpec) -> bool:
    """Returns False where the job has nothing but rewards that read no reference; a stage or an environment may."""
    components = spec.reward.components
    return not components or bool(spec.stages or spec.environments) or rewards.reads_references(components)


def load_dataset(
    spec: DatasetSpec,
    *,
    num_evaluation: int,
    seed: int,
    model_root: SpecRoot,
    components: tuple[rewards.RewardComponent, ...] = (),
    learns_given: bool = False,
    reads_references: bool = True,
    trains: bool = True,
    sets: Sequence[EvaluationSet] = (),
) -> ExampleSets:
    """Loads the training pool and `num_evaluation` held-out examples; equal arguments give equal sets.

    Args:
        spec: The data set's table in the job's spec.
        num_evaluation: Number of held-out examples.
        seed: The job's seed.
        model_root: The folder at which relative paths of the spec start.
        components: The parts of the job's reward, which have to be able to score each example.
        learns_given: True where the training pool's completions are learnt as they are, so that nothing scores them.
        reads_references: False where a row needs no reference, since nothing compares a completion with it.
        trains: False where the job only evaluates: the training pool may be empty, and nothing scores it.
        sets: Further data sets that are held out; their examples follow the job's own, with the sets' names as sources.

    Raises:
        InvalidInput: The data set is empty, unreadable or too small, or a component of the reward can't score it. The
            error names the spec's field: a job fails at its start, not at the first batch that holds the example.
    """
    room = DatasetRoom(model_root.dataset_mb)
    request = Request(
        num_evaluation=num_evaluation,
        seed=seed,
        model_root=model_root,
        reads_references=reads_references,
        trains=trains,
        room=room,
    )
    dataset = load_mixture(spec, request) if isinstance(spec, MixtureDataset) else load_source(spec, request)
    if sets:
        dataset = load_sets(sets, dataset, request)
    is_pool_scored = trains and not learns_given
    scored = [*dataset.train, *dataset.evaluation] if is_pool_scored else list(dataset.evaluation)
    for example in scored:
        for component in components:
            if not component.scores(example.source):
                continue
            try:
                check_reference(component, reference=example.reference, task_entry=example.task_entry)
                # Rows that are learned may have no reference; where such a row is held out, a reward has to do without.
                if example.completion and not example.reference:
                    check_needs_no_reference(component)
            except InvalidInput as error:
                where = example.origin or example.example_id
                raise InvalidInput(f"{where}: {error.problem}", field=example.field, cure=error.cure) from error
    return dataset
