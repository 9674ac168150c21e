"""Generators join and leave in the middle of a run: none waits for a group to be rebuilt, and no weight changes."""

from __future__ import annotations

from pathlib import Path

from contracts.encoding.wire import decode_json
from contracts.events import TimelineSpan
from contracts.run_folder import RunFolder
from tests.chaos.short_job import DEADLINE_S, assert_undisturbed, committed, running, short_job, succeed, until
from tests.pipeline import Pipeline, wait_for_exit


def test_a_run_whose_only_generator_leaves_goes_on_with_those_that_join(tmp_path: Path, undisturbed: str) -> None:
    with Pipeline(tmp_path) as pipeline:
        first = pipeline.start("producer-first")
        job_id, _ = pipeline.jobs.create(short_job())
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            until(committed(pipeline, job_id, 2), "two commits")
            first.terminate()
            assert wait_for_exit(first, DEADLINE_S) == 0
            pipeline.start("producer-second")
            until(committed(pipeline, job_id, 4), "two commits more")
            pipeline.start("producer-third")
            succeed(trainer)
        assert_undisturbed(pipeline, job_id, undisturbed)
        lines = RunFolder(pipeline.settings.run_root_path, job_id).timeline.read_bytes().splitlines()
        spans = [decode_json(line, TimelineSpan) for line in lines]
        assert len({span.who for span in spans if span.what == "generate"}) >= 2
