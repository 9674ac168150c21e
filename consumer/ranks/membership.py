"""A process comes into its trainer's group of ranks: by the launcher's store, the job's spec, the process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from consumer.gradient.learner import Place
from consumer.model.rows import store_errors
from consumer.ranks.orders import Exchange
from contracts.encoding.wire import decode_json, encode_json
from contracts.spec import JobSpec

SPEC = "spec"
WAIT_FOR_SPEC_S = 120.0
"""Rank 0 writes the spec once it holds the job's lease."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A process as a rank of its group."""

    place: Place
    exchange: Exchange
    spec: JobSpec


def join(spec: JobSpec | None, *, device: str) -> Membership:
    """Joins the group; rank 0 has the spec, and tells the others what the job is. Raises Unavailable without them."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with store_errors():
        launched, _, _ = next(iter(rendezvous("env://")))
        store = PrefixStore("onbeat", launched)
        if spec is not None:
            store.set(SPEC, encode_json(spec).decode())
        else:
            store.set_timeout(timedelta(seconds=WAIT_FOR_SPEC_S))
            spec = decode_json(store.get(SPEC), JobSpec)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=spec.timeouts.ranks_s),
        )
    return Membership(
        place=Place(rank=rank, world_size=world_size, local_rank=int(os.environ.get("LOCAL_RANK", rank))),
        exchange=Exchange(store),
        spec=spec,
    )
