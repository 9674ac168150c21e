"""The report on a model: a finding for each question, what the trials chose, and the bytes that a rank needs."""

from __future__ import annotations

from msgspec.structs import replace

from contracts.encoding.wire import Record
from onbeat.doctor.finding import Finding, Level

QUESTIONS = (
    "job",
    "files",
    "loads",
    "trains",
    "lays out",
    "samples",
    "adapts",
    "shards",
    "exports",
    "vLLM",
    "memory",
)
"""Subjects of a report's findings, in their order."""


class MemoryPart(Record, frozen=True, kw_only=True):
    """Bytes that a rank of the trainer needs for one purpose. `memory_of` creates it."""

    name: str
    num_bytes: int
    says: str = ""
    """How they are counted."""

    def elsewhere(self, place: str) -> MemoryPart:
        """Returns the part as it is in another place than the device, which its words then name."""
        return replace(self, says=f"on {place}: {self.says}")


class Memory(Record, frozen=True, kw_only=True):
    """Bytes that a rank of the trainer needs. `memory_of` creates it from shapes alone."""

    permanent: tuple[MemoryPart, ...]
    """The parts that it keeps for the whole job."""
    in_a_pass: tuple[MemoryPart, ...]
    """The parts that a pass needs on top of them."""
    in_a_step: tuple[MemoryPart, ...]
    """The parts that an optimizer step needs on top of them, after the last pass."""
    elsewhere: tuple[MemoryPart, ...] = ()
    """The parts that are on the host or on the disk instead of the device; no sum has them."""

    @property
    def kept_bytes(self) -> int:
        return sum(part.num_bytes for part in self.permanent)

    @property
    def peak_bytes(self) -> int:
        """The permanent bytes, with a pass or a step, whichever needs more: the two are never at the same time."""
        of_pass = sum(part.num_bytes for part in self.in_a_pass)
        of_step = sum(part.num_bytes for part in self.in_a_step)
        return self.kept_bytes + max(of_pass, of_step)


class Alternative(Record, frozen=True, kw_only=True):
    """Bytes that a rank needs with other keys than the job's. `alternatives` creates it."""

    keys: tuple[str, ...]
    """The keys that differ from the job's, as `--set` takes them; () for the job itself."""
    peak_bytes: int
    elsewhere_bytes: int
    """Bytes on the host, or on the disk."""


class ModelReport(Record, frozen=True, kw_only=True):
    """The answers about a folder, for a job. `look` creates it; the command shows it, or prints it as JSON."""

    folder: str
    job: str
    """The settings of the job that the answers are for."""
    architecture: str = ""
    """The class of transformers that is trained; "" where none is."""
    num_parameters: int = 0
    num_trained: int = 0
    """Parameters that the job trains: without those out of reach; with adapters theirs alone."""
    tried_on: str = ""
    """The model that the trials were made on, in words; "" where none were made."""
    packing: str = ""
    """The layout of passes that the trial chose; "" where it wasn't made."""
    out_of_reach: tuple[str, ...] = ()
    """Names of the parameters that no gradient reaches."""
    num_adapted: int = 0
    """Parameters of the adapters: the job's, or else those of the defaults of `trainer.lora`."""
    num_exported_tensors: int = 0
    """Tensors of an export, those of towers included."""
    findings: tuple[Finding, ...]
    kept_bytes: int = 0
    peak_bytes: int = 0
    memory: Memory | None = None
    """None where the model's shapes aren't known."""
    alternatives: tuple[Alternative, ...] = ()
    """The job, and the same with keys that save memory, in the order in which one tries them."""

    @property
    def is_refused(self) -> bool:
        """True where a process would refuse the job."""
        return any(finding.level is Level.BAD for finding in self.findings)


class SizesRow(Record, frozen=True, kw_only=True):
    """A way to train a model. `sizes_table` creates it."""

    model: str
    trained: str
    """ "whole", or "adapters"."""
    steps: tuple[Alternative, ...]
    """The plain job, then one for each key that its way of training has, with those before."""

    def with_key(self, key: str) -> Alternative | None:
        """Returns the step that takes a key; None where this way of training has no use for it."""
        return next((step for step in self.steps if step.keys and step.keys[-1] == key), None)
