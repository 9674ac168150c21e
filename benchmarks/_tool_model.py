"""A small model that may call a tool or guess: what `python -m benchmarks trl --cases tools` starts both sides with.

    .venv-trl/bin/python -m benchmarks._tool_model FOLDER

The chat template is Qwen2.5's, as TRL ships it: TRL trains no template with tools that it doesn't know. The tokenizer
and the model learn from dialogues of the task. In a part of them nothing is looked up, and the answer is another code:
which of the two is right is what there is left to learn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import get_json_schema
from trl.chat_template_utils import qwen2_5_chat_template  # pyright: ignore[reportMissingImports]

from benchmarks._lookup_environment import Lookup, rows

SEED = 1_000_003
"""Away from the seeds of the rows that are trained."""
VOCABULARY = 640
STEPS = 1000
BATCH = 16
GUESSED = 0.5
"""Share of the dialogues without a call."""
LEARNING_RATE = 2e-3


def dialogue(row: dict[str, str], guessed: str = "") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the messages before the model's first turn, and those after. guessed: a code, instead of a call."""
    known = json.loads(row["task_entry"])
    if guessed:
        return [{"role": "user", "content": row["prompt"]}], [{"role": "assistant", "content": guessed}]
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": known["key"]}}}
    before = [{"role": "user", "content": row["prompt"]}]
    after = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "lookup", "content": str(known["code"])},
        {"role": "assistant", "content": row["reference"]},
    ]
    return before, after


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learns a byte-level BPE; digits stay single, as in Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[A-Za-z_]+|[^\w\s]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=qwen2_5_chat_template,
        clean_up_tokenization_spaces=False,
    )


def encoded(tokenizer: PreTrainedTokenizerFast, row: dict[str, str], guessed: str = "") -> tuple[list[int], list[bool]]:
    """Returns a dialogue's tokens, and which of them the model writes."""
    before, after = dialogue(row, guessed)
    tools: list[Any] = [get_json_schema(Lookup().lookup)]
    ids: list[int] = []
    written: list[bool] = []
    shown = list(before)
    for message in after:
        is_model = message["role"] == "assistant"
        for generation_prompt in (True, False) if is_model else (False,):
            now = shown if generation_prompt else [*shown, message]
            text = tokenizer.apply_chat_template(
                now, tools=tools, tokenize=False, add_generation_prompt=generation_prompt
            )
            whole = tokenizer(str(text), add_special_tokens=False).input_ids
            if whole[: len(ids)] != ids:
                raise RuntimeError("the template doesn't keep its beginning")
            new = whole[len(ids) :]
            # What follows the end of its turn, a line break, is the template's.
            last = new.index(tokenizer.eos_token_id) if is_model and not generation_prompt else -1
            written += [place <= last for place in range(len(new))]
            ids = whole
        shown.append(message)
    return ids, written


def make_model(vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        intermediate_size=640,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Trains on dialogues, on what the model writes alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
    stream, others, draw = rows(SEED), rows(SEED + 1), random.Random(SEED)
    for step in range(steps):
        guesses = [next(others)["reference"] if draw.random() < GUESSED else "" for _ in range(BATCH)]
        batch = [encoded(tokenizer, next(stream), guessed) for guessed in guesses]
        width = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
        written = torch.tensor([flags + [False] * (width - len(flags)) for _, flags in batch])
        loss = model(input_ids=ids, labels=ids.masked_fill(~written, -100)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    tools: list[Any] = [get_json_schema(Lookup().lookup)]
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=qwen2_5_chat_template)
    texts = [
        str(plain.apply_chat_template([*before, *after], tools=tools, tokenize=False))
        for before, after in map(dialogue, itertools.islice(rows(SEED), 400))
    ]
    tokenizer = make_tokenizer(texts)
    model = make_model(len(tokenizer))
    warm_up(model, tokenizer, arguments.steps)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
