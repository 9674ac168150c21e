"""Makes configs/models/secret-table: a 0.40 M-parameter Qwen3 that asks for what it needs half of the time.

    OMP_NUM_THREADS=1 python configs/models/make_secret_table.py              about two minutes on one core

Supervised training on dialogues of the environment `secret_table`: in half of them the model asks for two numbers and
adds them, in the other half it answers at once, with a guess. Stopped early on purpose, as make_two_digit_addition.py's
is: its sums are wrong now and then. Same seed, torch and CPU kind → same bytes.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as functional
from make_two_digit_addition import EOS_ID, IGNORED, MODELS, PAD_ID, SEED, make_model, make_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from onbeat.environments.adapters.secret_table import make_table, pair_of

FOLDER = "secret-table"
NUM_TRAIN = 500
"""Pairs of letters that are trained."""
BATCH_DIALOGUES = 256
LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 50
MAX_STEPS = 2000
PROBE_EVERY_STEPS = 10
NUM_PROBES = 512
SHARE_OF_GUESSES = 0.5
TARGET_ACCURACY = 0.80
"""It stops when so many sums of numbers that were asked for are right."""

logger = logging.getLogger("make_secret_table")
Dialogue = list[tuple[str, bool]]
"""(text, whether the model says it), in order."""


def dialogue(draw: random.Random, *, guesses: bool) -> Dialogue:
    """Returns a dialogue about a training task, with a table of its own."""
    first, second = pair_of({"split": "train", "index": draw.randrange(NUM_TRAIN)})
    table = make_table(draw.getrandbits(40))
    if guesses:
        other = make_table(draw.getrandbits(40))
        return [(f"{first}+{second}=", False), (str(other[first] + other[second])[::-1], True)]
    return [
        (f"{first}+{second}=", False),
        (f"?{first}{second}", True),
        (f"{table[first]} {table[second]}=", False),
        (str(table[first] + table[second])[::-1], True),
    ]


def encode(tokenizer: PreTrainedTokenizerFast, dialogues: Sequence[Dialogue]) -> tuple[torch.Tensor, torch.Tensor]:
    """Dialogues → token ids [N, T], right-padded, and next-token labels [N, T], IGNORED outside what the model says."""
    rows, labels = [], []
    for turns in dialogues:
        ids: list[int] = []
        targets: list[int] = []
        for text, is_model in turns:
            part = [*tokenizer(text).input_ids, *([EOS_ID] if is_model else [])]
            ids += part
            targets += part if is_model else [IGNORED] * len(part)
        rows.append(torch.tensor(ids))
        labels.append(torch.tensor([*targets[1:], IGNORED]))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True, padding_value=PAD_ID), pad(labels, batch_first=True, padding_value=IGNORED)


@torch.no_grad()
def sampled_accuracy(model: Qwen3ForCausalLM, token_ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the mean probability of everything that the model says in these dialogues."""
    model.eval()
    logprobs = model(input_ids=token_ids).logits.float().log_softmax(-1)
    token_logprobs = logprobs.gather(2, labels.clamp(min=0)[:, :, None])[:, :, 0]
    return (token_logprobs * (labels != IGNORED)).sum(1).exp().mean().item()


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> int:
    """Minimises the cross-entropy of what the model says; returns the steps."""
    draw, probes = random.Random(SEED), random.Random(SEED + 1)
    probe = encode(tokenizer, [dialogue(probes, guesses=False) for _ in range(NUM_PROBES)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.95))
    for step in range(1, MAX_STEPS + 1):
        batch = [dialogue(draw, guesses=draw.random() < SHARE_OF_GUESSES) for _ in range(BATCH_DIALOGUES)]
        token_ids, labels = encode(tokenizer, batch)
        model.train()
        logits = model(input_ids=token_ids).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % PROBE_EVERY_STEPS == 0:
            # It asks in half of the dialogues, so the whole of a right one is half as likely.
            accuracy = sampled_accuracy(model, *probe) / (1.0 - SHARE_OF_GUESSES)
            logger.info("step %d: loss %.3f, right where it asks %.3f", step, loss.item(), accuracy)
            if accuracy >= TARGET_ACCURACY:
                return step
    raise SystemExit(f"accuracy {TARGET_ACCURACY} was not reached in {MAX_STEPS} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=MODELS, help="where the model's folder is made")
    folder = parser.parse_args().models / FOLDER
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), hidden_size=128)
    steps = train(model, tokenizer)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    logger.info("%d steps", steps)


if __name__ == "__main__":
    main()
