"""Every job spec in configs/ is valid, and the demo model that two of them use loads offline."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from contracts.encoding.wire import convert
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from contracts.spec.rules import judge
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.source import PromptSource
from tests.refusals import refusal_of

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
SPECS = sorted([*CONFIGS.glob("*.toml"), *(CONFIGS / "curves").glob("*.toml")])
DEMO_MODEL = ROOT / "configs" / "models" / "two-digit-addition"


def read_spec(name: str) -> JobSpec:
    return convert(tomllib.loads((ROOT / "configs" / name).read_text()), JobSpec)


def test_the_specs_that_the_docs_name_are_shipped() -> None:
    whole = {
        "demo.toml",
        "tool-demo.toml",
        "smollm2-calculator.toml",
        "difficulty-pools.toml",
        "distillation.toml",
        "evaluation-sets.toml",
        "rubric.toml",
        "sft.toml",
        "reasoning-gym.toml",
        "smollm2-chain-sum.toml",
        "smollm2-sft.toml",
        "smollm2-sft-grpo.toml",
        "smollm2-mini-batches.toml",
        "smollm2-mixture.toml",
    }
    assert whole | {"dapo.toml", "demo-lora.toml", "smollm2-chain-sum-lora.toml"} <= {path.name for path in SPECS}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_shipped_spec_is_a_valid_job(path: Path) -> None:
    spec = read_spec(str(path.relative_to(CONFIGS)))
    assert judge(spec) == []
    assert spec.deterministic or any(stage.kind == "llm_judge" for stage in spec.stages)
    assert spec.evaluation.num_prompts > 0


def test_a_shipped_spec_names_its_loss_whose_default_may_move() -> None:
    """Its digest, which numbers of docs/benchmarks.md belong to, is then its own."""
    for path in (*SPECS, *(ROOT / "benchmarks").glob("*.toml")):
        assert "loss" in tomllib.loads(path.read_text()).get("algorithm", {}), path.name


def test_each_of_the_four_parts_of_dapo_acts_in_its_spec() -> None:
    """The clips act on a ratio that isn't 1: from a second update on."""
    spec = read_spec("dapo.toml")
    low, high = spec.algorithm.clip_range
    assert (spec.algorithm.loss, low < high, spec.algorithm.updates_per_iteration > 1) == ("dapo", True, True)
    assert spec.rollout.max_resamples > 0
    assert "overlong" in [component.__struct_config__.tag for component in spec.reward.components]


def test_an_unknown_key_in_a_spec_fails_and_names_itself() -> None:
    values = tomllib.loads((ROOT / "configs" / "demo.toml").read_text())
    values["rollout"]["groupsize"] = 8
    with refusal_of("rollout", match="groupsize"):
        convert(values, JobSpec)


@pytest.mark.parametrize("name", ["demo.toml", "reasoning-gym.toml"])
def test_the_demo_models_vocabulary_and_context_cover_the_specs_prompts(name: str) -> None:
    spec = read_spec(name)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / spec.model.path)
    dataset = load_dataset(spec.dataset, num_evaluation=spec.evaluation.num_prompts, seed=0, model_root=SpecRoot(ROOT))
    prompts = PromptSource(dataset, tokenizer=tokenizer, spec=spec, context_tokens=tokenizer.model_max_length)
    assert len(prompts.training_prompts(0)) == spec.rollout.prompts_per_iteration
    # An unknown character would come back as <unk>.
    decoded = [tokenizer.decode(tokenizer(prompt.text).input_ids) for prompt in prompts.evaluation_prompts()]
    assert decoded == [prompt.text for prompt in prompts.evaluation_prompts()]


def test_the_demo_tokenizer_returns_what_it_was_given_and_drops_special_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = "State: 4 - 1 =\n{answer}  ~!"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    answer = [*tokenizer("521").input_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "521"


def test_the_demo_model_loads_strictly_and_greedily_answers_most_additions() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    spec = read_spec("demo.toml")
    examples = load_dataset(spec.dataset, num_evaluation=256, seed=0, model_root=SpecRoot(ROOT)).evaluation
    inputs = tokenizer([example.question for example in examples], return_tensors="pt", padding=True)
    output = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    right = sum(answer == example.reference for answer, example in zip(answers, examples, strict=True))
    assert 0.6 < right / len(examples) < 0.8
    assert (DEMO_MODEL / "model.safetensors").stat().st_size < 1_000_000


def test_the_shipped_teacher_reads_what_the_demo_model_writes() -> None:
    (teacher,) = read_spec("distillation.toml").stages
    folder = ROOT / teacher.files()["model"]
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(DEMO_MODEL).get_vocab()
