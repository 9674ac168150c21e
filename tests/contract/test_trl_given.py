"""`loss = "sft"` against TRL's SFTTrainer: the same rows are the same tokens, with the same loss and gradient.

TRL is no dependency of the project: `make test-trl` installs it beside it, and runs this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from consumer.model.policy import load_policy
from contracts.encoding.arrays import pack_float32, unpack_int32
from contracts.rollouts import Completion, Prompt, Rollout, RolloutBatch
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.source import PromptSource
from producer.rollout.sampled_batch import given_completion
from tests.builders import batch_of, char_tokenizer, job_spec, tiny_model_folder
from tests.contract.test_streamed_gradient import relative_error, streamed_gradient

pytest.importorskip("trl", reason="TRL is not installed: `make test-trl` runs this in an environment that has it")

ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a * b)} for a in (1, 7, 12) for b in (3, 44, 180)]
CONVERSATIONS = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    }
    for row in ROWS
]
TURNS_THAT_END = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template whose turns end with a token, behind which it writes nothing."""


def batches_of(prompts: list[Prompt]) -> list[RolloutBatch]:
    return [
        batch_of([(unpack_int32(prompt.token_ids), [rollout_of(prompt)])], batch_id=f"0/train/{number}")
        for number, prompt in enumerate(prompts)
    ]


def rollout_of(prompt: Prompt) -> Rollout:
    completion: Completion = given_completion(prompt)
    assert completion.generator_logprobs == pack_float32([0.0] * completion.num_tokens)
    return Rollout(completion=completion, text="", reward=0.0, reward_breakdown={})


def tokenizer_of_turns() -> PreTrainedTokenizerFast:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TURNS_THAT_END
    return tokenizer


def sft_trainer(model: Path, rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(model / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=len(rows),
    )
    return SFTTrainer(
        model=str(model), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of_turns()
    )


@pytest.mark.parametrize(("rows", "chat"), [(ROWS, {}), (CONVERSATIONS, {"chat": {}})], ids=["texts", "conversations"])
def test_rows_are_the_same_tokens_with_the_same_loss_and_gradient(
    tmp_path: Path, rows: list[dict[str, Any]], chat: dict[str, Any]
) -> None:
    model = tiny_model_folder(tmp_path, hidden_size=16, num_layers=1)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = job_spec(
        algorithm={"loss": "sft", "advantage": "none"},
        dataset={"type": "jsonl", "train_path": "rows.jsonl"} | chat,
        rollout={
            "group_size": 1,
            "batches_per_iteration": len(rows),
            "prompts_per_batch": 1,
            "sampling": {"max_new_tokens": 8},
        },
        evaluation={"num_prompts": 0},
    )
    root = SpecRoot(tmp_path)
    source = PromptSource(job_examples(spec, root), spec=spec, tokenizer=tokenizer_of_turns(), context_tokens=64)
    prompts = list(source.training_prompts(0))

    trainer = sft_trainer(model, rows)
    (inputs,) = list(trainer.get_train_dataloader())
    inputs = trainer._prepare_inputs(inputs)
    theirs = {
        tuple(row[kept].tolist()): labels[kept].tolist()
        for row, labels, kept in zip(
            inputs["input_ids"], inputs["labels"], inputs["attention_mask"].bool(), strict=True
        )
    }
    for prompt in prompts:
        asked, given = unpack_int32(prompt.token_ids), unpack_int32(prompt.dataset_completion or b"")
        assert theirs.pop((*asked, *given)) == [-100] * len(asked) + list(given)
    assert theirs == {}

    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=(inputs["labels"] != -100).sum())
    loss.backward()
    expected = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    policy = load_policy(job_spec(model__path=model.name).model, model_root=root, gradient_checkpointing=False)
    gradient = streamed_gradient(policy, batches_of(prompts), spec)
    assert gradient.keys() == expected.keys()
    assert any(one.abs().max() > 0.01 for one in expected.values())
    assert relative_error(gradient, expected) < 1e-5

    with torch.no_grad():
        logits = trainer.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    log_probs = logits[:, :-1].double().log_softmax(dim=-1)
    targets = inputs["labels"][:, 1:]
    learnt = targets != -100
    chosen = log_probs.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)[learnt]
    assert loss.item() == pytest.approx(-chosen.mean().item(), rel=1e-5)
