"""MLflow: one run a job, found again by its tag, in MLFLOW_TRACKING_URI or else a database file in the run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec

EXPERIMENT = "onbeat"
JOB_TAG = "onbeat.job_id"


class MlflowTracker:
    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        store = f"sqlite:///{folder.path / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", store))
        self._run_id = self._find(folder.job_id, os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT), spec.name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run_id, metrics=[Metric(_allowed(name), value, now_ms, step) for name, value in values.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _find(self, job_id: str, experiment_name: str, run_name: str) -> str:
        """Returns the job's run: a successor of a trainer that died goes on with it."""
        experiment = self._client.get_experiment_by_name(experiment_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(experiment_name)
        for run in self._client.search_runs([experiment_id], filter_string=f"tags.`{JOB_TAG}` = '{job_id}'"):
            return run.info.run_id
        return self._client.create_run(experiment_id, run_name=run_name, tags={JOB_TAG: job_id}).info.run_id


def _allowed(name: str) -> str:
    """Replaces what MLflow doesn't take in a metric's name: all but letters, digits and some marks."""
    return "".join(mark if mark.isalnum() or mark in "_-. /" else "_" for mark in name)
