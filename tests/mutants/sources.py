"""Sources whose guards are left out, and the tests that belong to each."""

from __future__ import annotations

from pathlib import Path

RECORDS = ("tests/unit/test_guards_of_contracts.py",)
SPECS = (
    "tests/unit/test_consumer_losses_options.py",
    "tests/unit/test_onbeat_spec_file.py",
    "tests/unit/test_spec_bounds.py",
    "tests/unit/test_guards_of_specs.py",
)
RECEIVER = (
    "tests/unit/test_weight_store.py",
    "tests/unit/test_weight_store_adapters.py",
    "tests/unit/test_weight_delta.py",
    "tests/unit/test_weight_publication.py",
)
PRODUCER = (
    "tests/unit/test_producer_carrier.py",
    "tests/unit/test_producer_served_model.py",
    "tests/unit/test_producer_worker.py",
)
FENCE = (
    "tests/integration/test_fence.py",
    "tests/integration/test_fence_repeats.py",
    "tests/integration/test_hedging.py",
    "tests/integration/test_weight_scripts.py",
    "tests/integration/test_job_store.py",
    "tests/integration/test_guards_of_scripts.py",
)
SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "broker" / "scripts").glob("*.lua"))

TESTS: dict[str, tuple[str, ...]] = {
    **{f"contracts/{name}.py": RECORDS for name in ("jobs", "rollouts", "versions")},
    **{f"contracts/{name}.py": SPECS for name in ("algorithm", "lora", "rewards", "spec", "spec_limits", "wire")},
    "contracts/settings.py": (
        "tests/unit/test_guards_of_specs.py",
        "tests/unit/test_settings.py",
        "tests/unit/test_engine_settings.py",
    ),
    "consumer/iteration.py": ("tests/unit/test_consumer_iteration.py",),
    "consumer/accumulation.py": ("tests/unit/test_consumer_accumulation.py",),
    "consumer/checkpoint.py": ("tests/unit/test_consumer_checkpoint.py", "tests/unit/test_consumer_adapters.py"),
    "consumer/resume.py": ("tests/unit/test_consumer_resume.py",),
    "producer/carrier.py": PRODUCER,
    "producer/served_model.py": PRODUCER,
    "weight_store/receiver.py": RECEIVER,
    "weight_store/delta.py": RECEIVER,
    "weight_store/version_folders.py": RECEIVER,
    "weight_store/tensor_folder.py": RECEIVER,
    "onbeat/verify.py": ("tests/unit/test_onbeat_verify.py", "tests/unit/test_onbeat_stored_weights.py"),
    "gateway/submission.py": ("tests/unit/test_gateway_submission.py", "tests/integration/test_gateway.py"),
    **{f"broker/scripts/{name}.lua": FENCE for name in SCRIPTS},
}
"""Source → tests; many sources share theirs."""
