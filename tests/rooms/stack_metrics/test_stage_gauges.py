"""The gauges of an active job's stages."""

from __future__ import annotations

from gateway.metrics.stack_state import stack_state
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.stage_parts import NUM_ROWS, StagedJob, external, open_job


def gauges(job: StagedJob) -> dict[str, float]:
    text = stack_state(job.brokers["gateway"], job.jobs, job.server.folder).decode()
    lines = (
        line.rpartition(" ") for line in text.splitlines() if line.startswith("onbeat_stage") and job.job_id in line
    )
    return {name.replace(f'job="{job.job_id}"', ""): float(value) for name, _, value in lines}


def test_the_metrics_have_the_stages_of_active_jobs(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [external("judge"), external("after", ["judge"], unit="group")], count=2)
    job.publish()
    job.stage().claim("judge", 3)
    found = gauges(job)
    assert found['onbeat_stage_num_free{,stage="judge"}'] == NUM_ROWS - 3
    assert found['onbeat_stage_num_leased{,stage="judge"}'] == 3
    assert found["onbeat_stage_rows_waiting{}"] == NUM_ROWS
    assert found["onbeat_stage_columns_bytes{}"] > 0
    job.jobs.request_cancel(job.job_id)


def test_a_job_without_stages_has_none(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [])
    job.publish()
    assert gauges(job) == {}
