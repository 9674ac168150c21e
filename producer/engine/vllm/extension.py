"""Verified weights inside vLLM: a worker extension, for the in-process engine and for servers that users run.

    collective_rpc("load_version") ─▶ WeightReceiver ─▶ digest ─▶ checkpoint's names ─▶ reload_weights
                                        │ refused            (the same tensors)           │ a parameter got nothing
                                        └──────────────▶ {"rejected": …} ◀────────────────┴──▶ {"weights_digest": …}

The digest is computed here, where the model is, over the tensors that vLLM's own loader is handed next (I2), by the
names of a checkpoint, which that loader knows. All that can be checked before is checked before the loader starts; a
parameter that the loader leaves untouched is found after it.

A server loads this module by `--worker-extension-cls producer.engine.vllm.extension.VerifiedLoader`, with this
repository on its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from contracts.encoding.wire import decode_json
from contracts.errors import OnbeatError, WeightsUnfit
from contracts.versions import WeightManifest
from contracts.weights import TRANSPORTS
from onbeat.base.process.launcher import PR_SET_PDEATHSIG
from onbeat.weights.base_model.checkpoint_names import CheckpointNames, names_of_family
from onbeat.weights.layout import layout_of
from onbeat.weights.model_folder import empty_model, weight_tensors
from onbeat.weights.receiver import WeightReceiver
from onbeat.weights.stores import CopiedFiles, Stores, VersionFile
from onbeat.weights.transports import make_stores
from producer.engine.vllm.reloading import Reloads
from producer.engine.vllm.scored_prompts import score_last_tokens

CLASS = f"{__name__}.VerifiedLoader"
# Set here, since this is imported wherever a worker of vLLM is, a server's too. Triton rounds the float32 factors of
# attention's products to the ten bits of TF32 else, which moves a small model's log-probs by some 1e-2.
os.environ["TRITON_F32_DEFAULT"] = "ieee"


def stores_of_core(root: Path, at_hand: Callable[[], Mapping[str, bytes]]) -> Stores:
    """Makes the stores of the engine core, a process that itself reads folders alone.

    Args:
        root: The weight root.
        at_hand: Returns name → content of the files that the generator has read elsewhere of the version that loads.
    """

    def read(file: VersionFile) -> bytes:
        return at_hand().get(file.name, b"")

    stores = dict(make_stores(root))
    kinds = TRANSPORTS
    for name in [name for name in stores if kinds[name].elsewhere]:
        stores[name] = CopiedFiles(kinds[name].elsewhere, read, stores[name].bases)
    return stores


def _end_after(generator: int, others: list[int], engine_core_pid: int) -> None:
    """Waits for the generator's end, and then ends what it has started.

    Args:
        generator: File descriptor of the generator's process.
        others: Those of processes beside the engine cores.
        engine_core_pid: Process number of the engine core, with which its workers end: this process, or its parent.
    """
    select.select([generator], [], [])
    for other in others:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(other, signal.SIGKILL)
    if engine_core_pid in (os.getpid(), os.getppid()):
        os.kill(engine_core_pid, signal.SIGKILL)


class VerifiedLoader:
    """The methods that vLLM mixes into its worker class. Answers are maps of strings, as its HTTP endpoint needs them.

    vLLM creates the worker; the generator calls the methods, by its process or over HTTP.
    """

    held_version: int | None = None
    held_digest: str = ""
    """Digest of the tensors that the loader was handed; "" before the first load and while one runs."""

    receiver: WeightReceiver | None = None
    """A receiver with a copy of the version in host memory, for what stands on another one: deltas, and adapters."""

    reloads: Reloads | None = None
    """The reloads of the worker's model; None before the first."""

    files: Mapping[str, bytes] = MappingProxyType({})
    """Name → content of the version that is being loaded, where its files came with the call."""

    if TYPE_CHECKING:
        get_model: Any
        model_config: Any
        model_runner: Any
        reload_weights: Any

    def load_version(
        self, weight_root: str, manifest_json: str, files: dict[str, bytes] | None = None
    ) -> dict[str, str]:
        """Replaces the weights by a version's. Generation must be paused.

        Args:
            weight_root: The weight root.
            manifest_json: The version's manifest.
            files: Name → content, of a version that isn't in folders.

        Returns:
            The answer of `describe_version`, with the reason under "rejected" if the version was refused, and with
            "unfit" where no copy of it would do.
        """
        self.held_version = None
        self.held_digest = ""
        # Nothing is scored before a version is loaded.
        score_last_tokens(self.model_runner)
        try:
            manifest = decode_json(manifest_json, WeightManifest)
            stores = stores_of_core(Path(weight_root), lambda: self.files)
            receiver = self.receiver or WeightReceiver(self._expected(), stores)
            self.receiver = receiver if manifest.base or manifest.adapter else None
            self.files = files or {}
            digest = receiver.load(manifest)
        except OnbeatError as error:
            is_unfit = {"unfit": "true"} if isinstance(error, WeightsUnfit) else {}
            return self.describe_version() | {"rejected": str(error)} | is_unfit
        finally:
            self.files = {}
        self.reloads = self.reloads or Reloads(self.get_model(), has_tied_head=self._has_tied_head)
        make_weights = partial(self._checkpoint_names().convert, receiver.tensors)
        problem = self.reloads.run(self.reload_weights, make_weights)
        if problem:
            refusal = f"version {manifest.policy_version}: {problem}"
            return self.describe_version() | {"rejected": refusal, "unfit": "true"}
        self._renew_tied_head()
        self.held_version = manifest.policy_version
        self.held_digest = digest
        return self.describe_version()

    def describe_version(self) -> dict[str, str]:
        """Describes the loaded version, and the log-probs of the answers."""
        return {
            "policy_version": "" if self.held_version is None else str(self.held_version),
            "weights_digest": self.held_digest,
            "logprobs_mode": str(self.model_config.logprobs_mode),
            "max_logprobs": str(self.model_config.max_logprobs),
            "context_tokens": str(self.model_config.max_model_len),
            "vocabulary_tokens": str(self.model_config.get_vocab_size()),
        }

    def clear_kv_cache(self) -> None:
        """Fills the cache with zeros, after weights that gave numbers which aren't finite.

        A masked position of a reused block counts as 0 times its content, and 0 times NaN is NaN under any weights.
        """
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()

    def end_with_generator(self, generator_pid: int, other_pids: list[int]) -> None:
        """Lets this process, and the engine core that it is of, end when the generator that started them is gone:
        nothing else would stop them then.

        Args:
            generator_pid: The generator's process number.
            other_pids: Those of processes that the generator has started beside the engine cores; they end, too.
        """
        if not sys.platform.startswith("linux"):
            return
        parent = os.getppid()
        if parent == 1:
            os._exit(1)
        is_engine_core = parent == generator_pid
        if not (is_engine_core and other_pids):
            # With its parent ends a worker, or an engine core that has nothing to end before itself.
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if is_engine_core and not other_pids:
            return
        others = [os.pidfd_open(pid) for pid in other_pids]
        engine_core_pid = os.getpid() if is_engine_core else parent
        arguments = (os.pidfd_open(generator_pid), others, engine_core_pid)
        threading.Thread(target=_end_after, args=arguments, name="ends-with-generator", daemon=True).start()

    def _renew_tied_head(self) -> None:
        """Packs a tied head again. vLLM's reload processes the layers that were handed a tensor; a head that is tied to
        the embedding is handed none, and on a CPU it computes with a packed copy of its own: that of the version
        before.
        """
        if not self._has_tied_head:
            return
        head_class = import_module("vllm.model_executor.layers.vocab_parallel_embedding").ParallelLMHead
        for module in self.get_model().modules():
            if isinstance(module, head_class):
                module.quant_method.process_weights_after_loading(module)

    @property
    def _has_tied_head(self) -> bool:
        return getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)

    def _expected(self) -> dict[str, torch.Tensor]:
        """Returns names, shapes and dtypes of a version as transformers has them: vLLM's own parameters are fused."""
        return dict(weight_tensors(self._empty_model()))

    def _checkpoint_names(self) -> CheckpointNames:
        """Returns the names that vLLM's loader knows: those of the checkpoints of the model's class."""
        model = self._empty_model()
        return names_of_family(model, layout_of(dict(weight_tensors(model))))

    def _empty_model(self) -> PreTrainedModel:
        return empty_model(Path(self.model_config.model), dtype=self.model_config.dtype, device="meta")
