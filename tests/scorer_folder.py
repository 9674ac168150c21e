"""A small reward model that a test makes: random weights, the same each time."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.builders import VOCABULARY, char_tokenizer


def scorer_folder(root: Path, *, num_labels: int = 1, context_tokens: int = 128, chat: bool = True) -> Path:
    """Saves a random sequence classifier of the character vocabulary; returns root/scorer."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=context_tokens,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=num_labels,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForSequenceClassification(config)
    model.save_pretrained(root / "scorer")
    tokenizer = char_tokenizer()
    if not chat:
        tokenizer.chat_template = None  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save_pretrained(root / "scorer")
    return root / "scorer"
