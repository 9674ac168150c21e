"""Redis' primary dies, and the next one hangs, in the middle of a lagging job: a third goes on, to the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from contracts.run_folder import RunFolder
from tests.chaos.short_job import LAG, assert_undisturbed, committed, long_variant, sequential_digest, short_job, until
from tests.pipeline import Pipeline, wait_for_exit
from tests.redundant_redis import RedundantRedis


@long_variant
def test_a_lagging_job_outlives_two_primaries(tmp_path: Path) -> None:
    redundant = RedundantRedis(tmp_path / "redis")
    with Pipeline(tmp_path, redundant) as pipeline:
        spec = short_job(**LAG, iterations=24)
        oracle = sequential_digest(pipeline, spec, tmp_path / "oracle")
        pipeline.start_generators(2)
        job_id, _ = pipeline.jobs.create(spec)
        trainer = pipeline.start(f"consumer-{job_id}", job_id)
        until(committed(pipeline, job_id, 2), "two commits")
        first = redundant.primary()
        first.child.kill()
        second = redundant.until_another(first)
        first.child.start()
        # In its files: this process may be the last to find the promoted server.
        metrics = RunFolder(pipeline.settings.run_root_path, job_id).metrics
        until(lambda: metrics.read_bytes().count(b"\n") > 5, "five commits")
        assert second.child.pid is not None
        assert trainer.exit_code is None
        os.kill(second.child.pid, signal.SIGSTOP)
        assert wait_for_exit(trainer) == 0, trainer.tail()
        redundant.until_another(second)  # each sentinel hears of it in its own time
        assert_undisturbed(pipeline, job_id, oracle)
        assert pipeline.verdict(job_id).rewinds == 0
        os.kill(second.child.pid, signal.SIGCONT)
