"""Verified weights inside vLLM: a worker extension, for the in-process engine and for servers that users run.

    collective_rpc("load_version") ─▶ WeightReceiver ─▶ digest ─▶ reload_weights ─▶ {"weights_digest": …}
                                        │ refused                (the same tensors)
                                        └────────────────────────────────────────▶ {"rejected": …}

The digest is computed here, where the model is, over the tensors that vLLM's own loader is handed next (I2). Everything
is checked before the loader starts: a loader that ends half-way would leave layers without any weights.

A server loads this module by `--worker-extension-cls producer.engine.vllm.extension.VerifiedLoader`, with this
repository on its path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from contracts.encoding.wire import decode_json
from contracts.errors import OnbeatError, WeightsUnfit
from contracts.versions import WeightManifest
from contracts.weights import TRANSPORTS
from onbeat.base.process.launcher import PR_SET_PDEATHSIG
from onbeat.weights.model_folder import empty_model, weight_tensors
from onbeat.weights.receiver import WeightReceiver
from onbeat.weights.stores import CopiedFiles, Stores, VersionFile
from onbeat.weights.transports import make_stores

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


class VerifiedLoader:
    """The methods that vLLM mixes into its worker class. Answers are maps of strings, as its HTTP endpoint needs them.

    vLLM creates the worker; the generator calls the methods, by its process or over HTTP.
    """

    held_version: int | None = None
    held_digest: str = ""
    """Digest of the tensors that the loader was handed; "" before the first load and while one runs."""

    receiver: WeightReceiver | None = None
    """A receiver with a copy of the version in host memory, for what stands on another one: deltas, and adapters."""

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
        self.reload_weights(weights_iterator=iter(receiver.tensors.items()))
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

    def end_with_generator(self) -> None:
        """Lets this process get SIGKILL when the generator that started it is gone: nothing else would stop it then."""
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == 1:
                os._exit(1)

    def _renew_tied_head(self) -> None:
        """Packs a tied head again. vLLM's reload processes the layers that were handed a tensor; a head that is tied to
        the embedding is handed none, and on a CPU it computes with a packed copy of its own: that of the version
        before.
        """
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        head_class = import_module("vllm.model_executor.layers.vocab_parallel_embedding").ParallelLMHead
        for module in self.get_model().modules():
            if isinstance(module, head_class):
                module.quant_method.process_weights_after_loading(module)

    def _expected(self) -> dict[str, torch.Tensor]:
        """Returns names, shapes and dtypes of a version as transformers has them: vLLM's own parameters are fused."""
        model = empty_model(Path(self.model_config.model), dtype=self.model_config.dtype, device="meta")
        return dict(weight_tensors(model))
