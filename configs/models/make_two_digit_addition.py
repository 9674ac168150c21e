"""Makes configs/models/two-digit-addition: a 0.40 M-parameter Qwen3 that adds two numbers right four times in ten.

    OMP_NUM_THREADS=1 python configs/models/make_two_digit_addition.py

Supervised training on the 9,488 training pairs only, stopped early on purpose: reinforcement learning needs a model
that is right often enough to be rewarded and wrong often enough to learn. Same seed, torch and CPU kind → same bytes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from contracts.spec_tables.datasets import AdditionDataset
from contracts.spec_tables.root import SpecRoot
from prompts.datasets.addition import NUM_HELD_OUT
from prompts.datasets.base import load_dataset
from prompts.datasets.examples import Example

FOLDER = Path(__file__).parent / "two-digit-addition"
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID = 0, 1
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
CONTEXT_TOKENS = 512
SEED = 1
BATCH_EXAMPLES = 256
LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 50
MAX_STEPS = 1000
PROBE_EVERY_STEPS = 5
NUM_PROBES = 512
TARGET_ACCURACY = 0.41
IGNORED = -100

logger = logging.getLogger("make_two_digit_addition")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: line break and printable ASCII, so that any English task can be encoded."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # Without it the decoder puts a blank between tokens, and no answer would equal its reference.
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )


def make_model(vocab_size: int) -> Qwen3ForCausalLM:
    """Random weights from SEED."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples → token ids [N, T], right-padded, and next-token labels [N, T], IGNORED outside the answer."""
    rows, labels = [], []
    for example in examples:
        prompt = list(tokenizer(example.question).input_ids)
        answer = [*tokenizer(example.reference).input_ids, EOS_ID]
        rows.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([IGNORED] * (len(prompt) - 1) + answer + [IGNORED]))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True, padding_value=PAD_ID), pad(labels, batch_first=True, padding_value=IGNORED)


@torch.no_grad()
def accuracies(model: Qwen3ForCausalLM, token_ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """(expected accuracy of one sample at temperature 1, accuracy of greedy decoding), both exact.

    The first is the probability of the whole reference answer, which a count of samples would only estimate.
    """
    model.eval()
    logits = model(input_ids=token_ids).logits.float()
    answer_mask = labels != IGNORED
    token_logprobs = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[:, :, None])[:, :, 0]
    sampled = (token_logprobs * answer_mask).sum(1).exp().mean().item()
    greedy = ((logits.argmax(-1) == labels) | ~answer_mask).all(1).float().mean().item()
    return sampled, greedy


def train(model: Qwen3ForCausalLM, token_ids: torch.Tensor, labels: torch.Tensor) -> int:
    """Minimises the answers' cross-entropy until TARGET_ACCURACY on a part of the training pairs; returns the steps."""
    order = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.95))
    for step in range(1, MAX_STEPS + 1):
        rows = torch.tensor([order.randrange(len(token_ids)) for _ in range(BATCH_EXAMPLES)])
        model.train()
        logits = model(input_ids=token_ids[rows]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % PROBE_EVERY_STEPS == 0:
            sampled, greedy = accuracies(model, token_ids[:NUM_PROBES], labels[:NUM_PROBES])
            logger.info("step %d: loss %.3f, sampled %.3f, greedy %.3f", step, loss.item(), sampled, greedy)
            if sampled >= TARGET_ACCURACY:
                return step
    raise SystemExit(f"accuracy {TARGET_ACCURACY} was not reached in {MAX_STEPS} steps")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    dataset = load_dataset(AdditionDataset(), num_evaluation=NUM_HELD_OUT, seed=SEED, model_root=SpecRoot(FOLDER))
    model = make_model(len(tokenizer))
    logger.info("%d parameters", sum(parameter.numel() for parameter in model.parameters()))
    steps = train(model, *encode(tokenizer, dataset.train))
    model.half().save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    saved = Qwen3ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    loaded_tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    sampled, greedy = accuracies(saved, *encode(loaded_tokenizer, dataset.evaluation))
    logger.info("%d steps; held-out pairs, from the saved fp16: sampled %.3f, greedy %.3f", steps, sampled, greedy)


if __name__ == "__main__":
    main()
