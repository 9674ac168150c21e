"""The generators of a stack, where they aren't all alike: a TOML file for `onbeat up` and `onbeat demo --profile`.

[[generators]]
count = 1
engine = { type = "vllm", kv_cache_mb = 256 }        # in this Python, or in the environment of `onbeat setup vllm`

[[generators]]
engine = { type = "transformers" }
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from contracts.encoding.wire import Record, convert
from contracts.engines import DEFAULT, ENGINES, Engine, engine_options
from contracts.errors import InvalidInput
from contracts.spec.job import JobSpec
from contracts.spec.serving import check_engines
from onbeat.base.shipped import own_or_shipped
from onbeat.stack.vllm_python import python_with_vllm

KEY_VARIABLE = "api_key_variable"
"""Key of an engine's table that names a variable of the launcher: a server's key doesn't belong into a file."""

VLLM = "vllm"

Whole = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Real = Annotated[float, Meta(ge=-1e15, le=1e15)]
EngineTable = Annotated[dict[str, str | Whole | Real | bool], Meta(max_length=64)]
"""An engine's `type` and options, as they are written; `engine_options` says what each engine takes."""


def python_for(engine: str, root: Path, *, field: str) -> str:
    """Returns the interpreter of a generator for which none is named.

    Args:
        engine: The engine's name.
        root: The model root.
        field: The setting that names the engine.

    Raises:
        InvalidInput: The engine is vLLM, and no interpreter has it.
    """
    if engine == VLLM:
        return python_with_vllm((Path.cwd(), root), field=field)
    return sys.executable


class GeneratorProfile(Record, frozen=True, kw_only=True):
    """Generators that are alike."""

    count: Annotated[int, Meta(ge=1, le=1024)] = 1
    """How many."""
    python: str = ""
    """Interpreter that runs them; a relative path starts at the folder of the profile's file. "" is the launcher's own,
    or for vLLM, where that one has none, `.venv-vllm` in the working folder or the model root (`onbeat setup vllm`
    makes it)."""
    engine: EngineTable = msgspec.field(default_factory=lambda: {"type": DEFAULT})
    """The engine that they sample with, and its options."""

    def __post_init__(self) -> None:
        if not isinstance(self.engine.get(KEY_VARIABLE, ""), str):
            raise ValueError(f"{KEY_VARIABLE} must be the name of a variable")
        self._options({"api_key": "the variable's"} if self.key_variable else {})

    @property
    def name(self) -> str:
        """The engine's."""
        return str(self.engine.get("type", DEFAULT))

    @property
    def kind(self) -> type[Engine]:
        """Type of the engine's options."""
        return ENGINES[self.name]

    @property
    def is_reproducible(self) -> bool:
        """True where these generators serve deterministic jobs."""
        return self._options({"api_key": "the variable's"} if self.key_variable else {}).is_reproducible

    @property
    def key_variable(self) -> str:
        """Environment variable of the launcher that holds the key of the engine's server; "" where there is none."""
        return str(self.engine.get(KEY_VARIABLE, ""))

    def options(self, environment: Mapping[str, str]) -> Engine:
        """The engine's options. Raises InvalidInput where the variable of its server's key is not set."""
        if not self.key_variable:
            return self._options({})
        if self.key_variable not in environment:
            raise InvalidInput(f"{self.key_variable} is not set", field=f"generators.engine.{KEY_VARIABLE}")
        return self._options({"api_key": environment[self.key_variable]})

    def interpreter(self, root: Path) -> str:
        """Returns the path of the interpreter that runs them.

        Args:
            root: The model root, where an environment with vLLM is looked for.

        Raises:
            InvalidInput: There is none.
        """
        if not self.python:
            return python_for(self.name, root, field="generators.engine")
        # Of a file's profile it is absolute (`started_at`), else it starts at the current folder. It isn't resolved: a
        # virtual environment is found by the path of its link.
        path = Path.cwd() / self.python
        if not os.access(path, os.X_OK):
            raise InvalidInput(
                f"there is no interpreter {path}",
                field="generators.python",
                cure="name one that is there, or leave the key out; a relative path starts at the profile's folder",
            )
        return str(path)

    def started_at(self, folder: Path) -> GeneratorProfile:
        """Returns the same with an interpreter whose path starts at a folder, which is that of the profile's file."""
        if not self.python:
            return self
        # An absolute path stays as it is.
        return replace(self, python=str(folder / self.python))

    def _options(self, key: dict[str, str]) -> Engine:
        options = {name: value for name, value in self.engine.items() if name not in ("type", KEY_VARIABLE)}
        if "api_key" in options:
            raise InvalidInput(
                "a key doesn't belong into a file",
                field="generators.engine.api_key",
                cure=f"name a variable of the launcher in {KEY_VARIABLE}",
            )
        try:
            return engine_options(self.engine.get("type", DEFAULT), options | key)
        except InvalidInput as error:
            field = ".".join(filter(None, ("generators.engine", error.field)))
            raise InvalidInput(error.problem, field=field, cure=error.cure) from error


class StackProfile(Record, frozen=True, kw_only=True):
    """The generators of a stack, in the order of their names."""

    generators: Annotated[tuple[GeneratorProfile, ...], Meta(min_length=1, max_length=64)] = (GeneratorProfile(),)
    """Kinds of generators."""

    @property
    def each(self) -> list[GeneratorProfile]:
        """An entry for each generator."""
        return [kind for kind in self.generators for _ in range(kind.count)]

    def check(self, spec: JobSpec) -> None:
        """Raises InvalidInput for a job that none of the generators would serve, or that one of them cannot."""
        check_engines(
            spec,
            not_reproducible=["" if kind.is_reproducible else kind.name for kind in self.generators],
            silent=["" if kind.kind.says_kept_sets else kind.name for kind in self.generators],
            no_routes=["" if kind.kind.says_routes else kind.name for kind in self.generators],
        )


def load_profile(path: Path) -> StackProfile:
    """Reads a profile, in which relative paths start at its own folder.

    Raises:
        InvalidInput: It can't be read, or a key is wrong; it names the file, or the key.
    """
    file = own_or_shipped(path)
    try:
        values = tomllib.loads(file.read_text())
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", field="--profile") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: {error}", field="--profile") from error
    profile = convert(values, StackProfile)
    folder = file.parent.resolve()
    return replace(profile, generators=tuple(generator.started_at(folder) for generator in profile.generators))
