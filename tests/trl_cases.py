"""What comparisons with TRL's GRPOTrainer share: which options mean the same, and a trainer that computes losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.builders import char_tokenizer

BUDGET = 5
ON_POLICY: dict[str, Any] = {}
OFF_POLICY = {"old_policy": "generator", "clip_low": 0.3, "clip_high": 0.4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"loss": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "bnpo": ({"loss": "bnpo"}, {"loss_type": "bnpo"}),
    "dapo": ({"loss": "dapo"}, {"loss_type": "dapo"}),
    "cispo": ({"loss": "cispo", "clip_low": 1.0}, {"loss_type": "cispo"}),
    "gspo": ({"loss": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
}
BOUNDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dual clip": (
        {"clip_low": 0.1, "clip_high": 0.1, "clip_max": 1.2},
        {"epsilon": 0.1, "epsilon_high": 0.1, "delta": 1.2},
    ),
    "off-policy mask": ({"off_policy_mask_threshold": 0.05}, {"off_policy_mask_threshold": 0.05}),
    "unweighed KL": ({"kl_coefficient": 0.1, "use_bias_correction_kl": False}, {"use_bias_correction_kl": False}),
    "KL of several steps": ({"kl_coefficient": 0.1, "updates_per_iteration": 2}, {}),
}
"""What bounds or weighs off-policy samples, under the same names but one: ours, and TRL's."""
UNWEIGHED = {"use_bias_correction_kl": False}
"""The same name and meaning here and there. A KL with `gspo` is compared so: TRL weighs it by the response's ratio, and
we by the token's, which alone has the divergence's gradient."""
LEVELS = ("token", "sequence")
LAGGED: dict[str, tuple[dict[str, Any], str, float | None, float]] = {
    "tis": ({"correction": "tis", "correction_high": 1.2}, "truncate", None, 1.2),
    "icepop": ({"correction": "icepop", "correction_low": 0.7, "correction_high": 1.4}, "mask", 0.7, 1.4),
    "decoupled_ppo": ({"correction": "decoupled_ppo", "correction_high": 1.3}, "mask", None, 1.3),
}
"""Correction → ours, what TRL's `vllm_importance_sampling_mode` ends with, and its bounds."""


def trl_trainer(model_folder: Path, *, kind: str = "GRPO", **options: Any) -> Any:
    """A GRPOTrainer, or an RLOOTrainer, that only computes losses."""
    import trl
    from datasets import Dataset

    config = getattr(trl, f"{kind}Config")(
        output_dir=str(model_folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=BUDGET,
        **options,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(model_folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 4}),
        processing_class=char_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer
