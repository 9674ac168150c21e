"""The rows of several batches while they grow, by place: what is sampled, and which places are free again.

    join ─▶ place 0 … N-1 ─ logits [N, V] ─▶ append ─▶ tokens [N] ─▶ the engine's next step
                  ▲                            │
                  └── the last rows move into ─┴─▶ rows that have ended ─▶ Completion ─▶ their batch

A row's tokens are a function of its logits and of its own random numbers (sampling.py), so the books of all batches
are kept together: one draw for all rows, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from contracts.rollouts import Completion, PromptBatch
from contracts.sampling import SamplingParams
from onbeat.data.kept_sets import pack_kept_sets
from onbeat.data.sampled_values import Contexts
from producer.engine.base import Turn
from producer.engine.sampling import Drawn, Ends, Logits, completion_uniforms, measure, sample

Places = NDArray[np.int64]


@dataclass(eq=False, kw_only=True)
class GrowingBatch:
    """A batch of which some rows are sampled, or have ended; row p·G + g is sample g of prompt p."""

    batch: PromptBatch
    turn: Turn | None = None
    """The turn of trajectories that it is, if it is one."""
    ended: dict[int, Completion] = field(default_factory=dict)
    """Row → its completion."""
    prompt_routes: Sequence[bytes] = ()
    """[k] the experts of the prompts' tokens, packed, where the batch has routes."""

    @property
    def finished(self) -> bool:
        return len(self.ended) == self.batch.num_completions

    @property
    def completions(self) -> list[list[Completion]]:
        """Completions [k][G], once it is finished."""
        group_size = self.batch.group_size
        return [
            [self.ended[prompt * group_size + sample] for sample in range(group_size)]
            for prompt in range(len(self.batch.prompts))
        ]


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Rows that take the places of those that have left: from `source` to `target`; `num_rows` are left."""

    source: Places
    target: Places
    num_rows: int


class HeldRows:
    """N rows at the places 0 … N-1, without a hole. A decoder creates it, and adds, draws and removes rows."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._num_rows = 0
        self._samplings: dict[tuple[SamplingParams, bool], int] = {}
        """(parameters, whether the tokens are given) → the number of that kind of rows."""
        self._owners = np.empty(0, dtype=object)
        """[R] the GrowingBatch of each place."""
        self._rows = np.empty(0, dtype=np.int64)
        """[R] the row of its batch."""
        self._kinds = np.empty(0, dtype=np.int64)
        """[R] number of its sampling parameters, among those in `_samplings`."""
        self._steps = np.empty(0, dtype=np.int64)
        """[R] tokens that it has."""
        self._most = np.empty(0, dtype=np.int64)
        """[R] tokens that it may have."""
        self._uniforms = np.empty((0, 0))
        """[R, T]"""
        self._tokens = np.empty((0, 0), dtype="<i4")
        self._logprobs = np.empty((0, 0), dtype="<f4")
        self._kept_sets = np.empty(0, dtype=object)
        """[R] the kept set of each token, a list; its own for each row."""
        self._routes = np.empty(0, dtype=object)
        """[R] the experts of each token that went through the model, packed, a list; its own for each row."""

    def __len__(self) -> int:
        return self._num_rows

    @property
    def batches(self) -> list[GrowingBatch]:
        """The batches with a row that has not ended, in the order of their first places."""
        return list(dict.fromkeys(self._owners[: self._num_rows]))

    def join(self, growing: GrowingBatch) -> Places:
        """Gives each row of a batch a place behind the others, and answers the places."""
        batch = growing.batch
        if not self._num_rows:
            self._samplings.clear()
        places = np.arange(self._num_rows, self._num_rows + batch.num_completions)
        self._make_room(places[-1] + 1, batch.sampling.max_new_tokens)
        self._owners[places] = growing
        self._rows[places] = np.arange(len(places))
        self._kinds[places] = self._samplings.setdefault((batch.sampling, batch.is_given), len(self._samplings))
        self._steps[places] = 0
        self._most[places] = batch.sampling.max_new_tokens
        if not batch.is_given:
            # Column t of a row draws its token t. What is given is measured, and draws nothing.
            self._uniforms[places, : batch.sampling.max_new_tokens] = completion_uniforms(batch)
        for place in places:
            self._kept_sets[place] = []
            self._routes[place] = []
        self._num_rows += len(places)
        return places

    def append(self, logits: Logits, places: Places | None = None) -> tuple[NDArray[np.int64], Places]:
        """Draws a token for each row from its logits, and appends it.

        Args:
            logits: [N, V] of the rows at these places.
            places: [N] the places; None for all rows.

        Returns:
            [N] the tokens, and the places of the rows that ended with them.

        Raises:
            BatchFailed: Logits are not finite; nothing is changed then.
        """
        at = np.arange(self._num_rows) if places is None else places
        steps = self._steps[at]
        # [N]: for each row the uniform of the token that it draws now.
        drawn = self._sample(logits, at, self._uniforms[at, steps])
        self._tokens[at, steps] = tokens = drawn.tokens
        self._logprobs[at, steps] = drawn.logprobs
        for row, ids in drawn.kept_ids.items():
            of_place: list[NDArray[np.int32]] = self._kept_sets[int(at[row])]
            of_place.append(ids)
        self._steps[at] = steps + 1
        stopped = np.zeros(len(at), dtype=bool)
        for (sampling, is_given), kind in self._samplings.items():
            if is_given:
                # What is given ends with its last token alone.
                continue
            of_kind = np.flatnonzero(self._kinds[at] == kind)
            stopped[of_kind] = self._ends.reached(tokens[of_kind], sampling, partial(self._tail, at[of_kind]))
        # steps was read before this token was added: hence + 1.
        has_ended = stopped | (steps + 1 == self._most[at])
        if not has_ended.any():
            return tokens, at[:0]
        for place, reason in zip(at[has_ended].tolist(), stopped[has_ended].tolist(), strict=True):
            self._end(place, "stop" if reason else "length")
        return tokens, at[has_ended]

    def add_routes(self, routes: Sequence[bytes]) -> None:
        """Notes the experts of the tokens that the last step fed.

        Args:
            routes: [N] of the token of each place, packed.
        """
        for place, of_token in enumerate(routes):
            self._routes[place].append(of_token)

    def places_of(self, growing: GrowingBatch) -> Places:
        return np.flatnonzero(self._owners[: self._num_rows] == growing)

    def owner_of(self, place: int) -> tuple[GrowingBatch, int]:
        """Returns the batch of the row at a place, and the row's number in it."""
        return self._owners[place], int(self._rows[place])

    def has_ended(self) -> NDArray[np.bool_]:
        """Returns [N] bools: True where the row at a place has ended, and still has its place."""
        rows = zip(self._owners[: self._num_rows], self._rows[: self._num_rows].tolist(), strict=True)
        return np.array([row in growing.ended for growing, row in rows])

    def keep(self, places: Places) -> None:
        """Lets only the rows at these places (ascending) stay, in their order."""
        self._move(Moves(source=places, target=np.arange(len(places)), num_rows=len(places)))

    def leave(self, places: Places) -> Moves:
        """Frees places; the last rows move into the holes, and the engine moves what it keeps of them."""
        gone = np.zeros(self._num_rows, dtype=bool)
        gone[places] = True
        num_rows = self._num_rows - len(places)
        target = np.flatnonzero(gone[:num_rows])
        # As many rows stay behind the new end as there are holes before it.
        source = num_rows + np.flatnonzero(~gone[num_rows:])
        return self._move(Moves(source=source, target=target, num_rows=num_rows))

    def _move(self, moves: Moves) -> Moves:
        for of_places in (
            self._owners, self._rows, self._kinds, self._steps, self._most,
            self._uniforms, self._tokens, self._logprobs, self._kept_sets, self._routes,
        ):  # fmt: skip
            of_places[moves.target] = of_places[moves.source]
        for of_objects in (self._owners, self._kept_sets, self._routes):
            of_objects[moves.num_rows : self._num_rows] = None
        self._num_rows = moves.num_rows
        return moves

    def _sample(self, logits: Logits, at: Places, uniforms: NDArray[np.float64]) -> Drawn:
        kinds = self._kinds[at]
        drawn = Drawn(tokens=np.empty(len(at), dtype=np.int64), logprobs=np.empty(len(at)))
        for (sampling, is_given), kind in self._samplings.items():
            rows = np.flatnonzero(kinds == kind)
            if len(rows):
                of_kind = logits if len(rows) == len(at) else logits[rows]
                contexts = self._contexts(sampling, at[rows]) if sampling.processing else None
                if is_given:
                    part = measure(of_kind, sampling, self._dataset_tokens(at[rows]), contexts)
                else:
                    part = sample(of_kind, sampling, uniforms[rows], contexts)
                drawn.tokens[rows] = part.tokens
                drawn.logprobs[rows] = part.logprobs
                # A part counts its rows from 0: `rows` maps them to rows of the whole draw.
                drawn.kept_ids.update((int(rows[row]), ids) for row, ids in part.kept_ids.items())
        return drawn

    def _dataset_tokens(self, at: Places) -> Places:
        """Returns [N] the next token of each row whose batch gives its completions."""
        tokens = np.empty(len(at), dtype=np.int64)
        for number, place in enumerate(at.tolist()):
            growing, row = self.owner_of(place)
            completion = growing.batch.prompts[row // growing.batch.group_size].dataset_completion
            if completion is UNSET:
                raise AssertionError("a batch gives the completions of all of its prompts, or of none")
            tokens[number] = np.frombuffer(completion, dtype="<i4")[self._steps[place]]
        return tokens

    def _contexts(self, sampling: SamplingParams, at: Places) -> Contexts:
        def seen(number: int) -> NDArray[np.int32]:
            place = at[number]
            growing, row = self.owner_of(place)
            prompt = growing.batch.prompts[row // growing.batch.group_size]
            tokens = self._tokens[place, : self._steps[place]]
            return np.concatenate((np.frombuffer(prompt.token_ids, dtype="<i4"), tokens))

        return Contexts(sampling=sampling, end_ids=self._ends.eos_ids, num_new=self._steps[at], seen=seen)

    def _tail(self, at: Places, row: int, num_tokens: int) -> NDArray[np.int32]:
        place = at[row]
        return self._tokens[place, max(0, self._steps[place] - num_tokens) : self._steps[place]]

    def _end(self, place: int, finish_reason: str) -> None:
        growing, row = self.owner_of(place)
        if row in growing.ended:
            return  # it is held on, and what is drawn for it is nothing
        num_tokens = int(self._steps[place])
        growing.ended[row] = Completion(
            token_ids=self._tokens[place, :num_tokens].tobytes(),
            generator_logprobs=self._logprobs[place, :num_tokens].tobytes(),
            finish_reason="stop" if finish_reason == "stop" else "length",
            kept_sets=pack_kept_sets(self._kept_sets[place]) if growing.batch.has_kept_sets else UNSET,
            **self._routes_of(place),
        )

    def _routes_of(self, place: int) -> dict[str, Any]:
        """Returns the fields of a completion that say the experts of its tokens; {} in a batch without routes."""
        growing, row = self.owner_of(place)
        if not growing.batch.has_routes:
            return {}
        # A row of T tokens has had T - 1 steps: the last token was drawn, and is never fed.
        fields: dict[str, Any] = {"routes": b"".join(self._routes[place])}
        prompt, sample = divmod(row, growing.batch.group_size)
        if sample == 0:
            fields["prompt_routes"] = growing.prompt_routes[prompt]
        return fields

    def _make_room(self, num_places: int, num_tokens: int) -> None:
        places = len(self._rows)
        tokens = self._tokens.shape[1]
        if num_places <= places and num_tokens <= tokens:
            return
        more = ((0, max(0, num_places - places)), (0, max(0, num_tokens - tokens)))
        for name in ("_owners", "_rows", "_kinds", "_steps", "_most", "_kept_sets", "_routes"):
            setattr(self, name, np.pad(getattr(self, name), more[:1]))
        for name in ("_uniforms", "_tokens", "_logprobs"):
            setattr(self, name, np.pad(getattr(self, name), more))


def without_a_finite_maximum(logits: Logits) -> Places:
    """Places of the rows of [N, V] logits from which nothing can be sampled."""
    maxima = logits.amax(dim=-1).cpu().numpy() if isinstance(logits, Tensor) else logits.max(axis=-1)
    return np.flatnonzero(~np.isfinite(maxima))
