"""The window as its trainer knows it: what the open iterations ask, and the versions that may answer.

iteration       t is trained    t+1, … t+K are sampled ahead    t+K+1 is opened by the commit of t
evaluation of   version t       waits for its version: out with the commit of the iteration before
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from broker.openings import IterationOpening
from contracts.jobs import DrawnPrompts
from contracts.rollouts import PromptBatch
from contracts.schedule import Schedule
from contracts.versions import WeightManifest
from onbeat.data.prompts.prompt_batches import PromptBatches


@dataclass(frozen=True, kw_only=True)
class AskedIteration:
    """An iteration that is trained next: all that it expects, and who may answer it."""

    number: int
    """It trains the version of the same number."""
    weights_digest: str
    """Digest of that version, which alone samples its evaluation batches."""
    batches: tuple[PromptBatch, ...]
    """Training batches first, so that the trainer has work while the held-out prompts are sampled."""
    samplers: Mapping[int, str]
    """Version → digest, of those that may sample its training batches."""
    drawn: Callable[[Mapping[int, Sequence[float]]], tuple[DrawnPrompts, ...]] = lambda rewards: ()
    """As of PromptBatches."""


class Window:
    """Grows by an iteration with each opening; each turn forgets one, and the versions that only it needed."""

    def __init__(self, schedule: Schedule, prompt_batches: PromptBatches, *, last_iteration: int) -> None:
        self._schedule = schedule
        self.prompt_batches = prompt_batches
        self._last_iteration = last_iteration
        self._manifests: dict[int, WeightManifest] = {}
        self._training: dict[int, tuple[PromptBatch, ...]] = {}
        """Open iteration → its training batches."""

    @property
    def manifests(self) -> list[WeightManifest]:
        """The versions that batches of the window may be sampled with, oldest first; the newest is the policy's."""
        return [self._manifests[version] for version in sorted(self._manifests)]

    @property
    def digests(self) -> dict[int, str]:
        """Version → digest, of `manifests`."""
        return {manifest.policy_version: manifest.weights_digest for manifest in self.manifests}

    def add(self, manifest: WeightManifest) -> None:
        """Takes up a version that was published, or was published anew."""
        self._manifests[manifest.policy_version] = manifest

    def older_than(self, policy_version: int) -> range:
        """Returns the versions before this one that a window needs which begins with it."""
        return range(self.oldest_version(policy_version), policy_version)

    def oldest_version(self, iteration: int) -> int:
        """Returns the oldest version that is needed while this iteration is open."""
        return self._schedule.versions_of(iteration)[0]

    def begin(self, first: int) -> list[IterationOpening]:
        """Makes the openings of the window that a trainer starts with, oldest first."""
        newest = min(self._schedule.opened_by(first - 1), self._last_iteration)
        return [self._opening(number) for number in range(first, newest + 1)]

    def opened_by(self, committed: int) -> IterationOpening | None:
        """Makes the opening of the iteration that follows a commit; None where the job has no more."""
        number = self._schedule.opened_by(committed)
        return self._opening(number) if number <= self._last_iteration else None

    def turn_to(self, iteration: int) -> AskedIteration:
        """Returns what is trained next; what came before it is forgotten."""
        oldest, newest = self._schedule.versions_of(iteration)
        self._training = {number: batches for number, batches in self._training.items() if number >= iteration}
        self._manifests = {version: manifest for version, manifest in self._manifests.items() if version >= oldest}
        digests = self.digests
        return AskedIteration(
            number=iteration,
            weights_digest=digests[iteration],
            batches=(*self._training[iteration], *self.evaluation(iteration)),
            samplers={version: digests[version] for version in range(oldest, newest + 1)},
            drawn=partial(self.prompt_batches.drawn, iteration),
        )

    def evaluation(self, iteration: int) -> tuple[PromptBatch, ...]:
        """Returns the batches of an open iteration that evaluate the version of its number; () of none, or not yet."""
        manifest = self._manifests.get(iteration)
        return self.prompt_batches.evaluation(iteration, manifest) if manifest else ()

    def ahead_of(self, iteration: int) -> Iterable[tuple[int, tuple[PromptBatch, ...]]]:
        """Returns the iterations that are open beyond this one, with the batches that went out."""
        return [(number, batches) for number, batches in self._training.items() if number > iteration]

    def _opening(self, iteration: int) -> IterationOpening:
        oldest, newest = self._schedule.versions_of(iteration)
        self._training[iteration] = self.prompt_batches.training(iteration, self._manifests[oldest])
        evaluation = self.evaluation(iteration)
        return IterationOpening(
            iteration=iteration,
            oldest_version=oldest,
            newest_version=newest,
            batches=(*self._training[iteration], *evaluation),
            num_later=self.prompt_batches.num_evaluation(iteration) - len(evaluation),
        )
