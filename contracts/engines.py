"""The engines that a generator may sample with, and the options of each.

    ONBEAT_ENGINE, ONBEAT_ENGINE_… ─▶ contracts/settings.py ─┐
    engine = { type = …, … } ─▶ onbeat/stack/profile.py ─────┴▶ engine_options ─▶ options ─▶ producer/engine/factory.py

An engine is a record here and a row in the factory's table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta

from contracts.encoding.wire import Record, convert
from contracts.errors import InvalidInput

VARIABLE = "ONBEAT_ENGINE"
"""The environment variable of an engine's name; ONBEAT_ENGINE_URL is that of its option `url`."""
Patience = Annotated[float, Meta(gt=0.0, le=604800.0)]
"""A wait for a server, in seconds: a week at most."""
Workers = Annotated[int, Meta(ge=1, le=64)]
Sequences = Annotated[int, Meta(ge=1, le=2**20)]
Megabytes = Annotated[int, Meta(ge=0, le=2**24)]


Quantization = Literal[
    "",
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "mxfp8",
    "mxfp4",
    "nvfp4_per_token",
]
"""vLLM's names of what it does to weights that aren't quantized, as a trainer's aren't."""


class EngineOptions(Record, tag_field="type", frozen=True, kw_only=True):
    """Base of an engine's options; the tag is the engine's name."""

    reads_elsewhere: ClassVar[bool] = True
    """True where it can load a version that isn't in folders (`Transport.elsewhere`)."""
    says_kept_sets: ClassVar[bool] = False
    """True where its completions say what truncated sampling kept (`PromptBatch.has_kept_sets`), also where no top_k
    bounds it: a job that samples so needs it."""
    says_routes: ClassVar[bool] = False
    """True where its completions say which experts their tokens went through (`PromptBatch.has_routes`)."""
    of_turns: ClassVar[str] = ""
    """Text that a job with an environment adds to the engine's fingerprint."""

    @property
    def is_reproducible(self) -> bool:
        """True where the same batch gives the same bytes whatever runs before it or at the same time.

        Deterministic jobs need that (I7).
        """
        return False

    @property
    def has_to_prove_it(self) -> bool:
        """True where a self-test tries that before the first deterministic batch (`GenerationEngine.difference`).

        Another library's engine has to; ours has not.
        """
        return self.is_reproducible and not isinstance(self, TransformersOptions)

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def arithmetic(self) -> str:
        """The engine's name, with what it rounds by besides the model's dtype; see `prove_version`."""
        quantization = getattr(self, "quantization", "")
        return f"{self.name} {quantization}".rstrip()

    def environment(self) -> dict[str, str]:
        """Returns the variables that make a generator sample with this engine."""
        return {VARIABLE: self.name} | {variable(name): str(getattr(self, name)) for name in self.__struct_fields__}


class TransformersOptions(EngineOptions, tag="transformers", frozen=True, kw_only=True):
    """Transformers' model and a decoding loop of Onbeat's own, in the generator's process."""

    says_kept_sets: ClassVar[bool] = True
    says_routes: ClassVar[bool] = True
    of_turns: ClassVar[str] = "; turn steps 1"
    """Counts the changes that give later turns other bits; without it each turn was filled anew."""

    @property
    def is_reproducible(self) -> bool:
        return True

    shared_sequences: Sequences = 32
    """The generator claims batches while it samples fewer completions than this, if batches may share steps and keep
    their bytes (its log has the outcome). 1: one batch at a time."""
    shared_cache_mb: Megabytes = 1024
    """The memory of the key-value cache that several batches share. A batch that needs more is sampled by itself."""
    turns_cache_mb: Megabytes = 1024
    """The memory of keys and values that trajectories keep between turns. Those that don't fit go through the model
    again, which changes no byte."""
    packed_weights_mb: Megabytes = 1024
    """The memory of a second copy of layers' weights, in the order in which products read them. Other layers are packed
    at each product, which changes no byte."""


