"""The losses, data sets and trackers of installed packages that a spec names, and who has them.

    a consumer looks what its environment offers ─▶ its sign of life ─▶ the gateway refuses a job that names a plug-in
                                                                        which no live consumer has

A consumer's trainers run in its own environment. What a reward or an environment names, the reward service says itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from msgspec import UNSET, UnsetType

from contracts.errors import Refusal
from contracts.spec.algorithm import PluginLoss
from contracts.spec.datasets import PluginDataset, dataset_field
from contracts.spec.job import JobSpec
from contracts.spec.trainer import PluginTracker

MOST_OFFERS = 256
"""The most names of a group that a consumer announces."""
LONGEST_NAME = 100
"""The most characters of a name that a consumer announces."""

Offers = Mapping[str, Sequence[str]]
"""Group of entry points → the names that packages offer in it."""


@dataclass(frozen=True, kw_only=True)
class NamedPlugin:
    """A plug-in that a spec names."""

    group: str
    """The group of entry points that has to have it."""
    name: str
    field: str
    """The key of the spec that names it."""


def _losses(spec: JobSpec) -> list[NamedPlugin]:
    loss = spec.algorithm.loss
    if not isinstance(loss, PluginLoss):
        return []
    return [NamedPlugin(group="onbeat.losses", name=loss.entry_point, field="algorithm.loss.entry_point")]


def _datasets(spec: JobSpec) -> list[NamedPlugin]:
    return [
        NamedPlugin(
            group="onbeat.datasets",
            name=table.entry_point,
            field=f"{dataset_field(spec.dataset, spec.evaluation, source)}.entry_point",
        )
        for source, table in spec.tables.items()
        if isinstance(table, PluginDataset)
    ]


def _trackers(spec: JobSpec) -> list[NamedPlugin]:
    return [
        NamedPlugin(group="onbeat.trackers", name=tracker.entry_point, field=f"trackers[{place}].entry_point")
        for place, tracker in enumerate(spec.trackers)
        if isinstance(tracker, PluginTracker)
    ]


PLUGINS: dict[str, Callable[[JobSpec], list[NamedPlugin]]] = {
    "onbeat.losses": _losses,
    "onbeat.datasets": _datasets,
    "onbeat.trackers": _trackers,
}
"""Group of entry points that a trainer looks into → the function that gives what a spec names of it."""


def offered_plugins() -> dict[str, tuple[str, ...]] | UnsetType:
    """Looks what the packages of this process's environment offer to a trainer; it imports none of them.

    Returns:
        Each group with its names, sorted. UNSET where they are more, or longer, than a sign of life has room for: then
        a job that names one is accepted, and its trainer looks.
    """
    offers = {group: tuple(sorted(entry_points(group=group).names)) for group in PLUGINS}
    for names in offers.values():
        if len(names) > MOST_OFFERS or any(len(name) > LONGEST_NAME for name in names):
            return UNSET
    return offers


def refusals_of_absent(spec: JobSpec, offers: Iterable[Offers | UnsetType]) -> list[Refusal]:
    """Returns a refusal for each key that names a plug-in which no live consumer has.

    Args:
        spec: The job's.
        offers: For each live consumer what its environment offers; UNSET for one that doesn't say.
    """
    of_all = list(offers)
    known = [offered for offered in of_all if offered is not UNSET]
    # The environment of a consumer that is to come is unknown, as is that of one that says nothing, and that of a
    # person's own trainer.
    if not of_all or len(known) < len(of_all) or spec.trainer.external:
        return []
    refusals: list[Refusal] = []
    for plugins_of in PLUGINS.values():
        for plugin in plugins_of(spec):
            installed = sorted({name for offered in known for name in offered.get(plugin.group, ())})
            if plugin.name not in installed:
                refusals.append(_absent(plugin, installed))
    return refusals


def _absent(plugin: NamedPlugin, installed: Sequence[str]) -> Refusal:
    """Returns the refusal of a plug-in. installed: the names of its group that there are."""
    return Refusal(
        field=plugin.field,
        problem=f"no package offers `{plugin.name}` in group {plugin.group} where the trainers run",
        cure=f"install its package there; installed: {', '.join(installed) or 'none'}",
    )
