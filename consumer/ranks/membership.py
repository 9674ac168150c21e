"""A process comes into its trainer's group of ranks: by the launcher's store, the job's spec, the process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
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


def lead(spec: JobSpec, *, device: str) -> Membership:
    """Joins as rank 0, which tells the others what the job is. Raises Unavailable where they don't come."""
    with store_errors():
        store = _store()
        store.set(SPEC, encode_json(spec).decode())
    return _join(store, spec, rank=0, device=device)


def follow_lead(*, device: str) -> Membership:
    """Joins as another rank. Raises Unavailable where rank 0 does not say what the job is."""
    with store_errors():
        store = _store()
        store.set_timeout(timedelta(seconds=WAIT_FOR_SPEC_S))
        spec = decode_json(store.get(SPEC), JobSpec)
    return _join(store, spec, rank=int(os.environ["RANK"]), device=device)


def _store() -> Store:
    store, _, _ = next(iter(rendezvous("env://")))
    return PrefixStore("onbeat", store)


def _join(store: Store, spec: JobSpec, *, rank: int, device: str) -> Membership:
    world_size = int(os.environ["WORLD_SIZE"])
    with store_errors():
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