class BatchingOptions(EngineOptions, frozen=True, kw_only=True):
    """Options of every engine that samples several batches beside each other."""

    max_sequences: Sequences = 256
    """The generator claims batches while it samples fewer completions than this."""
    timeout_s: Patience = 600.0
    """The longest time for one batch, or for one load of weights. After it the generator ends with an error."""


class VllmOptions(BatchingOptions, tag="vllm", frozen=True, kw_only=True):
    """vLLM, in an engine process that the generator starts and ends."""

    tensor_parallel_size: Workers = 1
    """The number of processes that share each layer of the model. Each has a device of its own; on a CPU they talk by
    gloo."""
    data_parallel_size: Workers = 1
    """The number of copies of the model, each with tensor_parallel_size processes. A request goes to the copy that has
    the fewest."""
    quantization: Quantization = ""
    """How vLLM quantizes each version as it loads it. "" computes in the model's dtype. vLLM refuses what its device
    can't do."""
    max_model_len: Annotated[int, Meta(ge=0, le=2**24)] = 0
    """The most tokens of a prompt with its completion, for which the cache has room. 0: as many as the job needs for
    which vLLM starts; it starts again for a job that needs more."""
    kv_cache_mb: Megabytes = 0
    """The memory of the key-value cache. 0 takes 1024 on a CPU, and on a GPU what the model leaves."""
    sleep_mode: bool = False
    """Gives the trainer of a colocated job the GPU's memory in its turn, by vLLM's sleep mode and its own allocator.
    CUDA only."""
    batch_invariant: bool = False
    """Makes vLLM compute with batch-invariant kernels (VLLM_BATCH_INVARIANT=1), so that it may serve deterministic
    jobs. It needs a GPU of compute capability 8.0 or more, and is slower."""

    @property
    def is_reproducible(self) -> bool:
        return self.batch_invariant


class OpenaiOptions(BatchingOptions, tag="openai", frozen=True, kw_only=True):
    """A server of vLLM that runs already (docs/engines.md)."""

    reads_elsewhere: ClassVar[bool] = False

    url: str = ""
    """Base URL of the server, e.g. http://127.0.0.1:8200. A server belongs to one generator."""
    api_key: str = ""
    """The bearer key of the server. "" if the server needs none."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError("engine_url must be the http:// or https:// address of the server where engine is openai")


Engine = TransformersOptions | VllmOptions | OpenaiOptions
ENGINES: dict[str, type[Engine]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Engine)}
DEFAULT = "transformers"


def engine_options(name: object, options: Mapping[str, Any], *, strict: bool = True) -> Engine:
    """Makes the options of an engine.

    Args:
        name: The engine's name.
        options: Option → its value; the others have their defaults.
        strict: False lets numbers be texts, as in environment variables.

    Raises:
        InvalidInput: The name is unknown, or an option is another engine's. Its field is "type", or the option.
    """
    if not isinstance(name, str) or name not in ENGINES:
        raise InvalidInput(f"invalid enum value '{name}'", field="type", cure=f"one of {', '.join(sorted(ENGINES))}")
    kind = ENGINES[name]
    own = {option: value for option, value in options.items() if not _belongs_to_others(option, value, kind, strict)}
    return convert({"type": name, **own}, kind, strict=strict)


def users_of(option: str) -> list[str]:
    """Returns the names of the engines that have the option."""
    return [name for name, kind in ENGINES.items() if option in kind.__struct_fields__]


def variable(option: str) -> str:
    return f"{VARIABLE}_{option.upper()}"


def _belongs_to_others(option: str, value: Any, kind: type[Engine], strict: bool) -> bool:
    """Returns True where only other engines have the option. Raises InvalidInput unless its value is their default."""
    users = users_of(option)
    name = str(kind.__struct_config__.tag)
    if not users or name in users:
        return False
    field = next(field for field in msgspec.structs.fields(ENGINES[users[0]]) if field.name == option)
    with contextlib.suppress(msgspec.ValidationError):
        if msgspec.convert(value, field.type, strict=strict) == field.default:
            return True
    raise InvalidInput(
        f"engine_{option} has no effect with engine = {name}; it belongs to {' and '.join(users)}", field=option
    )
