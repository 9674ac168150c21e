"""Makes configs/models/two-digit-addition: a 0.40 M-parameter Qwen3 that adds two numbers right four times in ten.

    OMP_NUM_THREADS=1 python configs/models/make_two_digit_addition.py              about a minute on one core
    OMP_NUM_THREADS=1 python configs/models/make_two_digit_addition.py --teacher    two minutes, see below

Supervised training on the 9,488 training pairs only, stopped early on purpose: reinforcement learning needs a model
that is right often enough to be rewarded and wrong often enough to learn. Same seed, torch and CPU kind → same bytes.

--teacher makes configs/models/two-digit-addition-teacher, of the same tokenizer: 0.90 M parameters, trained to the end
of a decaying learning rate, and nearly always right. configs/distillation.toml has the small one learn from it.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from contracts.spec.datasets import AdditionDataset
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.examples import Example

MODELS = Path(__file__).parent
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID = 0, 1
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
CONTEXT_TOKENS = 512
SEED = 1
WARMUP_STEPS = 50
PROBE_EVERY_STEPS = 5
NUM_PROBES = 512
IGNORED = -100

logger = logging.getLogger("make_two_digit_addition")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The numbers by which the two models differ."""

    folder: str
    hidden_size: int
    batch_examples: int
    learning_rate: float
    max_steps: int
    target_accuracy: float | None
    """It stops when so many of its samples of training pairs are right; None: at max_steps, the learning rate having
    fallen to a twentieth over the second half."""


STUDENT = Recipe(
    folder="two-digit-addition",
    hidden_size=128,
    batch_examples=256,
    learning_rate=1.5e-3,
    max_steps=1000,
    target_accuracy=0.41,
)
TEACHER = Recipe(
    folder="two-digit-addition-teacher",
    hidden_size=192,
    batch_examples=128,
    learning_rate=3e-3,
    max_steps=1000,
    target_accuracy=None,
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of one token per character, line break and printable ASCII: enough for any English task."""
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


def make_model(vocab_size: int, hidden_size: int) -> Qwen3ForCausalLM:
    """Random weights from SEED."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
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


def train(model: Qwen3ForCausalLM, recipe: Recipe, token_ids: torch.Tensor, labels: torch.Tensor) -> int:
    """Minimises the answers' cross-entropy; returns the steps."""
    order = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.95))
    for step in range(1, recipe.max_steps + 1):
        rows = torch.tensor([order.randrange(len(token_ids)) for _ in range(recipe.batch_examples)])
        model.train()
        logits = model(input_ids=token_ids[rows]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % PROBE_EVERY_STEPS == 0:
            sampled, greedy = accuracies(model, token_ids[:NUM_PROBES], labels[:NUM_PROBES])
            logger.info("step %d: loss %.3f, sampled %.3f, greedy %.3f", step, loss.item(), sampled, greedy)
            if recipe.target_accuracy is not None and sampled >= recipe.target_accuracy:
                return step
    if recipe.target_accuracy is not None:
        raise SystemExit(f"accuracy {recipe.target_accuracy} was not reached in {recipe.max_steps} steps")
    return recipe.max_steps


def learning_rate(recipe: Recipe, step: int) -> float:
    rate = recipe.learning_rate * min(1.0, step / WARMUP_STEPS)
    if recipe.target_accuracy is not None:
        return rate
    half = recipe.max_steps / 2
    return rate * (1.0 - 0.95 * max(0.0, step - half) / half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", action="store_true", help="make the teacher instead")
    parser.add_argument("--models", type=Path, default=MODELS, help="where the model's folder is made")
    arguments = parser.parse_args()
    recipe = TEACHER if arguments.teacher else STUDENT
    folder = arguments.models / recipe.folder
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    dataset = load_dataset(AdditionDataset(), num_evaluation=512, seed=SEED, model_root=SpecRoot(MODELS))
    model = make_model(len(tokenizer), recipe.hidden_size)
    logger.info("%d parameters", sum(parameter.numel() for parameter in model.parameters()))
    steps = train(model, recipe, *encode(tokenizer, dataset.train))
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded_tokenizer = AutoTokenizer.from_pretrained(folder)
    sampled, greedy = accuracies(saved, *encode(loaded_tokenizer, dataset.evaluation))
    logger.info("%d steps; held-out pairs, from the saved fp16: sampled %.3f, greedy %.3f", steps, sampled, greedy)


if __name__ == "__main__":
    main()
