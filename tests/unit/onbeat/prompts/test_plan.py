"""What an iteration asks: prompts cut into batches, each place with reserves of its own."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from contracts.spec_tables.datasets import AdditionDataset
from contracts.spec_tables.root import SpecRoot
from contracts.versions import WeightFile, WeightManifest
from onbeat.prompts.datasets.base import load_dataset
from onbeat.prompts.plan import IterationPlan
from onbeat.prompts.source import PromptSource
from tests.builders import DIGEST, job_spec

ROOT = Path(__file__).parents[4]
MANIFEST = WeightManifest(
    policy_version=0,
    weights_digest=DIGEST,
    dtype="float32",
    directory="job/weights/v000000",
    files=(WeightFile(name="weights.safetensors", num_bytes=1),),
)


def test_each_place_of_a_training_batch_has_its_reserves_and_evaluation_has_none() -> None:
    """4 batches of 2 prompts: reserve n of prompt i has the index 8 n + i."""
    spec = job_spec(rollout__max_resamples=3)
    dataset = load_dataset(AdditionDataset(), num_evaluation=8, seed=0, model_root=SpecRoot(ROOT))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "models" / "two-digit-addition")
    plan = IterationPlan("job", spec, PromptSource(dataset, tokenizer=tokenizer, spec=spec, context_tokens=64))
    training, evaluation = plan.training(0, MANIFEST), plan.evaluation(0, MANIFEST)
    assert [batch.purpose for batch in (*training, *evaluation)] == ["train"] * 4 + ["evaluation"] * 4
    for number, batch in enumerate(training):
        rows = [[prompt.index for prompt in prompts] for prompts in (batch.prompts, *batch.reserves)]
        assert rows == [[8 * row + 2 * number, 8 * row + 2 * number + 1] for row in range(4)]
    assert {batch.reserves for batch in evaluation} == {()}


def test_a_plan_counts_evaluation_batches_of_a_version_that_is_not_there() -> None:
    spec = job_spec(evaluation__every_iterations=3)
    assert [IterationPlan("job", spec, None).num_evaluation(number) for number in range(5)] == [4, 0, 0, 4, 4]  # type: ignore[arg-type]


def test_an_iteration_that_only_evaluates_has_no_training_batch() -> None:
    plan = IterationPlan("job", job_spec(), None)  # type: ignore[arg-type]
    assert plan.training(4, MANIFEST) == ()
    assert plan.evaluation(1, MANIFEST) == ()
