"""The micro-batches of the open iteration as a torch IterableDataset. It imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.utils.data import IterableDataset, get_worker_info

from contracts.errors import InvalidInput
from onbeat.client.training.arrivals import TrainingIteration, TrainingRows


class RowsDataset(IterableDataset[TrainingRows]):
    """Each pass over it is what is left of the iteration that is open then.

    For a DataLoader give batch_size=None, for a micro-batch is a batch already, and num_workers=0: a thread of the
    consumer runs ahead as it is.
    """

    def __init__(self, current: Callable[[], TrainingIteration]) -> None:
        super().__init__()
        self._current = current

    def __iter__(self) -> Iterator[TrainingRows]:
        if get_worker_info() is not None:
            raise InvalidInput(
                "is not to be 1 or more: a worker is another process, which holds no lease",
                field="num_workers",
                cure="leave it at 0; batches are prefetched by a thread",
            )
        return iter(self._current())
