"""A version is published in one call, where a trainer hands its tensors over one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from contracts.versions import WeightManifest
from onbeat.weights.layout import layout_of
from onbeat.weights.publication import TensorSink, WeightPublisher


def publish(
    publisher: WeightPublisher, tensors: Mapping[str, Tensor], *, policy_version: int, is_again: bool = False
) -> WeightManifest:
    """Publishes a version whose tensors are all at hand. Raises what `begin` and `Publication.finish` raise."""
    with publisher.begin(layout_of(tensors), policy_version=policy_version, is_again=is_again) as publication:
        for name, tensor in tensors.items():
            publication.add(name, tensor)
        return publication.finish()


def given_by(tensors: Callable[[], Mapping[str, Tensor]]) -> Callable[[TensorSink], None]:
    """`AdapterSource.base` of tensors that are all at hand."""

    def give(sink: TensorSink) -> None:
        for name, tensor in tensors().items():
            sink.make_room(tensor.nbytes)
            sink.add(name, tensor)

    return give
