"""A model whose completions have the lengths that a benchmark wants, and the prompts that ask for them.

The tokens of a model are divided into kinds. A prompt's last token has the kind of the prompt; each token that follows
is of the same kind, or ends the completion, with a probability that the kind has. So a completion's length is drawn by
the sampler like everything else: it is a function of the job's seed, the iteration, the prompt and the sample, and the
same under every schedule as long as the weights hardly move.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks._results import REPOSITORY

TOKENIZER = REPOSITORY / "configs/models/two-digit-addition"
END_OF_SEQUENCE = 1
FIRST_CHARACTER = 20
"""Id of the tokenizer's `0`; those up to `Z` are 20 to 62, one character each."""
CHARACTERS = "0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ"
VOCABULARY = 512
STRENGTH = 1.0
"""A token's kind weighs so much in its embedding; everything else has a deviation of 0.02."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Prompts of one kind: their share, and the mean length of their completions before max_new_tokens cuts them."""

    share: float
    mean_tokens: float


EQUAL = (Kind(share=1.0, mean_tokens=math.inf),)
"""Every completion has max_new_tokens tokens."""
LONG_TAILED = (
    Kind(share=0.45, mean_tokens=12),
    Kind(share=0.30, mean_tokens=32),
    Kind(share=0.17, mean_tokens=90),
    Kind(share=0.08, mean_tokens=400),
)
"""A few prompts have most of the tokens: the mean is 60, and one completion of 40 is longer than 400."""


def make_model(folder: Path, kinds: Sequence[Kind], *, hidden_size: int, num_layers: int) -> None:
    """Writes a random Qwen3 that goes on with the kind that it is given, and ends with that kind's probability."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        intermediate_size=3 * hidden_size,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=END_OF_SEQUENCE,
    )
    model = Qwen3ForCausalLM(config)
    of_kind = [[token for token in range(3, VOCABULARY) if token % len(kinds) == place] for place in range(len(kinds))]
    with torch.no_grad():
        head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
        head[:, : len(kinds)] = 0.0
        for place, tokens in enumerate(of_kind):
            embedding[tokens, place] = STRENGTH
            head[tokens, place] = STRENGTH
        head[:3] = 0.0
        head[END_OF_SEQUENCE, : len(kinds)] = -STRENGTH
        for place, kind in enumerate(kinds):
            if math.isfinite(kind.mean_tokens):
                _end_after(model, place, kind, torch.tensor(of_kind[place]))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)


def _end_after(model: Qwen3ForCausalLM, place: int, kind: Kind, tokens: torch.Tensor) -> None:
    """Gives the end of a sequence the probability 1 / mean_tokens after tokens of this kind."""
    sequence = tokens[torch.randint(len(tokens), (1, 64))]
    hidden = model.model(sequence).last_hidden_state[0]
    others = model.lm_head(hidden)
    others[:, END_OF_SEQUENCE] = -math.inf
    # p = e^x / (e^x + sum of the others), and x is this kind's entry of the hidden state times the head's.
    wanted = others.logsumexp(-1) - math.log(kind.mean_tokens - 1)
    model.lm_head.weight[END_OF_SEQUENCE, place] = (wanted / hidden[:, place]).mean()


def write_prompts(path: Path, kinds: Sequence[Kind], *, number: int, num_characters: int) -> None:
    """Writes so many different prompts of so many characters; the last character of each is of its kind."""
    generator = random.Random(0)
    shares = [kind.share for kind in kinds]
    lines = []
    for index in range(number):
        (place,) = generator.choices(range(len(kinds)), shares)
        last = next(c for at, c in enumerate(CHARACTERS, FIRST_CHARACTER) if at % len(kinds) == place)
        head = "".join(generator.choices(CHARACTERS, k=num_characters - 6))
        lines.append(json.dumps({"prompt": f"{head}{index:05}{last}", "reference": ""}))
    path.write_text("\n".join(lines) + "\n")
