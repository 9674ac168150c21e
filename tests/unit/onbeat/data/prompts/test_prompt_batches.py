"""What an iteration asks: prompts cut into batches, each place with reserves of its own."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from contracts.encoding.wire import convert
from contracts.sampling import SamplingParams
from contracts.spec.datasets import AdditionDataset
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.prompt_batches import PromptBatches
from onbeat.data.prompts.source import PromptSource
from tests.builders import job_spec, manifest

ROOT = Path(__file__).parents[5]
MANIFEST = manifest(0)


def batches_of(spec: JobSpec) -> PromptBatches:
    """Returns the batches of a job of additions, 8 of which are held out."""
    dataset = load_dataset(AdditionDataset(), num_evaluation=8, seed=0, model_root=SpecRoot(ROOT))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "models" / "two-digit-addition")
    return PromptBatches("job", spec, PromptSource(dataset, tokenizer=tokenizer, spec=spec, context_tokens=64))


def test_each_place_of_a_training_batch_has_its_reserves_and_evaluation_has_none() -> None:
    """4 batches of 2 prompts: reserve n of prompt i has the index 8 n + i."""
    spec = job_spec(rollout__max_resamples=3)
    prompt_batches = batches_of(spec)
    training, evaluation = prompt_batches.training(0, MANIFEST), prompt_batches.evaluation(0, MANIFEST)
    assert [batch.purpose for batch in (*training, *evaluation)] == ["train"] * 4 + ["evaluation"] * 4
    for number, batch in enumerate(training):
        rows = [[prompt.index for prompt in prompts] for prompts in (batch.prompts, *batch.reserves)]
        assert rows == [[8 * row + 2 * number, 8 * row + 2 * number + 1] for row in range(4)]
    assert {batch.reserves for batch in evaluation} == {()}


def test_held_out_prompts_have_a_sampling_and_a_group_size_of_their_own() -> None:
    own = {"max_new_tokens": 4, "temperature": 0.6, "top_p": 0.9, "stop_token_ids": [7], "stop": ["="]}
    spec = job_spec(evaluation__sampling=own, evaluation__group_size=3)
    prompt_batches = batches_of(spec)
    *sampled, first_greedy, second_greedy = prompt_batches.evaluation(0, MANIFEST)
    assert {(batch.sampling, batch.group_size) for batch in sampled} == {(convert(own, SamplingParams), 3)}
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0, stop_token_ids=(7,), stop=("=",))
    assert {(one.sampling, one.group_size) for one in (first_greedy, second_greedy)} == {(greedy, 1)}
    assert prompt_batches.training(0, MANIFEST)[0].sampling == spec.rollout.sampling


def test_a_plan_counts_evaluation_batches_of_a_version_that_is_not_there() -> None:
    spec = job_spec(evaluation__every_iterations=3)
    assert [PromptBatches("job", spec, None).num_evaluation(number) for number in range(5)] == [4, 0, 0, 4, 4]  # type: ignore[arg-type]


def test_an_iteration_that_only_evaluates_has_no_training_batch() -> None:
    prompt_batches = PromptBatches("job", job_spec(), None)  # type: ignore[arg-type]
    assert prompt_batches.training(4, MANIFEST) == ()
    assert prompt_batches.evaluation(1, MANIFEST) == ()
