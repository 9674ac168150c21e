"""What an external trainer is handed of a batch beside its columns."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from onbeat.client.training.arrivals import TrainingRows, _slice, training_rows
from onbeat.data.kept_sets import pack_kept_sets
from tests.builders import batch_of, job_spec, rollout


def rows(*kept: bytes) -> TrainingRows:
    rollouts = [
        replace(one, completion=replace(one.completion, kept_sets=packed))
        for one, packed in zip([rollout([7, 8], 0.0), rollout([9], 1.0)], kept, strict=True)
    ]
    return training_rows(batch_of([([5], rollouts)]), {}, job_spec(), np.zeros(2))


def test_the_kept_sets_of_truncated_sampling_come_row_by_row() -> None:
    sets = [[[2, 7], []], [[9]]]
    whole = rows(*(pack_kept_sets([np.array(ids, dtype=np.int64) for ids in of_row]) for of_row in sets))
    for start, end in ((0, 2), (1, 2)):
        part = _slice(whole, start, end).kept_sets
        assert part is not None
        assert [[ids.tolist() for ids in of_row] for of_row in part] == sets[start:end]
    plain = batch_of([([5], [rollout([7, 8], 0.0), rollout([9], 1.0)])])
    assert training_rows(plain, {}, job_spec(), np.zeros(2)).kept_sets is None
