"""Names of models and data sets of the Hugging Face hub, as specs and commands write them.

    hub:Qwen/Qwen3-0.6B                                   a model, at the revision main
    hub:Qwen/Qwen3-0.6B@v1.0                              at a branch, a tag or a commit
    hub:openai/gsm8k                                      a data set, where the key is of a data set
    hub:datasets/openai/gsm8k@<commit>/main/train         a split of it, as a job's record names its files

A job's record has the commit in place of a branch or tag (`at_commit`), so that all its processes, and each resume,
read the same files. Which folder such a name leads to is SpecRoot's to say (contracts/spec/root.py).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from contracts.encoding.names import SEGMENT
from contracts.encoding.wire import Record, changed
from contracts.errors import InvalidInput

SCHEME = "hub:"
MAIN = "main"
"""The revision of a name without one."""
DEFAULT_CONFIG = "default"
"""The folder of a data set's configuration where the spec names none."""
KINDS = {"model": "models", "dataset": "datasets"}
"""Kind → the folder that has all of it."""
DATASETS = "datasets/"
VISIBLE = rf"(?!\.){SEGMENT}"
REPOSITORY = rf"{VISIBLE}/{VISIBLE}"
REVISION = rf"{SEGMENT}(?:/{SEGMENT})*"
COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(rf"(?P<repository>{REPOSITORY})(?:@(?P<revision>{REVISION}))?")
FILES = re.compile(rf"(?P<datasets>{DATASETS})?(?P<repository>{REPOSITORY})@(?P<commit>[0-9a-f]{{40}})(?P<rest>/.*)?")
FORM = "write it as hub:OWNER/NAME, or hub:OWNER/NAME@REVISION"

HubKind = Literal["model", "dataset"]
HubPart = Annotated[str, Meta(max_length=96, pattern=r"^(?!\.)[A-Za-z0-9._+-]+$(?!\n)")]
"""The name of a configuration or a split, which is a folder, too."""


class HubName(Record, frozen=True, kw_only=True):
    """A model or data set of the hub, at a revision."""

    kind: HubKind
    repository: str
    """`owner/name`."""
    revision: str = MAIN
    """A branch, a tag or a commit."""

    def __str__(self) -> str:
        """Returns the name as a command takes it: one that also says that it is a data set's."""
        datasets = DATASETS if self.kind == "dataset" else ""
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{SCHEME}{datasets}{self.repository}{revision}"

    @property
    def is_at_commit(self) -> bool:
        """True where the revision is a commit, whose files never change."""
        return COMMIT.fullmatch(self.revision) is not None

    def at_commit(self, commit: str) -> HubName:
        """Returns the same model or data set at a commit."""
        return changed(self, revision=commit)


def is_hub_name(path: str) -> bool:
    """Returns True where a path of a spec is a name of the hub."""
    return path.startswith(SCHEME)


def read_hub_name(text: str, *, kind: HubKind | None, field: str) -> HubName:
    """Reads a name as a person writes it.

    Args:
        text: The name, with `hub:` before it.
        kind: The kind that the key is of; None where the name itself says it, as a command's argument.
        field: The key or argument, for the refusal.

    Raises:
        InvalidInput: It isn't of this form.
    """
    rest = text.removeprefix(SCHEME)
    if rest.startswith(DATASETS):
        if kind == "model":
            raise InvalidInput(f"`{text}` names a data set", field=field, cure="name a model, as hub:Qwen/Qwen3-0.6B")
        kind = "dataset"
        rest = rest.removeprefix(DATASETS)
    parts = NAME.fullmatch(rest)
    if not text.startswith(SCHEME) or parts is None:
        raise InvalidInput(f"`{text[:200]}` is no name of the hub", field=field, cure=FORM)
    return HubName(kind=kind or "model", repository=parts["repository"], revision=parts["revision"] or MAIN)


def hub_cure(path: str) -> str:
    """Returns the words for a path that leads nowhere and may be meant as a name of the hub; "" for another."""
    name = path.removeprefix("datasets/")
    if re.fullmatch(REPOSITORY, name) is None:
        return ""
    return f'nothing is downloaded by a path; of the hub it is written as "{SCHEME}{name}"'


def read_hub_files(text: str) -> tuple[HubName, str, str] | None:
    """Reads a name of a split's files, as a job's record has it.

    Returns:
        The data set at the commit, the configuration and the split; None for another text.
    """
    parts = FILES.fullmatch(text.removeprefix(SCHEME))
    if parts is None or not parts["datasets"] or not parts["rest"]:
        return None
    config, _, split = parts["rest"][1:].partition("/")
    name = HubName(kind="dataset", repository=parts["repository"], revision=parts["commit"])
    return name, config, split


def place_of_files(path: str) -> str | None:
    """Returns where the files of a name at a commit are, below the folder of all fetched files; None for another name.

    hub:datasets/openai/gsm8k@<commit>/main/train ─▶ datasets/openai/gsm8k/<commit>/main/train
    """
    parts = FILES.fullmatch(path.removeprefix(SCHEME))
    if parts is None:
        return None
    folder = KINDS["dataset" if parts["datasets"] else "model"]
    return f"{folder}/{parts['repository']}/{parts['commit']}{parts['rest'] or ''}"
