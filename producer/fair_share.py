"""Whose turn it is: generators belong to the stack, and serve its active jobs in turn."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from contracts.spec import ModelSpec

MODEL_SLICE_S = 10.0
"""A loaded model serves at least this long while its jobs have work: loading another at every batch would take longer
than the batches."""


class FairShare:
    """Least recently served first. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._served_s: dict[str, float] = {}
        self._model: ModelSpec | None = None
        self._loaded_s = 0.0

    def order(self, active: Mapping[str, ModelSpec], now_s: float) -> list[str]:
        """Ids of the active jobs in the order in which they should be asked for work."""
        never = float("-inf")
        turns = sorted(active, key=lambda job_id: (self._served_s.get(job_id, never), job_id))
        if now_s - self._loaded_s < MODEL_SLICE_S:
            turns.sort(key=lambda job_id: active[job_id] != self._model)
        return turns

    def served(self, job_id: str, model: ModelSpec, now_s: float) -> None:
        """A batch of the job was claimed."""
        self._served_s[job_id] = now_s
        if model != self._model:
            self._model = model
            self._loaded_s = now_s

    def forget_all_but(self, active: Collection[str]) -> None:
        """Jobs come and go for as long as a generator lives."""
        self._served_s = {job_id: at for job_id, at in self._served_s.items() if job_id in active}
