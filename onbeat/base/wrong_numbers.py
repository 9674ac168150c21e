"""Faults of an engine that holds the right bytes and computes other numbers with them, for the tests of I11.

    ONBEAT_WRONG_NUMBERS=attention:3 python -m producer

has the transformers engine compute with attention matrices that are 2 % too large, from the third version on that it
loads. `attention:3:once` does so until the generator makes its engine anew; `@FOLDER` for as long as there is a file
FOLDER/PID with the fault's name in it. FOLDER/PID.seen then says that a version was loaded so, and FOLDER/PID.over that
one was loaded without it. Unset, a load compares with None and does nothing.

before_load ─▶ the version's bytes are put in place, and hashed ─▶ after_load ─▶ the engine computes

The engine's tensors get altered copies in the place of their memory, which stays as it was hashed: a version that is
made of the one before, as a delta is, comes out right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from contracts.errors import InvalidInput

Tensor = Any
"""A torch tensor: this room imports no torch."""


class Model(Protocol):
    """A torch module."""

    def named_parameters(self) -> Any: ...


WRONG_NUMBERS = {
    "attention": "the matrices of attention are 2 % too large",
    "layer": "the matrices of the last layer are 1 % too large",
    "stale": "the engine computes with the version before",
}
"""Fault → what the engine computes with."""
SEEN = ".seen"
"""End of the name of the file that says that a version was loaded with the fault."""
OVER = ".over"
"""The same of a version that was loaded without it afterwards."""


class Disturbance:
    """The fault of one process. `arm` creates it; the engine calls it around each load."""

    def __init__(self, fault: str, *, first_load: int = 1, is_once: bool = False, folder: Path | None = None) -> None:
        """Arms the fault.

        Args:
            fault: One of WRONG_NUMBERS; "" where the folder's file names it.
            first_load: The number of the first load, from 1, that has the fault.
            is_once: Ends with the engine whose load has it first.
            folder: The folder of the file that names the fault while it lasts; None for a fault without end.
        """
        self._fault = fault
        self._first_load = first_load
        self._is_once = is_once
        self._note = None if folder is None else folder / str(os.getpid())
        self._num_loads = 0
        self._disturbed_model = 0
        """`id` of the model that had the fault first; 0 before."""
        self._true: dict[str, Tensor] = {}
        """Name → the memory of a tensor that has an altered copy in its place."""
        self._before: dict[str, Tensor] = {}
        """Name → a copy of the tensor in the version that this engine loaded last."""
        self._model = 0
        """`id` of the model that `_before` is of."""

    def before_load(self, model: Model) -> None:
        """Gives the engine's tensors their own memory back."""
        for name, parameter in model.named_parameters():
            if name in self._true and self._model == id(model):
                parameter.data = self._true[name]
        self._true = {}
        if self._model != id(model):
            self._model = id(model)
            self._before = {}

    def after_load(self, model: Model) -> None:
        """Has the engine compute wrongly, where the fault's time has come."""
        self._num_loads += 1
        fault = self._fault_now
        loaded: dict[str, Tensor] = {}
        if fault == "stale" or self._note is not None:
            loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        is_due = bool(fault) and self._num_loads >= self._first_load
        if is_due and self._is_once:
            self._disturbed_model = self._disturbed_model or id(model)
            is_due = self._disturbed_model == id(model)
        if is_due:
            self._disturb(model, fault)
            self._say(SEEN)
        elif self._note is not None and self._note.with_name(self._note.name + SEEN).exists():
            self._say(OVER)
        self._before = loaded

    @property
    def _fault_now(self) -> str:
        if self._note is None:
            return self._fault
        try:
            return self._note.read_text()
        except FileNotFoundError:
            return ""

    def _say(self, what: str) -> None:
        if self._note is not None:
            self._note.with_name(self._note.name + what).touch()

    def _disturb(self, model: Model, fault: str) -> None:
        parameters = dict(model.named_parameters())
        for name, tensor in altered(parameters, fault, self._before).items():
            self._true[name] = parameters[name].data
            parameters[name].data = tensor


def altered(parameters: Mapping[str, Tensor], fault: str, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the copies that take the places of tensors.

    Args:
        parameters: The model's, by name.
        fault: One of WRONG_NUMBERS.
        before: Those of the version before; {} where the engine has loaded no other version.
    """
    if fault == "stale":
        return dict(before)
    matrices = {name: parameter for name, parameter in parameters.items() if parameter.dim() > 1}
    layers = sorted({layer for layer in map(_layer_of, matrices) if layer is not None})
    if fault == "layer":
        return {name: matrix.detach() * 1.01 for name, matrix in matrices.items() if _layer_of(name) == layers[-1]}
    return {name: matrix.detach() * 1.02 for name, matrix in matrices.items() if "attn" in name or "attention" in name}


def _layer_of(name: str) -> int | None:
    """Returns the number of the layer that a tensor belongs to; None for the embedding, a head or a last norm."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


_armed: Disturbance | None = None


def arm(setting: str) -> None:
    """Arms `NAME`, `NAME:N`, `NAME:N:once` or `@FOLDER`; "" arms nothing. Raises InvalidInput for an unknown name."""
    global _armed
    _armed = None
    if setting.startswith("@"):
        _armed = Disturbance("", folder=Path(setting[1:]))
    elif setting:
        name, _, count = setting.removesuffix(":once").partition(":")
        if name not in WRONG_NUMBERS or (count and not count.isdigit()):
            raise InvalidInput(
                f"`{setting}` is no fault of an engine",
                field="ONBEAT_WRONG_NUMBERS",
                cure=f"known: {', '.join(WRONG_NUMBERS)}",
            )
        _armed = Disturbance(name, first_load=int(count or 1), is_once=setting.endswith(":once"))


def before_load(model: Model) -> None:
    """Ends what a fault has done to a model, before it is given another version."""
    if _armed is not None:
        _armed.before_load(model)


def after_load(model: Model) -> None:
    """Disturbs a model that holds a version, where a fault is armed."""
    if _armed is not None:
        _armed.after_load(model)


class WrongEngines:
    """The faults of a stack's generators, as one who disturbs them begins and ends them.

    The campaign of chaos creates it for a folder; its generators read the folder's files, and write what they did.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def setting(self) -> str:
        """ONBEAT_WRONG_NUMBERS of the generators."""
        return f"@{self._folder}"

    def begin(self, pid: int, fault: str) -> None:
        """Has the generator of this process compute wrongly from its next load on."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for what in (SEEN, OVER):
            self._note(pid, what).unlink(missing_ok=True)
        aside = self._note(pid, ".new")
        aside.write_text(fault)
        aside.replace(self._note(pid))

    def end(self, pid: int) -> None:
        """Lets it compute rightly from its next load on."""
        self._note(pid).unlink(missing_ok=True)

    def is_seen(self, pid: int) -> bool:
        """Returns True once the process has loaded a version wrongly."""
        return self._note(pid, SEEN).exists()

    def is_over(self, pid: int) -> bool:
        """Returns True once it has loaded one rightly after that."""
        return self._note(pid, OVER).exists()

    def _note(self, pid: int, what: str = "") -> Path:
        return self._folder / f"{pid}{what}"
