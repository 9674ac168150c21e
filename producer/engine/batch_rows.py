"""Rows of an engine call: what is shared by every engine that decodes a whole batch token by token.

Row p·G + g is sample g of prompt p.
"""

from __future__ import annotations

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from contracts.rollouts import Completion, PromptBatch
from onbeat.kept_sets import pack_kept_sets
from producer.engine.ends import Ends
from producer.engine.sampling import Logits, completion_uniforms, sample

FEWEST_ROWS = 8
"""Least number of held rows: products of fewer take other kernels, whose last bits differ, and hardly cost less."""
LEAVE_SHARE = 0.25
"""Rows leave when so large a share of the held ones has stopped: moving the others has its price."""


class BatchRows:
    """The completions of one batch while they grow: k·G rows of at most T = max_new_tokens tokens.

    N of them are held: those that the engine's next call decodes.
    """

    def __init__(self, batch: PromptBatch, ends: Ends) -> None:
        self._batch = batch
        self._ends = ends
        self._uniforms = completion_uniforms(batch)
        num_rows, max_new_tokens = self._uniforms.shape
        self._held = np.arange(num_rows)
        """[N] row numbers, ascending."""
        self._tokens = np.zeros((num_rows, max_new_tokens), dtype="<i4")
        self._logprobs = np.zeros((num_rows, max_new_tokens), dtype="<f4")
        self._kept: list[list[NDArray[np.int32]]] = [[] for _ in range(num_rows)]
        """[k·G] the kept set of each token of a row; none without truncated sampling."""
        self._num_tokens = np.zeros(num_rows, dtype=np.int64)
        self._stopped = np.zeros(num_rows, dtype=bool)
        self._step = 0

    @property
    def finished(self) -> bool:
        """Whether every row has its end-of-sequence token, or max_new_tokens tokens."""
        return self._step == self._tokens.shape[1] or bool(self._stopped.all())

    def append(self, logits: Logits) -> NDArray[np.int64]:
        """[N, V] logits of the held rows → [N] next input tokens. A held row that has stopped records nothing."""
        held = self._held
        drawn = sample(logits, self._batch.sampling, self._uniforms[held, self._step])
        self._tokens[held, self._step] = tokens = drawn.tokens
        self._logprobs[held, self._step] = drawn.logprobs
        for place, ids in drawn.kept.items():
            self._kept[held[place]].append(ids)
        # Counted before rows stop: the end-of-sequence token is a row's own, and what follows it is not.
        self._num_tokens[held] += ~self._stopped[held]
        self._step += 1
        self._stopped[held] |= self._ends.reached(tokens, self._batch.sampling, self._tail)
        return tokens

    def _tail(self, row: int, num_tokens: int) -> NDArray[np.int32]:
        return self._tokens[self._held[row], max(0, self._step - num_tokens) : self._step]

    def leave(self) -> NDArray[np.int64] | None:
        """Lets stopped rows go. Answers the places [n], among the held ones, of those that stay; None if all stay.

        An engine that never asks decodes every row to the end. FEWEST_ROWS stay in any case, stopped ones among them.
        """
        stopped = self._stopped[self._held]
        num_kept = max(FEWEST_ROWS, len(stopped) - int(stopped.sum()))
        if len(stopped) - num_kept < LEAVE_SHARE * len(stopped):
            return None
        # False sorts before True: rows that go on come first, then as many stopped ones as are needed. Then they are
        # sorted by place again, since an engine moves the rows of its cache forward only.
        kept = np.sort(np.argsort(stopped, kind="stable")[:num_kept])
        self._held = self._held[kept]
        return kept

    def completions(self) -> list[list[Completion]]:
        """Completions [k][G] of the finished rows."""
        group_size = self._batch.group_size
        return [
            [self._completion(prompt * group_size + sample) for sample in range(group_size)]
            for prompt in range(len(self._batch.prompts))
        ]

    def _completion(self, row: int) -> Completion:
        num_tokens = int(self._num_tokens[row])
        return Completion(
            token_ids=self._tokens[row, :num_tokens].tobytes(),
            generator_logprobs=self._logprobs[row, :num_tokens].tobytes(),
            finish_reason="stop" if self._stopped[row] else "length",
            kept_sets=pack_kept_sets(self._kept[row][:num_tokens]) if self._batch.has_kept_sets else UNSET,
        )
