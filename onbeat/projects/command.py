"""`onbeat init DIR`: writes a project, with a spec, a reward and its test, rows, a model and a program that trains."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Annotated

import typer

from contracts.encoding.wire import encode_json
from contracts.errors import InvalidInput
from onbeat.base.shipped import shipped_root
from onbeat.commands import options
from onbeat.projects.template import FILES
from onbeat.terminal.output import tell

MODEL = Path("configs/models/two-digit-addition")
"""The demo's, which is shipped: small enough to be copied, and it knows what the rows ask. It keeps its place, at which
the page's templates and the examples of docs look for it."""
NUM_ROWS = 10


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; a new or an empty one.")],
    json_output: options.Json = False,
) -> None:
    """Write a project that runs: spec, reward with its test, ten rows, a small model, a program."""
    source = shipped_root() / MODEL
    files: dict[str, bytes] = {name: text.lstrip("\n").encode() for name, text in FILES.items()}
    files["data/sums.jsonl"] = b"".join(encode_json(row) + b"\n" for row in rows())
    files |= {f"{MODEL}/{path.name}": path.read_bytes() for path in source.iterdir() if path.is_file()}
    try:
        if directory.exists() and any(directory.iterdir()):
            raise InvalidInput(f"{directory} is not empty", field="DIR", cure="give a new folder, or empty this one")
        for name, content in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
    except OSError as error:
        raise InvalidInput(f"{error.filename or directory}: {error.strerror}", field="DIR") from error
    shown = f"{directory} has a project.   run it: cd {shlex.quote(str(directory))} && python train.py"
    tell({"directory": str(directory), "files": sorted(files)}, shown, json_output=json_output)


def rows() -> list[dict[str, str]]:
    """Sums as the model writes them: the digits of the answer in reverse."""
    numbers = random.Random(1)
    pairs = [(numbers.randrange(10, 100), numbers.randrange(10, 100)) for _ in range(NUM_ROWS)]
    return [{"prompt": f"{a}+{b}=", "reference": str(a + b)[::-1]} for a, b in pairs]
