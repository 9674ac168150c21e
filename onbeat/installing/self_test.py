"""The proof that an environment of vLLM works: a short job of the demo's model, sampled by it.

The trainer recomputes the log-prob of each token that vLLM sampled. Where both engines run the same model under the
same weights they are equal but for rounding.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from contracts.encoding.wire import Record
from contracts.engines import VllmOptions
from contracts.errors import Unhealthy
from onbeat.base.shipped import shipped_root
from onbeat.client.spec_file import load_spec
from onbeat.stack.profile import GeneratorProfile, StackProfile
from onbeat.training.private_stack import on_own_stack, options_of_job

SPEC = Path("configs", "demo.toml")
CHANGES = ("iterations=2", "deterministic=false", "evaluation.num_prompts=0", "rollout.prompts_per_batch=8")
ENGINE = {"type": VllmOptions.__struct_config__.tag, "kv_cache_mb": 256}
DEADLINE_S = 600.0
"""A minute on a quiet machine; the first start of vLLM on a GPU compiles kernels."""
LARGEST_DIFFERENCE = 1e-2
"""Natural logarithms. In float32 on a CPU the difference is below 1e-3; in bfloat16 on a GPU it is larger."""


class SelfTest(Record, frozen=True, kw_only=True):
    """The numbers of a self-test that passed."""

    iterations: int
    completions: int
    largest_difference: float
    """Largest difference of a sampled token's log-prob between vLLM and the trainer."""
    wall_s: float


def run_self_test(python: str) -> SelfTest:
    """Trains two iterations of the demo's model with a generator of this interpreter, in a temporary folder.

    Raises JobFailed or Unavailable with the cause, DeadlineExceeded, or Unhealthy where the log-probs differ.
    """
    spec = load_spec(shipped_root() / SPEC, CHANGES)
    profile = StackProfile(generators=(GeneratorProfile(python=python, engine=ENGINE),))
    with tempfile.TemporaryDirectory(prefix="onbeat-setup-", ignore_cleanup_errors=True) as folder:
        options = options_of_job(spec, run_root=Path(folder, "runs"), model_root=shipped_root(), profile=profile)
        with on_own_stack(spec, options) as run:
            run.result(timeout_s=DEADLINE_S)
            metrics = run.metrics
    differences = [iteration.mismatch_max for iteration in metrics]
    # Not `>`, and not the largest one: a NaN is neither larger nor smaller than any number.
    wrong = [difference for difference in differences if not difference <= LARGEST_DIFFERENCE]
    if wrong:
        raise Unhealthy(
            f"the log-probs of vLLM and of the trainer differ by {wrong[0]:.3g}",
            field="setup vllm",
            cure="remove the environment, and run it again",
        )
    return SelfTest(
        iterations=len(metrics),
        completions=len(metrics) * spec.rollout.prompts_per_iteration * spec.rollout.group_size,
        largest_difference=max(differences),
        wall_s=sum(iteration.wall_s for iteration in metrics),
    )
