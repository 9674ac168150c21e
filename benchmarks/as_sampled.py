"""What it costs that a trainer's log-probs have the bits of its generator's, and how far they are apart without.

    onbeat bench as-sampled [--models demo,8M,12M] [--repeats 5]

The batches of `onbeat bench passes`, sampled by the transformers engine: processor seconds of an iteration's passes
with trainer.packing = "shared_prompt" and "as_sampled", in turns on one thread, and the mismatch of each.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks._results import REPOSITORY, write_result
from benchmarks.passes import CASES, Case, batch_of, learner_of, start_anew
from consumer.gradient.learner import Learner
from consumer.gradient.statistics import joined
from contracts.rollouts import Prompt, PromptBatch, RolloutBatch
from contracts.run_folder import RunFolder
from contracts.sampling import SamplingParams
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from onbeat.weights.files.store import FolderStore
from onbeat.weights.transports import make_stores
from onbeat.weights.whole import WholePublisher
from producer.engine.base import EngineSetup
from producer.engine.transformers.engine import TransformersEngine

EXPECTED = (
    "no difference at all as sampled, 1e-13 of K3 without; 1.1 to 1.2 times the passes' processor time in the demo, "
    "whose arithmetic is small beside the calls, and at most 1.1 times at 8 and 12 M"
)
PACKINGS = ("shared_prompt", "as_sampled")


class Sampler:
    """Gives a case's batches the completions of an engine that has a learner's weights."""

    def __init__(self, case: Case, folder: Path, learner: Learner, model: ModelSpec) -> None:
        """folder: of the version."""
        run_folder = RunFolder(folder, "job")
        publisher = WholePublisher(FolderStore(run_folder, wait_s=60.0), announce=lambda shard: None)
        with publisher.begin(learner.policy.weights().layout, policy_version=0) as publication:
            learner.publish(publication)
            self._manifest = publication.finish()
        self._case = case
        self.engine = TransformersEngine(
            EngineSetup(
                model=model,
                model_root=SpecRoot(Path(model.path)),
                weight_root=run_folder.weight_root,
                stores=make_stores(run_folder.weight_root),
                deterministic=True,
            )
        )

    async def sample(self, batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
        await self.engine.load_weights(self._manifest)
        return [await self._sampled(batch) for batch in batches]

    async def _sampled(self, batch: RolloutBatch) -> RolloutBatch:
        prompts = tuple(
            Prompt(prompt_id=group.prompt_id, index=index, text="", token_ids=group.prompt_token_ids, reference="")
            for index, group in enumerate(batch.groups)
        )
        asked = PromptBatch(
            job_id="job",
            batch_id=batch.batch_id,
            iteration=0,
            purpose="train",
            policy_version=0,
            weights_digest=self._manifest.weights_digest,
            group_size=self._case.group_size,
            sampling=SamplingParams(max_new_tokens=self._case.response_tokens[1]),
            seed=0,
            prompts=prompts,
        )
        groups = []
        for group, found in zip(batch.groups, await self.engine.generate(asked), strict=True):
            pairs = zip(group.rollouts, found, strict=True)
            groups.append(replace(group, rollouts=tuple(replace(one, completion=of_one) for one, of_one in pairs)))
        return replace(batch, groups=tuple(groups))


async def sampled(sampler: Sampler, case: Case) -> list[RolloutBatch]:
    found = await sampler.sample([batch_of(case, number) for number in range(case.num_batches)])
    await sampler.engine.aclose()
    return found


def measure(name: str, case: Case, *, repeats: int) -> dict[str, Any]:
    """Seconds of each packing's passes, whose steps are left out: their gradients are let go."""
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
        path = case.make(Path(folder))
        learners = {packing: learner_of(case, path, packing=packing) for packing in PACKINGS}
        sampler = Sampler(case, Path(folder), learners["as_sampled"], ModelSpec(path=str(path)))
        batches = asyncio.run(sampled(sampler, case))
        seconds: dict[str, list[float]] = {packing: [] for packing in PACKINGS}
        gaps: dict[str, Any] = {}
        for _ in range(1 + repeats):
            for packing, learner in learners.items():
                started_s = time.process_time()
                stats = [learner.train(batch).stats for batch in batches]
                seconds[packing].append(round(time.process_time() - started_s, 4))
                gap = joined([one.mismatch for one in stats])
                gaps[packing] = {"mismatch_k3": gap.k3, "mismatch_max": gap.largest, "tokens": gap.num_tokens}
                start_anew(learner)
    # The first turn warms up.
    ratios = [exact / packed for packed, exact in np.array([seconds[packing][1:] for packing in PACKINGS]).T]
    return {"model": name, "ratio": round(float(statistics.median(ratios)), 3), "seconds": seconds, "mismatch": gaps}


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench as-sampled", description=__doc__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        rows.append(measure(name, CASES[name], repeats=arguments.repeats))
        print(rows[-1], flush=True)
    path = write_result("as-sampled", {"expected": EXPECTED, "rows": rows})
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
