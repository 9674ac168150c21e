"""Sources whose guards are left out, and the tests that belong to each.

A guard's tests run until one notices: what is quick comes first, then what notices most.
"""

from __future__ import annotations

RECORDS = ("tests/unit/contracts/test_guards_of_contracts.py", "tests/unit/contracts/test_guards_of_answers.py")
SPECS = (
    "tests/unit/contracts/test_guards_of_specs.py",
    "tests/unit/contracts/test_guards_of_answers.py",
    "tests/unit/contracts/test_spec_bounds.py",
    "tests/unit/consumer/gradient/test_losses_options.py",
    "tests/unit/onbeat/client/test_spec_file.py",
)
RULES = ("tests/unit/contracts/test_rules.py", *SPECS, "tests/unit/contracts/test_external_trainer.py")
RECEIVER = (
    "tests/unit/onbeat/weights/test_weight_store.py",
    "tests/unit/onbeat/weights/adapter/test_adapters.py",
    "tests/unit/onbeat/weights/delta/test_codec.py",
    "tests/unit/onbeat/weights/test_publication.py",
    "tests/unit/onbeat/weights/test_held_versions.py",
    "tests/unit/contracts/test_names.py",
)
PRODUCER = (
    "tests/unit/producer/rollout/test_carrier.py",
    "tests/unit/producer/test_served_model.py",
    "tests/unit/producer/test_generator.py",
    "tests/unit/producer/test_whatever_is_raised.py",
)
OLDER = ("tests/unit/consumer/model/test_older_versions.py",)
CHECKPOINT = ("tests/unit/consumer/model/test_checkpoint.py", "tests/unit/consumer/model/test_adapters.py", *OLDER)
WORKERS = (
    "tests/unit/onbeat/work/test_calls.py",
    "tests/unit/onbeat/work/test_leases.py",
    "tests/rooms/stages/test_worker.py",
    "tests/unit/producer/test_activity.py",
    "tests/unit/producer/test_generator.py",
)
WALKS = "tests/model/test_model_and_scripts.py"
HOSTS = ("tests/model/test_groups_and_script.py",)
STAGES = (
    "tests/integration/test_claims.py",
    "tests/integration/test_guards_of_stages.py",
    "tests/integration/test_stages.py",
    "tests/integration/test_stages_faults.py",
    WALKS,
    "tests/integration/test_stages_in_bulk.py",
)
FENCE = (
    "tests/integration/test_proofs.py",
    "tests/integration/test_guards_of_scripts.py",
    "tests/integration/test_fence.py",
    "tests/integration/test_hedging.py",
    "tests/integration/test_weight_scripts.py",
    "tests/integration/test_engines_of_a_job.py",
    "tests/integration/test_job_store.py",
    "tests/integration/test_window.py",
    "tests/integration/test_bounds_of_scripts.py",
    *STAGES,
)
TASKS = ("tests/integration/test_guards_of_tasks.py", "tests/rooms/tasks/test_task_model.py")
REMOVAL = (
    "tests/integration/test_ceilings.py",
    "tests/rooms/ended_jobs/test_age.py",
    "tests/rooms/ended_jobs/test_deletion.py",
)
EDITED = ("tests/integration/test_edited_files.py", "tests/integration/test_gateway.py")
DEAD = ("tests/rooms/job_views/test_dead_letters.py",)
RECONCILES = "test_who_waits_sends_no_payload_and_of_what_is_lost_only_that"
"""Counts the calls of a trainer that waits."""
COLUMNS = ("tests/unit/contracts/test_stages.py",)

