"""A generator claims a batch of a version only once the fence has judged what its engine computes with it (I11)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.probes import Probe, ProbeBounds, ProbeRow, ProofVerdict
from contracts.versions import WeightManifest
from tests.fakes import FakeSide
from tests.unit.producer.test_generator import GENERATES, Stack

PROVED = ProofVerdict(outcome="proved")
FAR = ProofVerdict(outcome="far", gap=0.31, row=1, bound=1e-5, k3=0.04)
STALE = ProofVerdict(outcome="stale", share=0.01, can_tell=True)
NOT_FINITE = ProofVerdict(outcome="not_finite", row=3)
UNKNOWN = ProofVerdict(outcome="unknown")
ROW = ProbeRow(prompt=pack_int32([5, 6]), scored=pack_int32([7, 8]))
PROBE = Probe(rows=(ROW, ROW), logprobs=pack_float32([-1.0] * 4), bounds=ProbeBounds(limit=1e-3, floor=1e-5))
OPENED = ["open qwen3", "load 0"]


def probed(manifest: WeightManifest) -> WeightManifest:
    return replace(manifest, probe=PROBE)


def add_probed_job(stack: Stack, verdicts: list[ProofVerdict], job_id: str = "job") -> FakeSide:
    side = stack.add_job(job_id)
    side.verdicts = verdicts
    batch, manifest = stack.work(job_id, 0)
    side.add(batch, probed(manifest))
    return side


async def test_a_version_is_shown_once_and_then_claimed(stack: Stack) -> None:
    side = add_probed_job(stack, [PROVED])
    batch, manifest = stack.work("job", 1)
    side.add(batch, probed(manifest))
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 2)
    assert side.shown == [0]
    assert stack.shop.log[:2] == OPENED
    assert stack.shop.log.count("open qwen3") == 1


async def test_an_engine_that_computes_wrongly_is_made_anew_once(stack: Stack) -> None:
    side = add_probed_job(stack, [FAR, PROVED])
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 1)
    assert stack.shop.log[:6] == [*OPENED, "close qwen3", *OPENED, GENERATES]
    assert side.shown == [0, 0]
    assert side.released == side.failed == [], "nothing was claimed before"
    assert stack.jobs.beats[-1].leaves_alone == {}


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (FAR, "version 0 wrongly: its log-prob is 0.31 from the trainer's at row 1 of the probe, and 1e-05 is allowed"),
        (STALE, "version 0 wrongly: its log-probs show 1% of the step from version -1"),
        (NOT_FINITE, "version 0 wrongly: its log-probs are not finite at row 3 of the probe"),
    ],
)
async def test_one_that_stays_wrong_leaves_the_job_alone_by_name_and_serves_others(
    stack: Stack, verdict: ProofVerdict, words: str
) -> None:
    side = add_probed_job(stack, [verdict])
    other = stack.add_job("other", num_batches=1)
    async with stack.running():
        await stack.changes.until(lambda: len(other.published) == 1 and bool(side.shown))
        await stack.changes.until(lambda: words in stack.jobs.beats[-1].leaves_alone.get("job", ""))
    assert side.claimed == side.published == []
    assert side.shown[:2] == [0, 0], "as it was loaded, and made anew"


async def test_a_version_that_is_announced_no_more_costs_the_engine_nothing(stack: Stack) -> None:
    side = add_probed_job(stack, [UNKNOWN, PROVED])
    async with stack.running():
        await stack.changes.until(lambda: bool(stack.jobs.beats and stack.jobs.beats[-1].leaves_alone))
        stack.now_s += 2.0
        await stack.changes.until(lambda: len(side.published) == 1)
    assert stack.shop.log.count("open qwen3") == 1
    assert stack.jobs.beats[-1].leaves_alone == {}
