"""Where the files of a job are, below the run root that trainers, generators and the gateway share.

{run_root}/{job_id}/
    spec.json                  the JobSpec as submitted
    metrics.jsonl              IterationMetrics, a line an iteration
    timeline.jsonl             TimelineSpan
    evaluations.jsonl          EvaluationScore
    trainer.log                what its trainers wrote on stderr, one after the other
    weights/v000003/           safetensors of version 3
    checkpoints/i000010/       state after iteration 10 was trained: it resumes at 11
    reward_curve.png timeline.png summary.json     made by `onbeat demo`
"""

from __future__ import annotations

from pathlib import Path


class RunFolder:
    """Names only: nothing is read or made here."""

    def __init__(self, run_root: Path, job_id: str) -> None:
        self.run_root = run_root
        self.job_id = job_id
        self.path = run_root / job_id
        self.spec = self.path / "spec.json"
        self.metrics = self.path / "metrics.jsonl"
        self.timeline = self.path / "timeline.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.trainer_log = self.path / "trainer.log"
        self.weights = self.path / "weights"
        self.checkpoints = self.path / "checkpoints"

    def weights_of(self, policy_version: int) -> Path:
        return self.weights / f"v{policy_version:06d}"

    def checkpoint_after(self, iteration: int) -> Path:
        return self.checkpoints / f"i{iteration:06d}"

    def relative(self, path: Path) -> str:
        """Path as it stands in a manifest: below the run root, with forward slashes."""
        return path.relative_to(self.run_root).as_posix()