TESTS: dict[str, tuple[str, ...]] = {
    **{f"contracts/{name}.py": RECORDS for name in ("jobs", "versions")},
    "contracts/rollouts.py": (
        *RECORDS,
        "tests/unit/contracts/test_digests.py",
        "tests/unit/consumer/trainer/test_iteration.py",
    ),
    "contracts/probes.py": ("tests/unit/contracts/test_probes.py",),
    "contracts/rewards.py": ("tests/unit/contracts/test_rewards.py", *RECORDS, *SPECS),
    **{f"contracts/spec/{name}.py": RULES for name in ("rules", "conditions", "limits")},
    "contracts/spec/reading.py": ("tests/unit/contracts/test_spec_reading.py", *RULES),
    "contracts/encoding/wire.py": (*RECORDS, *SPECS, "tests/unit/contracts/test_wire.py"),
    "contracts/spec/job.py": (
        "tests/unit/contracts/test_guards_of_specs.py",
        "tests/unit/contracts/test_guards_of_answers.py",
        "tests/unit/contracts/test_schedule.py",
        "tests/unit/contracts/test_stages.py",
        "tests/unit/contracts/test_external_trainer.py",
        "tests/unit/contracts/test_spec_bounds.py",
    ),
    **{f"contracts/spec/{name}.py": SPECS for name in ("algorithm", "rollout")},
    "contracts/spec/trainer.py": (*SPECS, "tests/unit/contracts/test_external_trainer.py"),
    "broker/connection/sentinels.py": ("tests/unit/broker/test_sentinels.py",),
    "broker/connection/durability.py": (
        "tests/unit/broker/test_durability.py",
        "tests/integration/test_durability.py",
        "tests/integration/test_failover.py",
    ),
    "broker/connection/address.py": ("tests/unit/broker/test_address.py", "tests/integration/test_embedded_redis.py"),
    "contracts/settings.py": (
        "tests/unit/contracts/test_guards_of_specs.py",
        "tests/unit/contracts/test_guards_of_answers.py",
        "tests/unit/contracts/test_settings.py",
        "tests/unit/contracts/test_engine_settings.py",
    ),
    "contracts/engines.py": ("tests/unit/contracts/test_engine_settings.py", "tests/unit/onbeat/stack/test_profile.py"),
    "consumer/trainer/iteration.py": (
        "tests/unit/consumer/trainer/test_iteration.py",
        "tests/unit/consumer/trainer/test_step.py",
    ),
    "onbeat/loop/expected.py": (
        "tests/unit/consumer/trainer/test_iteration.py",
        "tests/unit/consumer/trainer/test_report.py",
    ),
    "onbeat/loop/chain.py": ("tests/unit/onbeat/loop/test_chain.py", "tests/unit/consumer/trainer/test_commit.py"),
    "onbeat/loop/gathering.py": ("tests/unit/consumer/trainer/test_gather.py", "tests/unit/onbeat/loop/test_staged.py"),
    "onbeat/loop/trained_job.py": (
        "tests/rooms/health/test_watch.py",
        "tests/unit/consumer/trainer/test_commit.py",
        "tests/integration/test_trainer_restarts.py",
        "tests/integration/test_older_redis.py",
    ),
    "onbeat/loop/window.py": ("tests/unit/onbeat/loop/test_window.py",),
    "consumer/gradient/probe.py": ("tests/unit/consumer/gradient/test_probe.py",),
    "consumer/gradient/accumulation.py": ("tests/unit/consumer/gradient/test_accumulation.py",),
    "consumer/gradient/saved_state.py": CHECKPOINT,
    "contracts/checkpoints.py": CHECKPOINT,
    "consumer/model/checkpoint.py": CHECKPOINT,
    **{
        f"consumer/trainer/{name}.py": (f"tests/unit/consumer/trainer/test_{name}.py",)
        for name in ("gather", "step", "commit", "probes")
    },
    "producer/rollout/carrier.py": PRODUCER,
    "producer/served_model.py": PRODUCER,
    "onbeat/weights/receiver.py": (*RECEIVER, *OLDER),
    "onbeat/weights/publication.py": (*RECEIVER, *OLDER),
    "onbeat/weights/arrival.py": RECEIVER,
    "onbeat/weights/adapter/reader.py": RECEIVER,
    "onbeat/weights/delta/codec.py": RECEIVER,
    "onbeat/weights/delta/reader.py": RECEIVER,
    "onbeat/weights/files/store.py": RECEIVER,
    "onbeat/weights/chunks.py": RECEIVER,
    "onbeat/weights/whole.py": (*RECEIVER, "tests/unit/consumer/model/test_older_versions.py"),
    "onbeat/weights/files/tensor_folder.py": (*RECEIVER, "tests/unit/consumer/model/test_checkpoint.py"),
    "onbeat/audit/chain.py": tuple(
        f"tests/unit/onbeat/audit/test_{name}.py" for name in ("chain", "samplers", "weights", "probes")
    ),
    "onbeat/audit/probes.py": ("tests/unit/onbeat/audit/test_probes.py", "tests/rooms/replay/test_probe_again.py"),
    "onbeat/replay/probe_again.py": ("tests/rooms/replay/test_probe_again.py",),
    "onbeat/data/named_files.py": ("tests/unit/onbeat/test_named_files.py", *EDITED),
    "producer/detokenizer.py": ("tests/unit/producer/test_detokenizer.py", *EDITED),
    "gateway/named_files.py": EDITED,
    "gateway/services.py": (
        "tests/rooms/keys/test_keys.py",
        "tests/integration/test_gateway.py",
        "tests/rooms/objects/test_run_files.py",
        "tests/integration/test_gateway_reads.py",
    ),
    "consumer/ranks/processes/orders.py": ("tests/rooms/ranks/test_orders.py",),
    "gateway/submission.py": (
        "tests/unit/gateway/test_submission.py",
        "tests/unit/onbeat/test_kernels_of_machine.py",
        "tests/integration/test_missing_extras.py",
        "tests/integration/test_job_store.py",
        "tests/integration/test_gateway.py",
        "tests/integration/test_submitted_patterns.py",
        "tests/integration/test_submitted_plugins.py",
        "tests/integration/test_submitted_environments.py",
    ),
    "broker/scripts/generator.lua": (*FENCE, "tests/integration/test_memory_by_age.py"),
    "broker/scripts/hosts.lua": HOSTS,
    "broker/scripts/jobs.lua": ("tests/rooms/keys/test_keys.py", *FENCE, *REMOVAL),
    "broker/scripts/presence.lua": ("tests/integration/test_spans.py", *FENCE),
    "broker/scripts/prelude.lua": (
        "tests/integration/test_guards_of_tasks.py",
        *HOSTS,
        *FENCE,
        "tests/integration/test_broker_full.py",
        "tests/integration/test_memory_by_age.py",
        "tests/integration/test_wakes.py",
    ),
    "broker/scripts/stage.lua": FENCE,
    "broker/scripts/tasks.lua": TASKS,
    "broker/task_store.py": TASKS,
    "broker/scripts/trainer.lua": (
        *HOSTS,
        *FENCE,
        "tests/integration/test_older_redis.py",
        "tests/integration/test_memory_by_age.py",
    ),
    "broker/leases.py": ("tests/integration/test_fence.py", *STAGES),
    "broker/stage_side.py": STAGES,
    "broker/generator_side.py": FENCE,
    "broker/proofs.py": ("tests/integration/test_proofs.py",),
    "broker/trainer_side.py": (
        f"tests/integration/test_large_iterations.py::{RECONCILES}",
        *HOSTS,
        *FENCE,
        "tests/integration/test_older_redis.py",
        "tests/integration/test_broker_restart.py",
    ),
    "broker/hosts_side.py": ("tests/integration/test_hosts.py", *HOSTS),
    "gateway/views/dead_letters.py": DEAD,
    "contracts/spec/recording.py": ("tests/unit/contracts/test_recording.py",),
    "onbeat/tasks/removal/file_remover.py": REMOVAL,
    "onbeat/tasks/removal/trees.py": REMOVAL,
    "gateway/api/deletion.py": REMOVAL,
    "onbeat/tasks/work/forget.py": REMOVAL,
    **{f"contracts/experience/{name}.py": COLUMNS for name in ("columns", "graph")},
    "contracts/spec/stages.py": (*COLUMNS, *SPECS),
    "onbeat/stages/worker.py": WORKERS,
    **{f"onbeat/work/{name}.py": WORKERS for name in ("calls", "heartbeat", "declined_work", "spans", "worker")},
    "onbeat/stages/served_stages.py": (
        "tests/rooms/stages/test_served_stages.py",
        "tests/rooms/stages/test_models.py",
    ),
    "onbeat/stages/models.py": ("tests/rooms/stages/test_models.py",),
    "onbeat/stages/compute_service.py": ("tests/rooms/stages/test_compute_service.py",),
    "onbeat/stages/llm_judge.py": ("tests/rooms/stages/test_llm_judge.py",),
    "onbeat/stages/judge_answer.py": ("tests/rooms/stages/test_judge_answer.py",),
}
"""Source → tests; many sources share theirs."""
