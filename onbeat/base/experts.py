"""A mixture of experts, whose products have as many rows as chose an expert: a row's bits depend on its company."""

from __future__ import annotations

from transformers.modeling_utils import PreTrainedModel


def has_experts(model: PreTrainedModel) -> bool:
    """Returns True for a mixture of experts, by the names of its modules and parameters."""
    names = (name for named in (model.named_modules(), model.named_parameters()) for name, _ in named)
    return any("expert" in name.lower() for name in names)
