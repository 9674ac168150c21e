"""TensorBoard: event files in the run folder, below `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec


class TensorBoardTracker:
    def __init__(self, folder: RunFolder, _spec: JobSpec) -> None:
        self._writer = SummaryWriter(log_dir=str(folder.path / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs and flushes at once: a trainer that is killed leaves what it logged."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
