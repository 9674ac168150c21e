"""The trials that a trainer and a generator make of a model when they load it, made beforehand by their own functions.

    load_policy ─▶ out_of_reach ─▶ check_cache, judge ─▶ attach_adapters ─▶ choose_passes ─▶ check_padded_rows
    or the twin     (trains)        (samples)             (adapts)           (lays out)

A trial that a process of the job would fail by is `bad`; one of something that the job doesn't ask for is `warn`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from consumer.gradient.assembly import set_up_torch
from consumer.model.adapters import attach_adapters
from consumer.model.policy import load_model, load_policy, with_own_parameters
from consumer.model.reached import out_of_reach
from consumer.model.shared_prompt.padded_trial import check_padded_rows
from consumer.model.shared_prompt.passes import choose_passes
from contracts.engines import Engine, TransformersOptions
from contracts.errors import InvalidInput, kind_and_text
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.trainer import LoraSpec
from onbeat.base.experts import has_experts
from onbeat.doctor.finding import Finding, bad, ok, refused, warn
from onbeat.doctor.model.twin import Twin
from producer.engine.transformers.engine import MOST_ROWS, check_cache
from producer.engine.transformers.row_independence import judge
from producer.engine.transformers.row_steps import give_head_whole_inputs


@dataclass(kw_only=True)
class Trials:
    """The trials of one model. `look` creates them, and reads what they have found.

    Each trial appends a finding. `model` is changed by the later ones, as a trainer changes its own.
    """

    spec: JobSpec
    settings: StackSettings
    engine: Engine
    twin: Twin | None
    """Stands for the folder's model; None where that is loaded."""
    findings: list[Finding] = field(default_factory=list)
    unreached: frozenset[str] | None = None
    """Names of the model's, or of its twin's, parameters that no gradient reaches; None where the trial failed."""
    parameters: frozenset[str] = frozenset()
    """Names of all its parameters."""
    packing: str = ""
    """The layout of passes that was chosen; "" where none was."""
    takes_adapters: bool = False
    """True where peft has put adapters into its layers."""

    def make(self) -> None:
        """Makes them all, or those that are left after one that a job would end by."""
        before = logging.root.manager.disable
        verbosity = transformers_logging.get_verbosity()
        # What they would log is in the findings.
        logging.disable(logging.WARNING)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            self._make()
        finally:
            logging.disable(before)
            transformers_logging.set_verbosity(verbosity)

    def _make(self) -> None:
        model = self._tried("loads", self._load)
        if model is None:
            return
        self.parameters = frozenset(name for name, _ in cast(nn.Module, model).named_parameters())
        self.unreached = self._tried("trains", functools.partial(self._reach, model))
        if self.unreached is None:
            return
        self._tried("samples", functools.partial(self._sample, model), is_needed=self._samples_here)
        lora = self.spec.trainer.lora
        if lora is not None:
            self._tried("adapts", functools.partial(self._adapt, model, lora))
        self._tried("lays out", functools.partial(self._lay_out, model))
        if lora is None:
            self._tried("adapts", functools.partial(self._adapt, model, LoraSpec()), is_needed=False)

    @property
    def _samples_here(self) -> bool:
        """True where the job's generators sample with the engine whose trial is made."""
        return isinstance(self.engine, TransformersOptions)

    def _tried(self, subject: str, trial: Callable[[], Any], *, is_needed: bool = True) -> Any:
        """Makes a trial; returns its result, or None where it has failed and the finding says so."""
        try:
            return trial()
        except InvalidInput as error:
            finding = refused(subject, error)
        except MemoryError:
            finding = bad(subject, "there is too little memory for the trial", "--no-load tries a small twin")
        except Exception as error:
            # An architecture that was never tried may raise anything.
            finding = bad(subject, kind_and_text(error), "name a model of another family; docs/models.md lists them")
        if not is_needed:
            finding = warn(subject, finding.says, finding.cure)
        self.findings.append(finding)
        return None

    def _load(self) -> PreTrainedModel:
        set_up_torch(self.settings, self.spec)
        if self.twin is None:
            root = self.settings.spec_root
            checkpointing = self.spec.trainer.gradient_checkpointing
            return load_policy(self.spec.model, model_root=root, gradient_checkpointing=checkpointing).model
        return self._load_twin(self.twin)

    def _load_twin(self, twin: Twin) -> PreTrainedModel:
        def make(_folder: Path, _config: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
            return twin.make(dtype), {"missing_keys": [], "mismatched_keys": []}

        return load_model(
            self.spec.model,
            model_root=self.settings.spec_root,
            gradient_checkpointing=self.spec.trainer.gradient_checkpointing,
            load=make,
        )

    def _reach(self, model: PreTrainedModel) -> frozenset[str]:
        return out_of_reach(model)

    def _sample(self, model: PreTrainedModel) -> None:
        check_cache(model)
        # The same weights in modules of their own: a generator's hooks aren't a trainer's.
        sampled = with_own_parameters(model).eval().requires_grad_(False)
        give_head_whole_inputs(sampled)
        self.findings.append(ok("samples", self._decoding(sampled)))

    def _decoding(self, sampled: PreTrainedModel) -> str:
        engine = "the transformers engine"
        if has_experts(sampled):
            return f"{engine} decodes one batch at a time: its products have as many rows as chose an expert"
        if self.twin is not None or self.settings.device != "cpu":
            return f"{engine} finds out by its own weights and device whether batches share steps, and its log says it"
        options = self.engine if isinstance(self.engine, TransformersOptions) else TransformersOptions()
        most_rows = min(2 * options.shared_sequences, MOST_ROWS) if options.shared_sequences > 1 else 0
        with torch.inference_mode():
            verdict = judge(sampled, most_rows=most_rows, most_packed_bytes=0)
        num_threads = torch.get_num_threads()
        threads = "with 1 thread" if num_threads == 1 else f"with {num_threads} threads"
        if verdict.problem:
            return f"{engine} decodes one batch at a time {threads}: {verdict.problem}"
        return f"{engine} decodes several batches in shared steps {threads}"

    def _lay_out(self, model: PreTrainedModel) -> None:
        passes = choose_passes(model, self.spec.trainer, torch.device(self.settings.device))
        if passes.packing == "padded":
            check_padded_rows(model)
        self.packing = passes.packing
        self.findings.append(ok("lays out", str(passes)))

    def _adapt(self, model: PreTrainedModel, lora: LoraSpec) -> None:
        attach_adapters(model, lora, seed=self.spec.seed, out_of_reach=self.unreached or frozenset())
        self.takes_adapters = True
