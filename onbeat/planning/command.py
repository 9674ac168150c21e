"""`onbeat plan`: predicts a job's seconds an iteration under each schedule and with each number of generators."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import InvalidInput, NotFound
from contracts.run_folder import RunFolder
from onbeat.client.spec_file import load_spec
from onbeat.commands import options
from onbeat.planning.formulas import compare
from onbeat.planning.measured import check_same_work, measured_times
from onbeat.planning.plan_view import shown
from onbeat.stack.access import read_roots, run_root_from
from onbeat.stack.spec_paths import PathSearch
from onbeat.terminal.output import tell

MOST_GENERATORS = 4096
MOST_IN_A_SWEEP = 32


def plan(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Job spec, a TOML file.")],
    measured: Annotated[
        str, typer.Option("--from", metavar="JOB", help="Finished job with such batches: its id, or its folder.")
    ],
    settings: options.Settings = None,
    generators: Annotated[str, typer.Option("--generators", metavar="N|N..M", help="How many to try.")] = "1",
    json_output: options.Json = False,
    run_dir: options.RunDir = None,
) -> None:
    """Predict a job's seconds an iteration under each schedule, from a finished job's times; nothing is started."""
    job = load_spec(spec, settings or [])
    numbers = _generators(generators)
    folder = _measured_folder(measured, run_dir)
    roots = read_roots(folder.run_root)
    model_root = options.model_root_or_default(None) if roots is None else Path(roots.model_root)
    # As the measured job's paths were found when it was submitted: the same folder has the same name in both.
    job = PathSearch(folders=(spec.parent, Path.cwd()), model_root=model_root).resolve(job)
    check_same_work(job, folder, model_root=model_root)
    comparison = compare(job, measured_times(folder), generators=numbers)
    tell(comparison, shown(comparison), json_output=json_output)


def _measured_folder(job: str, run_dir: Path | None) -> RunFolder:
    """Finds a finished job's folder.

    Args:
        job: An id below the run root, or the path of the folder.
        run_dir: The run root; None: the one that the environment names.

    Raises:
        NotFound: The folder has no timeline.
    """
    path = Path(job)
    if path.is_dir():
        folder = RunFolder(path.resolve().parent, path.resolve().name)
    else:
        folder = RunFolder(run_root_from(os.environ, run_dir).resolve(), job)
    if not folder.timeline.exists():
        raise NotFound(
            f"{folder.path} has no timeline", field="--from", cure="give a job's folder, or its id and --run-dir"
        )
    return folder


def _generators(text: str) -> list[int]:
    """Reads `4` as [4] and `1..8` as [1, …, 8].

    Raises:
        InvalidInput: The text has another form, or its numbers are out of order or too many.
    """
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and (last.isdecimal() or not dots)) or len(text) > 12:
        raise InvalidInput(f"`{text}` is neither N nor N..M", field="--generators", cure="e.g. 4, or 1..8")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= MOST_GENERATORS:
        raise InvalidInput(f"`{text}` is not in order", field="--generators", cure=f"1 to {MOST_GENERATORS}, ascending")
    if high - low >= MOST_IN_A_SWEEP:
        raise InvalidInput(f"`{text}` are {high - low + 1} numbers", field="--generators", cure="try up to 32 at once")
    return list(range(low, high + 1))
