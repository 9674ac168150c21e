"""A model's folder is judged by its files, before any process loads it: the gateway refuses a job by it, a trainer too.

    config.json            an architecture that transformers makes, without code of the folder's own, not quantized
    *.safetensors          all that the index names, each as long as its head says; no pickle in their place
    tokenizer files        a vocabulary whose ids the embedding has
    tokenizer_config.json  a chat template, where a table has messages

Neither torch nor transformers is imported here. What can't be told from the files, the trainer finds out as it loads.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import InvalidInput
from contracts.spec.datasets import no_chat_template
from contracts.spec.job import JobSpec, ModelSpec
from contracts.spec.root import SpecRoot
from onbeat.weights.model_path import FIELD, WEIGHTS_INDEX, check_tokenizer_files, find_model, weights_index

CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
"""Keys of a config.json for the longest sequence; GPT-2 and its kin have the second."""
MOST_CONFIG_BYTES = 16 * 2**20
"""A larger one isn't looked into: the trainer finds what it lacks."""
MOST_TOKENIZER_BYTES = 256 * 2**20
"""The same for a tokenizer.json: the largest vocabularies of today take some 40 MB."""
MOST_HEAD_BYTES = 100 * 10**6
"""The longest head that safetensors itself reads."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json")
"""Files that have a tokenizer's tokens, in the forms of the libraries of tokenizers."""
ARCHITECTURES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
"""Tables of transformers whose keys are the model types that it makes language models of."""
SAVE_CURE = "load it where you trust it, and save it by save_pretrained, which writes safetensors"
SHARD = re.compile(r"-\d+-of-(\d+)\.safetensors$")
"""The end of a file's name where a model has several."""


def check_files(model: ModelSpec, model_root: SpecRoot, *, chat: str) -> None:
    """Checks that a folder has the files that loading it would ask for, without loading anything.

    Args:
        model: The spec's model.
        model_root: The root that its path is below.
        chat: The field of a table that needs a chat template; "" where none does.

    Raises:
        InvalidInput: For the first thing that no trainer could load.
    """
    folder = find_model(model, model_root)
    check_folder(folder)
    config = folder / "tokenizer_config.json"
    is_large = config.is_file() and config.stat().st_size > MOST_CONFIG_BYTES
    is_in_config = is_large or (config.is_file() and b'"chat_template"' in config.read_bytes())
    if chat and not is_in_config and not any(folder.glob("*chat_template*")):
        raise no_chat_template(chat)


def check_sizes(spec: JobSpec, model_root: SpecRoot) -> None:
    """Checks what a job asks of a model's context and vocabulary against its config.json, without loading anything.

    A config that leaves them to the defaults of its class says nothing here; the trainer then finds out.

    Args:
        spec: The job's spec.
        model_root: The root that the model's path is below.

    Raises:
        InvalidInput: A completion can't fit the context, or the sampling names a token that the model lacks.
    """
    config = _object_of(find_model(spec.model, model_root) / "config.json", MOST_CONFIG_BYTES)
    context = _number_in(config, CONTEXT_KEYS)
    if context is not None:
        _check_context(spec, context)
    rows = _number_in(config, ("vocab_size",))
    unknown = None if rows is None else spec.rollout.sampling.unknown_token(rows)
    if unknown is not None:
        setting, problem = unknown
        raise InvalidInput(problem, field=f"rollout.sampling.{setting}", cure="name tokens of the model's own")


def _check_context(spec: JobSpec, context: int) -> None:
    """Raises InvalidInput for a completion that, with one token of a prompt, is longer than the context."""
    for source in spec.tables:
        bound, longest = spec.longest_completion(source)
        if longest + 1 > context:
            raise InvalidInput(
                f"a completion takes up to {longest} tokens, the model's context holds {context} with the prompt",
                field=bound,
                cure=f"set it below {context}, or choose a model with a longer context",
            )


