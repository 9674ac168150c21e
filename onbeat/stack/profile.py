"""Which generators a stack has, where they aren't all alike: a TOML file for `onbeat up` and `onbeat demo --profile`.

[[generators]]
count = 1
python = ".venv-vllm/bin/python"                     # vLLM's pins don't mix with the trainer's
engine = { type = "vllm", kv_cache_mb = 256 }

[[generators]]
engine = { type = "transformers" }
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from contracts.encoding.wire import Record, convert
from contracts.errors import InvalidInput
from contracts.settings import Megabytes, Patience, Sequences, StackSettings
from contracts.spec import JobSpec
from contracts.weights import RedisWeights


class EngineProfile(Record, frozen=True, kw_only=True):
    """A generator's engine; what is left out has the default of its ONBEAT_ENGINE_ setting."""

    type: Literal["transformers", "vllm", "openai"] = "transformers"
    """ONBEAT_ENGINE."""
    url: str | None = None
    """ONBEAT_ENGINE_URL."""
    server: Literal["vllm", "sglang"] | None = None
    """ONBEAT_ENGINE_SERVER."""
    api_key_variable: str | None = None
    """Environment variable of the launcher that holds ONBEAT_ENGINE_API_KEY: a key doesn't belong into a file."""
    max_sequences: Sequences | None = None
    """ONBEAT_ENGINE_MAX_SEQUENCES."""
    kv_cache_mb: Megabytes | None = None
    """ONBEAT_ENGINE_KV_CACHE_MB."""
    timeout_s: Patience | None = None
    """ONBEAT_ENGINE_TIMEOUT_S."""

    def settings(self, shared: StackSettings, environment: Mapping[str, str]) -> StackSettings:
        """The stack's settings with this engine's. Raises InvalidInput for a setting that the engine would ignore."""
        chosen: dict[str, object] = {"engine": self.type}
        for name in ("url", "server", "max_sequences", "kv_cache_mb", "timeout_s"):
            if (value := getattr(self, name)) is not None:
                chosen[f"engine_{name}"] = value
        if self.api_key_variable is not None:
            if self.api_key_variable not in environment:
                raise InvalidInput(f"{self.api_key_variable} is not set", field="generators.engine.api_key_variable")
            chosen["engine_api_key"] = environment[self.api_key_variable]
        return convert(msgspec.structs.asdict(shared) | chosen, StackSettings)


class GeneratorProfile(Record, frozen=True, kw_only=True):
    """Generators that are alike."""

    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    """How many."""
    python: str = ""
    """Interpreter that runs them; relative paths start at the model root, "" is the launcher's own."""
    engine: EngineProfile = msgspec.field(default_factory=EngineProfile)
    """What they sample with."""

    def interpreter(self, root: Path) -> str:
        """Raises InvalidInput where there is none."""
        if not self.python:
            return sys.executable
        # Not resolved: a virtual environment is found by the path of its link.
        path = root.resolve() / self.python
        if not os.access(path, os.X_OK):
            raise InvalidInput(
                f"there is no interpreter {path}", field="generators.python", cure="run `make setup-vllm`"
            )
        return str(path)


class StackProfile(Record, frozen=True, kw_only=True):
    """All generators of a stack, in the order of their names."""

    generators: Annotated[tuple[GeneratorProfile, ...], Meta(min_length=1, max_length=64)] = (GeneratorProfile(),)
    """Kinds of generators."""

    @property
    def each(self) -> list[GeneratorProfile]:
        """One entry a generator."""
        return [kind for kind in self.generators for _ in range(kind.count)]

    def check(self, spec: JobSpec) -> None:
        """Raises InvalidInput for a job that none of the generators would serve (I7), or that one of them cannot."""
        if spec.deterministic and all(kind.engine.type != "transformers" for kind in self.generators):
            raise InvalidInput(
                "the profile's engines sample batches beside each other, so last bits depend on what else runs",
                field="deterministic",
                cure="--set deterministic=false, or a profile with a transformers generator",
            )
        by_server = not spec.deterministic and any(kind.engine.type == "openai" for kind in self.generators)
        if by_server and isinstance(spec.weights, RedisWeights):
            raise InvalidInput(
                "a server of the profile's openai generators reads files, not Redis",
                field="weights.transport",
                cure='set it to "file" or "delta"',
            )


def load_profile(path: Path) -> StackProfile:
    """Raises InvalidInput that names the file, or the key."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", field="--profile") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: {error}", field="--profile") from error
    return convert(values, StackProfile)
