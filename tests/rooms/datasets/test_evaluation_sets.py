"""Sets of an evaluation: what they hold out, how it is asked and scored, and what doesn't go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from transformers import AutoTokenizer

from contracts.errors import InvalidInput
from contracts.rewards import RewardItem, Scored
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.examples import ExampleSets
from onbeat.data.prompts.prompt_batches import PromptBatches
from onbeat.data.prompts.source import PromptSource
from reward_service.scorers.rubric import score_item
from tests.builders import job_spec, judged_spec, manifest

DEMO_MODEL = Path(__file__).parents[3] / "configs" / "models" / "two-digit-addition"
ROWS = {"name": "rows", "dataset": {"type": "jsonl", "train_path": "rows.jsonl"}, "num_prompts": 40}
HOT = {"max_new_tokens": 4, "temperature": 0.5, "top_k": 3}
MIXED = [{"name": name, "dataset": {"type": "addition"}} for name in ("mixed", "other")]
OF_MIXED = {"type": "exact", "sources": ["mixed", "other"]}
SUMS = {"name": "sums", "dataset": {"type": "addition"}, "num_prompts": 4}


def with_sets(*sets: dict[str, Any], best: str = "", **changes: Any) -> JobSpec:
    evaluation = {"num_prompts": 8, "prompts_per_batch": 4, "sets": list(sets)} | ({"best": best} if best else {})
    return judged_spec(**{"evaluation": evaluation, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{number}+0=", "reference": str(number)} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def load(folder: Path, spec: JobSpec) -> ExampleSets:
    return job_examples(spec, SpecRoot(folder))


def test_a_file_may_be_held_out_whole_and_no_prompt_of_any_set_is_trained(folder: Path) -> None:
    plain, loaded = load(folder, job_spec(evaluation__num_prompts=8)), load(folder, with_sets(ROWS, SUMS))
    assert loaded.evaluation[:8] == plain.evaluation
    assert [one.source for one in loaded.evaluation] == [""] * 8 + ["rows"] * 40 + ["sums"] * 4
    assert loaded.evaluation[8].example_id == "rows/train/1"
    held_out = {one.question for one in loaded.evaluation}
    assert {one.question for one in loaded.train} == {one.question for one in plain.train} - held_out
    assert len(loaded.train) < len(plain.train)


def test_each_set_is_asked_by_its_own_sampling_after_those_of_before_it(folder: Path) -> None:
    spec = with_sets(ROWS | {"sampling": HOT, "group_size": 2, "prompts_per_batch": 32, "greedy": False}, SUMS)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompt_batches = PromptBatches(
        "job", spec, PromptSource(load(folder, spec), tokenizer=tokenizer, spec=spec, context_tokens=64)
    )
    batches = prompt_batches.evaluation(0, manifest(0))
    assert prompt_batches.num_evaluation(0) == spec.evaluation.num_batches == len(batches) == 8
    asked = [
        (one.prompts[0].source or "", len(one.prompts), one.group_size, one.sampling.temperature) for one in batches
    ]
    own = [("", 4, 1, 1.0)] * 2 + [("", 4, 1, 0.0)] * 2
    assert asked == [*own, ("rows", 32, 2, 0.5), ("rows", 8, 2, 0.5), ("sums", 4, 1, 1.0), ("sums", 4, 1, 0.0)]
    assert {one.sampling.top_k for one in batches if one.prompts[0].source == "rows"} == {3}
    assert [one.index for batch in batches[4:6] for one in batch.prompts] == [*range(8, 48)]
    one_set = PromptBatches(
        "job",
        own_spec := with_sets(SUMS),
        PromptSource(load(folder, own_spec), tokenizer=tokenizer, spec=own_spec, context_tokens=64),
    )
    assert one_set.evaluation(0, manifest(0))[:4] == batches[:4]


def test_a_component_that_names_sets_scores_nothing_else() -> None:
    of_rows = {"type": "numeric", "sources": ["rows"], "weight": 2.0}
    spec = with_sets(ROWS, SUMS, reward={"components": [{"type": "exact"}, of_rows]})
    for source, reward in ((UNSET, 1.0), ("sums", 1.0), ("rows", 3.0)):
        item = RewardItem(prompt="2+2=", completion="4", reference="4", source=source)
        scored = score_item(spec.reward.components, item)
        assert isinstance(scored, Scored)
        assert scored.reward == reward


GAME = {"environment": {"name": "guess", "max_tokens": 4096}}


@pytest.mark.parametrize(
    ("changes", "of_set", "problem"),
    [
        ({"sampling": HOT | {"max_new_tokens": 6}}, {}, ".sampling.max_new_tokens: is above rollout.sampling"),
        ({"group_size": 4096}, {}, ".prompts_per_batch * {}.group_size make 131,072 completions"),
        ({"group_size": 4096}, {}, "(lower {}.prompts_per_batch"),
        (
            {"num_prompts": 2**18, "prompts_per_batch": 1},
            {},
            ".num_prompts / {}.prompts_per_batch make 524,300 batches",
        ),
        ({"prompts_per_batch": 4096}, {"rollout__max_prompt_tokens": 2**20}, ".prompts_per_batch * rollout.max_prompt"),
        ({"dataset": {"type": "environment"}}, {}, '.dataset.type: "environment" takes its tasks'),
        ({"dataset": ROWS["dataset"] | {"chat": {}}}, GAME, ".dataset.chat: has no effect with an environment"),
        ({"sampling": HOT | {"stop": ["."]}}, GAME, ".sampling.stop: would end turns"),
    ],
)
def test_a_refusal_names_the_set_that_it_is_about(
    changes: dict[str, Any], of_set: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput) as error:
        with_sets({"name": "other", "dataset": {"type": "addition"}}, SUMS | changes, **of_set)
    place = "evaluation.sets[1]"
    assert (problem if problem.startswith("(") else f"{{}}{problem}").format(place, place) in str(error.value)


def test_a_set_alone_may_be_scored_where_the_data_set_gives_what_is_learnt() -> None:
    learns = {"algorithm": {"loss": "sft", "advantage": "none"}, "rollout__group_size": 1}
    of_sums = {"reward": {"components": [{"type": "exact", "sources": ["sums"]}]}}
    evaluation = {"num_prompts": 0, "sets": [SUMS], "best": "sums"}
    assert judged_spec(evaluation=evaluation, **learns, **of_sums).evaluation.best == "sums"
    with pytest.raises(InvalidInput, match="no reward that scores what is trained"):
        judged_spec(evaluation=evaluation | {"num_prompts": 8}, **learns, **of_sums)
    with pytest.raises(InvalidInput, match="no reward that scores what is trained"):
        judged_spec(evaluation=evaluation, **of_sums)
    with pytest.raises(
        InvalidInput, match=r"names `sum`, which is neither a source of .* nor a set of evaluation\.sets"
    ):
        judged_spec(evaluation=evaluation, **learns, reward={"components": [{"type": "exact", "sources": ["sum"]}]})


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"sets": [SUMS, ROWS | {"name": "sums"}]}, "`sums` is the name of another set"),
        ({"sets": [SUMS | {"name": "held_out"}]}, "is the name of another set, or of the held-out prompts of dataset"),
        ({"sets": [SUMS], "best": "rows"}, "best: `rows` is not the name of an evaluation set"),
        ({"best": "rows"}, "best: `rows` is not the name of an evaluation set"),
        ({"sets": [SUMS], "num_prompts": 0}, "num_prompts: 0 leaves evaluation.best without a score"),
        ({"sets": [SUMS | {"num_prompts": 0}]}, "num_prompts: must be above 0 in a set"),
        ({"sets": [SUMS | {"sampling": HOT | {"temperature": 0.0}}]}, "temperature: must be above 0"),
        ({"sets": [SUMS | {"sampling": HOT | {"max_new_tokens": 6}}]}, "sampling.max_new_tokens: is above"),
        ({"sets": [SUMS | {"num_prompts": 2**18, "prompts_per_batch": 1}]}, "batches of an iteration that evaluates"),
        ({"sets": [SUMS | {"group_size": 4096}]}, "completions of an evaluation batch"),
        ({"sets": [SUMS | {"dataset": SUMS["dataset"] | {"difficulty_pools": {}}}]}, "difficulty_pools: has no effect"),
        ({"sets": [SUMS | {"dataset": {"type": "environment"}}]}, "takes its tasks from an environment"),
    ],
)
def test_sets_that_cannot_be_evaluated_are_refused(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        judged_spec(evaluation=spec)


def test_a_set_needs_a_name_that_no_source_has_a_scorer_and_prompts_that_are_there(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="`mixed` is the name of a source of dataset"):
        with_sets(SUMS | {"name": "mixed"}, dataset={"type": "mixture", "sources": MIXED})
    with pytest.raises(InvalidInput, match="no reward that scores what is trained"):
        with_sets(ROWS, reward={"components": [{"type": "exact", "sources": ["rows"]}]})
    with pytest.raises(InvalidInput, match="no reward that scores `sums`"):
        with_sets(SUMS, reward={"components": [OF_MIXED]}, dataset={"type": "mixture", "sources": MIXED})
    with pytest.raises(InvalidInput, match="41 prompts are asked for") as error:
        load(folder, with_sets(SUMS, ROWS | {"num_prompts": 41}))
    assert error.value.field == "evaluation.sets[1].num_prompts"
    with pytest.raises(InvalidInput) as error:
        load(folder, with_sets(ROWS | {"dataset": {"type": "jsonl", "train_path": "none.jsonl"}}))
    assert error.value.field == "evaluation.sets[0].dataset.train_path"
    asked = ROWS | {"dataset": {"type": "jsonl", "train_path": "rows.jsonl", "chat": {}}}
    with pytest.raises(InvalidInput, match="no chat template") as error:
        PromptSource(
            load(folder, with_sets(asked)),
            tokenizer=AutoTokenizer.from_pretrained(DEMO_MODEL),
            spec=with_sets(asked),
            context_tokens=64,
        )
    assert error.value.field == "evaluation.sets[0].dataset.chat"
    assert error.value.cure == "leave evaluation.sets[0].dataset.chat out, and use prompts that are text"
