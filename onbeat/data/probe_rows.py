"""The rows of a job's probe: tokens of its prompts, and random ones behind them (contracts/probes.py).

The beginning of a row is what the job samples after; the random tokens behind it reach rows of the embedding, and
experts, that no prompt reaches. All rows are of one length, so that no engine has to pad them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.probes import ProbeRow
from contracts.rollouts import Prompt
from contracts.spec.rollout import RolloutSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def probe_rows(
    spec: RolloutSpec,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    tokens: Sequence[int],
    longest_tokens: int,
    is_rough: bool,
) -> tuple[ProbeRow, ...]:
    """Returns the rows of a job's probe: a pure function of the arguments.

    Args:
        spec: The spec's `rollout`.
        prompts: The job's training prompts.
        seed: The job's seed.
        tokens: The ids that random tokens are drawn from.
        longest_tokens: The longest row that the job samples, and the model takes.
        is_rough: `contracts.probes.is_rough` of the model.
    """
    # An engine that says the log-probs of a prompt samples a token behind it, which has to fit, too.
    length = min(spec.version_probe.tokens, max(2, longest_tokens - 1))
    num_rows, most_scored = spec.probe_shape(is_rough=is_rough)
    num_scored = min(most_scored, length // 2)
    rows: list[ProbeRow] = []
    for number in range(num_rows):
        prompt = prompts[_draw(seed, number, "prompt") % len(prompts)]
        begun = unpack_int32(prompt.token_ids)[: length - num_scored]
        drawn = [tokens[_draw(seed, number, place) % len(tokens)] for place in range(len(begun), length)]
        row = [*begun, *drawn]
        rows.append(ProbeRow(prompt=pack_int32(row[:-num_scored]), scored=pack_int32(row[-num_scored:])))
    return tuple(rows)


def plain_tokens(tokenizer: PreTrainedTokenizerBase, *, vocabulary_tokens: int) -> list[int]:
    """Returns the ids below `vocabulary_tokens` that stand for text: a server may refuse others, or replace them."""
    added: dict[str, int] = tokenizer.get_added_vocab()  # pyright: ignore
    special = {*tokenizer.all_special_ids, *added.values()}
    ids = {token for token in tokenizer.get_vocab().values() if token < vocabulary_tokens}
    # A tokenizer may have no other tokens than added ones.
    return sorted(ids - special) or sorted(ids)


def _draw(seed: int, row: int, what: int | str) -> int:
    name = f"{seed}/probe/{row}/{what}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
