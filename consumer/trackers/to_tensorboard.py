"""TensorBoard: event files in the run folder, below `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.utils.tensorboard import SummaryWriter

from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.recording.records import RecordedSample


class TensorBoardTracker:
    def __init__(self, folder: RunFolder, _spec: JobSpec) -> None:
        self._writer = SummaryWriter(log_dir=str(folder.path / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs and flushes at once: a trainer that is killed leaves what it logged."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Logs each completion as a text of `samples/train` or `samples/evaluation`."""
        for purpose in sorted({sample.purpose for sample in samples}):
            texts = [_shown(sample) for sample in samples if sample.purpose == purpose]
            self._writer.add_text(f"samples/{purpose}", "\n\n".join(texts), global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _shown(sample: RecordedSample) -> str:
    """Returns a completion in Markdown: each line of a text is indented, so that none of it is markup."""
    text = f"{sample.prompt}{sample.completion}"
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    return f"reward {sample.reward:.4g}, reference `{sample.reference}`\n\n{lines}"
