"""What an environment of this distribution is provided with, beside its table: the service knows it before the class.

A package of others has none: what it offers is imported in a cage alone, and has the cage that every environment has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.environments.service import EnvironmentTable
from contracts.settings import StackSettings

OperatorsPart = Callable[[EnvironmentTable], bytes]
"""What the child of that environment may know of the settings, which its class takes as its first argument."""


@dataclass(frozen=True, kw_only=True)
class Provision:
    """What one environment needs; the group `onbeat.environment_provisions` has a table of them by their names."""

    distribution: str = "onbeat"
    """Whose version is the environment's."""
    extra: str = ""
    """Which extra of pyproject.toml brings that distribution; "" where none does."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its `CageRules` that differ from other environments'."""
    is_only_imported: bool = False
    """Whether one that is made runs code of others, or needs the operator's part: the nursery, whose children share
    what it did, imports the class and makes none."""
    from_operator: Callable[[StackSettings], OperatorsPart] | None = None
    """Reads the operator's part when the service starts. Raises InvalidInput."""
