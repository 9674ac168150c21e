"""Data sets are disjoint and deterministic, prompts are a pure function of the iteration, errors name the field."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import reasoning_gym
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from contracts.encoding.arrays import unpack_int32
from contracts.errors import InvalidInput
from contracts.rewards import (
    ExactReward,
    MathVerifyReward,
    NumericReward,
    PluginReward,
    ReasoningGymReward,
    RegexReward,
    RewardComponent,
)
from contracts.spec.datasets import AdditionDataset, DatasetSpec, JsonlDataset, ReasoningGymDataset
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.data.datasets import reasoning_gym_tasks
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.examples import ExampleSets
from onbeat.data.prompts.source import PromptSource
from tests.building.specs import SpecBuilder
from tests.refusals import refusal_of

DEMO_MODEL = Path(__file__).parents[5] / "configs" / "models" / "two-digit-addition"
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
CHAIN_SUM = ReasoningGymDataset(task="chain_sum", params=dict(ONE_DIGIT), num_train_prompts=300)


def load(
    spec: DatasetSpec, *, num_evaluation: int = 16, seed: int = 0, model_root: Path = Path("nowhere")
) -> ExampleSets:
    return load_dataset(spec, num_evaluation=num_evaluation, seed=seed, model_root=SpecRoot(model_root))


eight_prompts = SpecBuilder(rollout__batches_per_iteration=2, rollout__prompts_per_batch=4)
"""Jobs of two batches of four prompts."""


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n")


def questions(*numbers: int) -> list[str]:
    return [json.dumps({"prompt": f"question {number}", "reference": str(number)}) for number in numbers]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def source(
    tokenizer: PreTrainedTokenizerBase, spec: JobSpec, *, dataset: ExampleSets | None = None, context_tokens: int = 512
) -> PromptSource:
    return PromptSource(
        dataset or load(AdditionDataset()), tokenizer=tokenizer, spec=spec, context_tokens=context_tokens
    )


def test_addition_holds_512_of_its_ten_thousand_pairs_out() -> None:
    dataset = load(AdditionDataset(), num_evaluation=512)
    train = {example.question for example in dataset.train}
    held_out = {example.question for example in dataset.evaluation}
    assert (len(train), len(held_out)) == (9488, 512)
    assert train.isdisjoint(held_out)


def test_the_addition_split_does_not_depend_on_the_seed_or_on_how_many_are_evaluated() -> None:
    few, many = load(AdditionDataset(), num_evaluation=3, seed=1), load(AdditionDataset(), num_evaluation=512, seed=2)
    assert few.train == many.train
    assert few.evaluation == many.evaluation[:3]


def test_an_addition_is_answered_with_its_digits_reversed() -> None:
    references = {example.question: example.reference for example in load(AdditionDataset()).train}
    assert references["58+67="] == "521"
    assert references["0+0="] == "0"
    assert references["45+45="] == "09"


def test_more_additions_than_are_held_out_are_refused() -> None:
    with refusal_of("evaluation.num_prompts", match="512"):
        load(AdditionDataset(), num_evaluation=513)


def test_a_reasoning_gym_question_occurs_once_over_both_sets() -> None:
    dataset = load(CHAIN_SUM, num_evaluation=64)
    asked = [example.question for example in [*dataset.train, *dataset.evaluation]]
    assert len(dataset.evaluation) == 64
    assert len(set(asked)) == len(asked)


def test_reasoning_gym_examples_are_equal_for_equal_seeds_and_the_held_out_ones_for_all() -> None:
    first, again, other = (load(CHAIN_SUM, seed=seed) for seed in (7, 7, 8_000_000))
    assert first == again
    assert first.evaluation == other.evaluation
    assert [example.question for example in first.train] != [example.question for example in other.train]


def test_a_task_entry_scores_its_own_reference_after_its_way_through_json() -> None:
    example = load(CHAIN_SUM).train[0]
    parsed = json.loads(example.task_entry)
    score = reasoning_gym.get_score_answer_fn(parsed["task"])
    assert score(example.reference, parsed["entry"]) == 1.0  # pyright: ignore[reportCallIssue]
    assert score("a wrong answer", parsed["entry"]) == 0.0  # pyright: ignore[reportCallIssue]


def test_a_task_entry_with_fractions_is_scored_after_its_way_through_json() -> None:
    """Every hundredth question or so of gsm_symbolic has a Fraction among its variables, which JSON has no type for."""
    dataset = load(ReasoningGymDataset(task="gsm_symbolic", num_train_prompts=16))
    with_fraction = [example for example in dataset.train if "serving_fraction" in example.task_entry]
    assert with_fraction, "another version of the package draws other questions: take more of them"
    for example in with_fraction:
        entry = json.loads(example.task_entry)["entry"]
        assert entry["metadata"]["variables"]["serving_fraction"] == "2"
        score = reasoning_gym.get_score_answer_fn("gsm_symbolic")
        assert score(example.reference, entry) == 1.0  # pyright: ignore[reportCallIssue]


def test_the_suffix_follows_each_question_but_not_the_entry() -> None:
    plain = load(CHAIN_SUM).train[0]
    spec = ReasoningGymDataset(task="chain_sum", params=dict(ONE_DIGIT), question_suffix=" Be brief.")
    suffixed = load(spec).train[0]
    assert suffixed.question == plain.question + " Be brief."
    assert suffixed.task_entry == plain.task_entry


@pytest.mark.parametrize(
    ("spec", "field", "told"),
    [
        (ReasoningGymDataset(task="chain_summ"), "dataset.task", "chain_sum"),
        (ReasoningGymDataset(task="codeio"), "dataset.task", "executes"),
        (ReasoningGymDataset(task="countdown", params={"min_target": 1, "max_target": 1}), "dataset.params", "Failed"),
        (ReasoningGymDataset(task="chain_sum", params={"terms": 2}), "dataset.params", "terms"),
        (ReasoningGymDataset(task="chain_sum", params={"min_terms": 0}), "dataset.params", "min_terms"),
        (ReasoningGymDataset(task="chain_sum", params={"seed": 3}), "dataset.params", "seed"),
    ],
)
def test_a_wrong_reasoning_gym_spec_is_refused_and_names_its_field(
    spec: ReasoningGymDataset, field: str, told: str
) -> None:
    with refusal_of(field, match=told):
        load(spec, num_evaluation=1)


def test_a_task_without_the_package_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(reasoning_gym_tasks, "version", absent)
    with refusal_of("dataset.type", match=r"reasoning-gym is not installed \(pip install 'onbeat\[reasoning-gym\]'\)"):
        load(ReasoningGymDataset(task="chain_sum", num_train_prompts=8))


def test_a_task_with_too_few_different_questions_is_refused() -> None:
    with refusal_of("evaluation.num_prompts", match="different questions"):
        load(CHAIN_SUM, num_evaluation=300)


def test_a_file_without_an_evaluation_file_has_its_last_lines_held_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [*questions(1, 2, 3), "", *questions(4, 5)])
    dataset = load(JsonlDataset(train_path="train.jsonl"), num_evaluation=2, model_root=tmp_path)
    assert [example.reference for example in dataset.train] == ["1", "2", "3"]
    assert [example.reference for example in dataset.evaluation] == ["4", "5"]


def test_an_evaluation_file_leaves_the_training_file_whole(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", questions(1, 2))
    write_lines(tmp_path / "held-out.jsonl", questions(8, 9))
    spec = JsonlDataset(train_path="train.jsonl", evaluation_path="held-out.jsonl")
    dataset = load(spec, num_evaluation=1, model_root=tmp_path)
    assert [example.example_id for example in dataset.train] == ["train/1", "train/2"]
    assert [example.question for example in dataset.evaluation] == ["question 8"]


@pytest.mark.parametrize(
    ("lines", "num_evaluation", "field", "told"),
    [
        ([*questions(1), "{not json"], 0, "dataset.train_path", "train.jsonl:2"),
        ([*questions(1), '{"prompt": "no reference"}'], 0, "dataset.train_path", "train.jsonl:2.*reference"),
        ([""], 0, "dataset.train_path", "no prompts"),
        ([""], 2, "dataset.train_path", "no prompts"),
        (questions(1, 2), 2, "evaluation.num_prompts", "at most 1"),
    ],
)
def test_a_wrong_file_is_refused_and_names_field_and_line(
    tmp_path: Path, lines: list[str], num_evaluation: int, field: str, told: str
) -> None:
    write_lines(tmp_path / "train.jsonl", lines)
    with refusal_of(field, match=told):
        load(JsonlDataset(train_path="train.jsonl"), num_evaluation=num_evaluation, model_root=tmp_path)


def line(prompt: str, reference: str = "1", **fields: str) -> str:
    return json.dumps({"prompt": prompt, "reference": reference, **fields})


def test_a_prompt_that_stands_twice_in_a_file_is_not_both_trained_and_held_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [line("a"), line("b"), line(" b\n"), line("a"), line("c"), line("b")])
    dataset = load(JsonlDataset(train_path="train.jsonl"), num_evaluation=2, model_root=tmp_path)
    assert [example.example_id for example in dataset.train] == ["train/1", "train/4"]
    assert [example.question for example in dataset.evaluation] == ["c", "b"]


def test_a_prompt_of_the_evaluation_file_is_not_trained_either(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [line("a"), line("b")])
    write_lines(tmp_path / "held-out.jsonl", [line("b"), line("a")])
    spec = JsonlDataset(train_path="train.jsonl", evaluation_path="held-out.jsonl")
    dataset = load(spec, num_evaluation=1, model_root=tmp_path)
    assert [example.question for example in dataset.train] == ["a"]
    with refusal_of("dataset.train_path", match="every prompt"):
        load(spec, num_evaluation=2, model_root=tmp_path)


CODEIO = json.dumps({"task": "codeio", "entry": {"question": "", "answer": "", "metadata": {}}})


@pytest.mark.parametrize(
    ("component", "bad", "told"),
    [
        (NumericReward(), line("q", "five"), "no number"),
        (NumericReward(), line("q", ""), "no number"),
        (ExactReward(), line("q", " "), "empty"),
        (RegexReward(pattern="(?P<answer>.)"), line("q", ""), "empty"),
        (MathVerifyReward(), line("q", ""), "empty"),
        (MathVerifyReward(), line("q", "not math at all"), "no expression"),
        (MathVerifyReward(), line("q", r"\frac{1}{2"), "brace"),
        (ReasoningGymReward(), line("q"), "JSON"),
        (ReasoningGymReward(), line("q", task_entry=CODEIO), "codeio"),
    ],
)
@pytest.mark.parametrize("is_held_out", [False, True])
def test_a_reference_that_no_answer_could_equal_is_refused_by_file_and_line(
    tmp_path: Path, component: RewardComponent, bad: str, told: str, is_held_out: bool
) -> None:
    entry = json.dumps({"task": "chain_sum", "entry": {"question": "", "answer": "1", "metadata": {}}})
    good = [line("a", r"1", task_entry=entry), line("b", "2", task_entry=entry)]
    write_lines(tmp_path / "train.jsonl", good if is_held_out else [good[0], bad])
    write_lines(tmp_path / "held-out.jsonl", [line("c", task_entry=entry), bad])
    spec = JsonlDataset(train_path="train.jsonl", evaluation_path="held-out.jsonl" if is_held_out else "")
    with refusal_of("dataset.evaluation_path" if is_held_out else "dataset.train_path", match=told) as error:
        load_dataset(
            spec, num_evaluation=2 * is_held_out, seed=0, model_root=SpecRoot(tmp_path), components=(component,)
        )
    assert ("held-out.jsonl:2" if is_held_out else "train.jsonl:2") in error.value.problem


@pytest.mark.parametrize("reference", ["42", "1/2", r"\frac{1}{2}", "2x+1", r"\{1, 2\}", "$x$", "A"])
def test_mathematics_is_a_reference_of_math_verify(tmp_path: Path, reference: str) -> None:
    write_lines(tmp_path / "train.jsonl", [line("a", reference)])
    components = (MathVerifyReward(), PluginReward(entry_point="mine"))
    spec = JsonlDataset(train_path="train.jsonl")
    assert load_dataset(spec, num_evaluation=0, seed=0, model_root=SpecRoot(tmp_path), components=components).train


def test_a_missing_file_is_refused_and_named(tmp_path: Path) -> None:
    with refusal_of("dataset.train_path", match=r"absent\.jsonl"):
        load(JsonlDataset(train_path="absent.jsonl"), model_root=tmp_path)


def test_prompts_are_a_pure_function_of_seed_and_iteration(tokenizer: PreTrainedTokenizerBase) -> None:
    undisturbed, resumed = source(tokenizer, eight_prompts()), source(tokenizer, eight_prompts())
    walked = [undisturbed.training_prompts(iteration) for iteration in range(4)]
    assert resumed.training_prompts(3) == walked[3]
    assert resumed.training_prompts(0) == walked[0]
    assert source(tokenizer, eight_prompts(seed=1)).training_prompts(0) != walked[0]


def test_a_pass_asks_every_question_once_and_the_next_in_another_order(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    write_lines(tmp_path / "train.jsonl", questions(*range(12)))
    dataset = load(JsonlDataset(train_path="train.jsonl"), num_evaluation=0, model_root=tmp_path)
    prompts = source(tokenizer, eight_prompts(), dataset=dataset)
    asked = [prompt.prompt_id for iteration in range(3) for prompt in prompts.training_prompts(iteration)]
    assert len(asked) == 24
    assert set(asked[:12]) == set(asked[12:]) == {example.example_id for example in dataset.train}
    assert asked[:12] != asked[12:]


def test_prompts_are_numbered_by_their_position_and_carry_their_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = source(tokenizer, eight_prompts()).training_prompts(5)
    assert [prompt.index for prompt in prompts] == list(range(8))
    assert [tokenizer.decode(unpack_int32(prompt.token_ids)) for prompt in prompts] == [
        prompt.text for prompt in prompts
    ]
    first, second = prompts[0].text.removesuffix("=").split("+")
    assert prompts[0].reference == str(int(first) + int(second))[::-1]


def test_reserves_are_fresh_prompts_a_pure_function_of_seed_and_iteration(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts, again = (source(tokenizer, eight_prompts(rollout__max_resamples=3)) for _ in range(2))
    for iteration in (0, 5):
        asked, reserves = prompts.training_prompts(iteration), prompts.reserve_prompts(iteration)
        everything = [*asked, *(prompt for prompts in reserves for prompt in prompts)]
        assert [len(prompts) for prompts in reserves] == [8, 8, 8]
        assert [prompt.index for prompt in everything] == list(range(32))
        assert len({prompt.prompt_id for prompt in everything}) == 32
        assert again.reserve_prompts(iteration) == reserves
    assert prompts.reserve_prompts(0) != prompts.reserve_prompts(5)
    assert source(tokenizer, eight_prompts(seed=1, rollout__max_resamples=3)).reserve_prompts(
        5
    ) != prompts.reserve_prompts(5)
    assert prompts.training_prompts(5) == source(tokenizer, eight_prompts()).training_prompts(5)
    assert source(tokenizer, eight_prompts()).reserve_prompts(5) == ()


def test_reserves_come_again_where_the_pool_is_small_but_never_beside_themselves(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    write_lines(tmp_path / "train.jsonl", questions(*range(12)))
    dataset = load(JsonlDataset(train_path="train.jsonl"), num_evaluation=0, model_root=tmp_path)
    prompts = source(tokenizer, eight_prompts(rollout__max_resamples=2), dataset=dataset)
    asked = {prompt.prompt_id for prompt in prompts.training_prompts(0)}
    drawn = [prompt.prompt_id for prompts in prompts.reserve_prompts(0) for prompt in prompts]
    fresh = {example.example_id for example in dataset.train} - asked
    assert [set(drawn[start : start + 4]) for start in (0, 4, 8, 12)] == [fresh] * 4


def test_a_pool_that_an_iteration_takes_whole_has_no_reserves(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    write_lines(tmp_path / "train.jsonl", questions(*range(8)))
    dataset = load(JsonlDataset(train_path="train.jsonl"), num_evaluation=0, model_root=tmp_path)
    with refusal_of("rollout.max_resamples", match="8 prompts, and the data set has 8"):
        source(tokenizer, eight_prompts(rollout__max_resamples=1), dataset=dataset)
    assert source(tokenizer, eight_prompts(), dataset=dataset).reserve_prompts(0) == ()


def test_evaluation_prompts_are_the_held_out_examples_in_order(tokenizer: PreTrainedTokenizerBase) -> None:
    dataset = load(AdditionDataset(), num_evaluation=4)
    prompts = source(tokenizer, eight_prompts(), dataset=dataset).evaluation_prompts()
    assert [(prompt.index, prompt.text) for prompt in prompts] == [
        (index, example.question) for index, example in enumerate(dataset.evaluation)
    ]


def test_a_chat_is_rendered_by_the_tokenizers_template(tokenizer: PreTrainedTokenizerBase) -> None:
    chatty = AutoTokenizer.from_pretrained(DEMO_MODEL)
    chatty.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    dataset = {"type": "reasoning_gym", "task": "chain_sum", "chat": {"system_prompt": "Be exact."}}
    spec = eight_prompts(dataset=dataset)
    prompt = source(chatty, spec, dataset=load(CHAIN_SUM)).evaluation_prompts()[0]
    question = load(CHAIN_SUM).evaluation[0].question
    assert prompt.text == f"[system]Be exact.\n[user]{question}\n[assistant]"
    with refusal_of("dataset.chat", match="no chat template"):
        source(tokenizer, spec, dataset=load(CHAIN_SUM))


def test_a_tokenizers_own_bos_is_kept_and_its_closing_token_is_not() -> None:
    from tokenizers.processors import TemplateProcessing

    wrapping = AutoTokenizer.from_pretrained(DEMO_MODEL)
    wrapping.bos_token = "<unk>"
    wrapping.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A <eos>", special_tokens=[("<unk>", 2), ("<eos>", 1)]
    )
    token_ids = unpack_int32(source(wrapping, eight_prompts()).training_prompts(0)[0].token_ids)
    assert token_ids[0] == 2
    assert token_ids[-1] == wrapping("=", add_special_tokens=False).input_ids[0]


@pytest.mark.parametrize(
    ("max_prompt_tokens", "context_tokens", "field"),
    [(5, 512, "rollout.max_prompt_tokens"), (64, 10, "rollout.sampling.max_new_tokens")],
)
def test_a_prompt_that_does_not_fit_is_refused_at_the_start(
    tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, context_tokens: int, field: str
) -> None:
    with refusal_of(field):
        source(tokenizer, eight_prompts(rollout__max_prompt_tokens=max_prompt_tokens), context_tokens=context_tokens)


def test_an_empty_prompt_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write_lines(tmp_path / "train.jsonl", ['{"prompt": "", "reference": "nothing"}'])
    dataset = load(JsonlDataset(train_path="train.jsonl"), num_evaluation=0, model_root=tmp_path)
    with pytest.raises(InvalidInput, match="train/1 is empty"):
        source(tokenizer, eight_prompts(), dataset=dataset)