def _number_in(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """Returns the first of the keys that the text's part of a config, or else the whole, has as a positive integer."""
    text = config.get("text_config")
    for part in (text, config):
        for key in keys:
            value = part.get(key) if isinstance(part, dict) else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def check_folder(folder: Path) -> None:
    """Raises InvalidInput, which names model.path and the cure, for the first thing that no trainer could load."""
    check_tokenizer_files(folder)
    check_model_files(folder)
    _check_vocabulary(folder, _object_of(folder / "config.json", MOST_CONFIG_BYTES))


def check_model_files(folder: Path) -> None:
    """Does what `check_folder` does for a folder whose tokenizer isn't used, as a reference's."""
    _check_config(folder, _object_of(folder / "config.json", MOST_CONFIG_BYTES))
    _check_weights(folder)


def has_weights(folder: Path) -> bool:
    """Returns True where a folder has files of weights, of any kind; a job may be refused for them all the same."""
    return any(path for pattern in ("*.safetensors", "*.gguf", *PICKLED) for path in folder.glob(pattern))


def check_config(folder: Path) -> None:
    """Does what `check_folder` does for a folder that has a config.json alone, as of a model that is yet to come."""
    _check_config(folder, _object_of(folder / "config.json", MOST_CONFIG_BYTES))


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    if not config:
        return
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    model_type = config.get("model_type")
    types = [part["model_type"] for part in parts if isinstance(part.get("model_type"), str)]
    if not isinstance(model_type, str):
        raise InvalidInput(
            f"`{folder}` has a config.json without a model_type",
            field=FIELD,
            cure="save the model by save_pretrained, which writes one",
        )
    known = language_models()
    if known and not known.intersection(types):
        raise _unknown(folder, model_type, has_code="auto_map" in config)
    for part in parts:
        quantization = part.get("quantization_config")
        if quantization:
            method = "no method is named"
            if isinstance(quantization, dict):
                method = quantization.get("quant_method", method)
            raise InvalidInput(
                f"the weights of `{folder}` are quantized ({method}), and a step is smaller than what they tell apart",
                field=FIELD,
                cure="name a folder of the same model in bfloat16 or float32",
            )


def _unknown(folder: Path, model_type: str, *, has_code: bool) -> InvalidInput:
    version = importlib.metadata.version("transformers")
    if has_code:
        return InvalidInput(
            f"`{folder}` is a `{model_type}`, which needs code from the folder, and such code is never run",
            field=FIELD,
            cure=f"name a folder of an architecture that transformers {version} has itself; docs/models.md lists them",
        )
    return InvalidInput(
        f"`{folder}` is a `{model_type}`, of which transformers {version} makes no language model",
        field=FIELD,
        cure="name a folder of a causal LM, or of a multi-modal model with a text; docs/models.md lists the families",
    )


@functools.cache
def language_models() -> frozenset[str]:
    """Returns the model types that the installed transformers makes language models of; empty where it doesn't say.

    The tables are read as text: to import them would import torch, for seconds, into a process that needs neither.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    path = Path(next(iter(spec.submodule_search_locations))) / "models" / "auto" / "modeling_auto.py"
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError):
        return frozenset()
    tables = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_of_language(node.targets)
    ]
    return frozenset(_first_strings(tables))


def _is_of_language(targets: Iterable[ast.expr]) -> bool:
    return any(isinstance(target, ast.Name) and target.id in ARCHITECTURES for target in targets)


def _first_strings(tables: Iterable[ast.Call]) -> Iterable[str]:
    """Yields the keys of tables that are written as OrderedDict([(key, value), …])."""
    for table in tables:
        for node in ast.walk(table):
            if isinstance(node, ast.Tuple) and isinstance(node.elts[0], ast.Constant):
                yield str(node.elts[0].value)


def _check_weights(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _no_weights(folder)
    file_of = weights_index(folder, field=FIELD)
    needed = {path.name for path in files}
    if file_of is not None:
        needed = set(file_of.values())
    elif not (folder / "model.safetensors").is_file():
        raise _no_index(folder, files)
    for name in sorted(needed):
        tensors = _tensors_of(folder / name)
        lacking = [tensor for tensor, file in (file_of or {}).items() if file == name and tensor not in tensors]
        if lacking:
            raise InvalidInput(
                f"`{folder / name}` lacks {min(lacking)}, which {WEIGHTS_INDEX} says is in it",
                field=FIELD,
                cure="copy or download the folder again: its files are of two models",
            )


def _no_weights(folder: Path) -> InvalidInput:
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        problem = f"the weights of `{folder}` are pickled ({pickled[0]}), and to read them would run what they hold"
        return InvalidInput(problem, field=FIELD, cure=SAVE_CURE)
    if any(folder.glob("*.gguf")):
        return InvalidInput(f"the weights of `{folder}` are a GGUF file", field=FIELD, cure=SAVE_CURE)
    cure = "it needs config.json, tokenizer files and model.safetensors"
    return InvalidInput(f"`{folder}` has no weights", field=FIELD, cure=cure)


def _no_index(folder: Path, files: list[Path]) -> InvalidInput:
    if any(SHARD.search(path.name) for path in files):
        return InvalidInput(
            f"`{folder}` has weights in several files, and no {WEIGHTS_INDEX}",
            field=FIELD,
            cure="copy or download the whole folder again",
        )
    return InvalidInput(
        f"`{folder}` has {files[0].name}, which is not where transformers looks for weights",
        field=FIELD,
        cure="it needs model.safetensors, as save_pretrained names it",
    )


def _tensors_of(path: Path) -> Mapping[str, Any]:
    """Reads the head of a file of safetensors: 8 bytes that say its length, then JSON. Raises InvalidInput."""
    whole_cure = "copy or download the whole folder again"
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = file.read(length) if length <= MOST_HEAD_BYTES else b""
    except OSError as error:
        problem = f"`{path.parent}` has only a part of its weights: {path.name} can't be read ({error.strerror})"
        raise InvalidInput(problem, field=FIELD, cure=whole_cure) from error
    try:
        tensors = json.loads(head)
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        end = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        problem = f"`{path}` is no file of safetensors, or a part of one"
        raise InvalidInput(problem, field=FIELD, cure=whole_cure) from error
    if num_bytes < end:
        problem = f"`{path}` is cut off: it has {num_bytes:,} bytes of {end:,}"
        raise InvalidInput(problem, field=FIELD, cure=whole_cure)
    return tensors


def _check_vocabulary(folder: Path, config: Mapping[str, Any]) -> None:
    if not any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        raise InvalidInput(
            f"`{folder}` has a tokenizer_config.json, and no vocabulary",
            field=FIELD,
            cure="save the tokenizer into the folder with tokenizer.save_pretrained",
        )
    text = config.get("text_config")
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    if rows is None:
        rows = config.get("vocab_size")
    tokenizer = _object_of(folder / "tokenizer.json", MOST_TOKENIZER_BYTES)
    largest = _largest_id(tokenizer)
    if isinstance(rows, int) and largest is not None and largest >= rows:
        raise tokenizer_too_large(folder, largest, rows)


def tokenizer_too_large(folder: Path, largest: int, rows: int) -> InvalidInput:
    """Returns the error for a tokenizer with an id that the embedding of so many rows lacks."""
    return InvalidInput(
        f"the tokenizer of `{folder}` has ids above the model's {rows} embeddings, up to {largest}",
        field=FIELD,
        cure="use the tokenizer that belongs to the model, or save the model after resize_token_embeddings",
    )


def _largest_id(tokenizer: Mapping[str, Any]) -> int | None:
    """Returns the largest id of a tokenizer.json; None where it can't be told."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[int] = []
    if isinstance(vocabulary, dict):
        ids += [value for value in vocabulary.values() if isinstance(value, int)]
    elif isinstance(vocabulary, list):
        # A unigram's entries have their places as ids.
        ids.append(len(vocabulary) - 1)
    added = tokenizer.get("added_tokens")
    if isinstance(added, list):
        ids += [token["id"] for token in added if isinstance(token, dict) and isinstance(token.get("id"), int)]
    return max(ids, default=None)


def _object_of(path: Path, most_bytes: int) -> dict[str, Any]:
    """Returns the object in a JSON file; {} for a file that isn't there or is too long. Raises InvalidInput."""
    try:
        if not path.is_file() or path.stat().st_size > most_bytes:
            return {}
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"`{path}` can't be read: {error.strerror}", field=FIELD) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"`{path}` is no JSON: {error}", field=FIELD, cure="copy the folder again") from error
    if not isinstance(value, dict):
        raise InvalidInput(f"`{path}` holds no object", field=FIELD, cure="copy the folder again")
    return value
