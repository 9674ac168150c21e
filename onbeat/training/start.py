"""`onbeat.train` and `onbeat.attach`: a spec of whatever a program has, and the stack where it goes.

spec, tables, functions, rows ─▶ JobSpec ─┬─▶ gateway that url=, ONBEAT_GATEWAY_URL or run_dir= says ─▶ Run
                                          └─▶ a stack of its own, in a new run folder ───────────────▶ Run
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from contracts.settings import PREFIX
from contracts.spec.job import JobSpec
from contracts.spec.reading import SpecReading
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import read_spec, read_toml
from onbeat.commands.options import own_root_of, placed, spec_for_gateway
from onbeat.stack.access import (
    GatewayAccess,
    gateway_access,
    inputs_below,
    page_address,
    read_stack_file,
    run_root_from,
    same_origin,
)
from onbeat.terminal.output import tell_fetch
from onbeat.training.inputs import (
    TOOLS_NAME,
    Put,
    dataset_table,
    environment_table,
    put_below,
    put_nowhere,
    reward_table,
    tools_table,
)
from onbeat.training.private_stack import (
    new_run_root,
    nothing_left_of_what_is_refused,
    on_own_stack,
    options_of_job,
)
from onbeat.training.progress_line import shown_for
from onbeat.training.run import Run

log = logging.getLogger(__name__)
PARTS = {"reward": reward_table, "dataset": dataset_table, "environment": environment_table}


def train(
    spec: str | os.PathLike[str] | JobSpec | Mapping[str, Any] | None = None,
    *,
    reward: Callable[..., float] | list[Any] | Mapping[str, Any] | None = None,
    dataset: Any = None,
    environment: Any = None,
    tools: Sequence[Callable[..., Any] | str] | None = None,
    url: str = "",
    key: str = "",
    run_dir: str | os.PathLike[str] | None = None,
    model_root: str | os.PathLike[str] | None = None,
    generators: int | None = None,
    stage_workers: int | None = None,
    threads: int | None = None,
    progress: bool | None = None,
    **tables: Any,
) -> Run:
    """Submits a job, and returns once it is queued.

        run = onbeat.train("configs/demo.toml", iterations=50, optimizer={"learning_rate": 1e-3})

    spec: a TOML file, a JobSpec, or a spec's keys. tables: further keys, as docs/configuration.md has them; a table
    changes the keys that it names. `model` may be a path alone.

    reward: a function of this program, which gets those of prompt, completion, reference, task_entry, metadata and the
    columns of the rows that it names; or a list of functions and components; or the table. dataset: rows of `prompt`
    and `reference` (dicts, a function that makes them, a Hugging Face `Dataset`), a file (JSON lines, parquet), or the
    table, with rows as paths.

    environment: a class of this program with `reset` and `step`, or the table, whose `name` may be one. tools:
    functions of this program, and names of built-in tools; their table is changed by `environment`.

    url, key: of a gateway, else ONBEAT_GATEWAY_URL and ONBEAT_API_KEY; or run_dir: of an `onbeat up` of this user,
    which isn't looked for otherwise. Where none of them names one, a stack is started for the job, in run_dir or in
    `runs/train-<time>`, and ends with it. Only such a stack takes model_root, generators, stage_workers and threads. At
    a gateway of this machine and user model_root has no effect either: `save_model` finds the stack's own.

    Relative paths start at the folder of the spec's file, else at that of the program, else at the current folder, else
    at the model root; model_root comes first where it is given. At another machine's gateway they are below its root.

    progress: shows a line while the program waits; None does at a terminal and in a notebook. Raises InvalidInput that
    names the field.
    """
    parts = {"reward": reward, "dataset": dataset, "environment": environment, "tools": tools}
    access = _named_gateway(url, key, run_dir)
    if access is not None:
        _refuse_own(model_root=model_root, generators=generators, stage_workers=stage_workers, threads=threads)
        reading = reading_of(spec, tables | parts, put=_put_at(access))
        job = spec_for_gateway(reading, _folders_of(spec), access)
        with GatewayClient(access.url, access.key) as client:
            fetching = log.info if progress is False else tell_fetch
            job_id = client.submit(job, idempotency_key=uuid.uuid4().hex, fetching=fetching).job_id
        shown = shown_for(progress)
        shown.began(f"{job_id} is at {page_address(access.url, '', job_id=job_id)}")
        return Run(job_id, run_root=Path(access.run_root), access=access, shown=shown)
    if key:
        raise InvalidInput("has no effect without a gateway", field="key", cure="set url=, or leave key out")
    run_root = Path(run_dir) if run_dir is not None else new_run_root("train")
    with nothing_left_of_what_is_refused(run_root):
        reading = reading_of(spec, tables | parts, put=put_below(inputs_below(run_root)))
        root = Path(model_root) if model_root is not None else None
        if isinstance(spec, str | os.PathLike):
            root = own_root_of(Path(spec), root)
        job, extra_roots = placed(reading, _folders_of(spec), model_root=root)
        options = options_of_job(
            job,
            run_root=run_root,
            model_root=root,
            extra_roots=extra_roots,
            generators=generators,
            stage_workers=stage_workers,
            threads=threads,
        )
        return on_own_stack(job, options, shown=shown_for(progress))


def attach(
    job_id: str,
    *,
    url: str = "",
    key: str = "",
    run_dir: str | os.PathLike[str] | None = None,
    model_root: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Run:
    """Finds a job by its id: at the gateway that `url`, the variables or a stack in `run_dir` (runs/) say, or in the
    folder that its stack has left there.

        run = onbeat.attach("job-848393f4f003", run_dir="runs/train-20261126-063000")

    Raises NotFound or InvalidInput where it is in none of them.
    """
    root = Path(model_root) if model_root is not None else None
    run_root = run_root_from(os.environ, Path(run_dir) if run_dir is not None else None)
    if not url and RunFolder(run_root.resolve(), job_id).audit.exists():
        return Run(job_id, run_root=run_root, model_root=root, shown=shown_for(progress))
    access = gateway_access(os.environ, gateway=url or None, api_key=key or None, run_dir=run_root, job=job_id)
    with GatewayClient(access.url, access.key) as client:
        client.job(job_id)
    return Run(job_id, run_root=Path(access.run_root), access=access, model_root=root, shown=shown_for(progress))


def _folders_of(spec: Any) -> list[Path]:
    """Returns where relative paths of a job may start: the folder of the spec's file, then that of the program.

    A notebook has no file; its folder is the current one.
    """
    folders: list[Path] = []
    if isinstance(spec, str | os.PathLike):
        folders.append(Path(spec).parent)
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    if program is not None:
        folders.append(Path(program).parent)
    return folders


def _named_gateway(url: str, key: str, run_dir: str | os.PathLike[str] | None) -> GatewayAccess | None:
    """None where a stack is to be started; a stack that was killed leaves its file behind."""
    root = Path(run_dir) if run_dir is not None else None
    stack = read_stack_file(root) if root is not None else None
    runs = stack is not None and psutil.pid_exists(stack.pid)
    if not url and not os.environ.get(f"{PREFIX}GATEWAY_URL") and not runs:
        return None
    return gateway_access(os.environ, gateway=url or None, api_key=key or None, run_dir=root)


def _refuse_own(**options: object) -> None:
    """Raises InvalidInput for an option of a stack that is not started."""
    for name, value in options.items():
        if value is not None:
            raise InvalidInput(
                "has no effect with a gateway: it is for the stack that train starts without one",
                field=name,
                cure="leave it out",
            )


def _put_at(access: GatewayAccess) -> Put:
    """To a stack of this machine and user the program's rows and functions go by files, and to no other."""
    stack = read_stack_file(Path(access.run_root))
    is_here = stack is not None and same_origin(stack.gateway_url, access.url)
    if is_here:
        return put_below(inputs_below(Path(access.run_root)))
    return put_nowhere


def reading_of(spec: Any, tables: Mapping[str, Any], *, put: Put) -> SpecReading:
    """Reads the spec of a job.

    Args:
        spec: A spec, its tables, or the path of its file; None for the defaults.
        tables: Keys of a spec, and `tools`, which go before those of `spec`. A table that is None changes nothing.
        put: Puts a file among the job's inputs, and returns its path.
    """
    if isinstance(spec, JobSpec):
        values = msgspec.to_builtins(spec)
    elif spec is None or isinstance(spec, Mapping):
        values = dict(spec or {})
    else:
        values = read_toml(Path(spec))
    changes = {name: value for name, value in tables.items() if value is not None}
    if isinstance(changes.get("model"), str | os.PathLike):
        changes["model"] = {"path": os.fspath(changes["model"])}
    for name, table in PARTS.items():
        # Rows, functions and classes may stand in the spec's own tables as well.
        for place in (values, changes):
            if place.get(name) is not None:
                place[name] = table(place[name], put)
    if "tools" in changes:
        changes["environment"] = _with_tools(changes.get("environment", {}), tools_table(changes.pop("tools"), put))
    if "environment" in changes:
        values["environment"] = _left_of(values.get("environment"), changes["environment"])
    return read_spec({"name": Path(sys.argv[0]).stem or "python"} | _merged(values, changes))


def _with_tools(changes: Mapping[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    if "name" in changes:
        raise InvalidInput(
            "have no effect: they belong to the built-in environment, and another environment is named",
            field="tools",
            cure="make them tools of that environment, or leave it out",
        )
    return _merged(table, changes)


def _left_of(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the keys that a spec's environment keeps next to a new one.

    The file of the new one is another, and its parameters may be.
    """
    if old is None or "name" not in new:
        return old
    gone = {"file", "source"} if new["name"] in (old.get("name"), TOOLS_NAME) else {"file", "source", "params"}
    return {key: value for key, value in old.items() if key not in gone}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes tables key by key; one of another `type` takes the place of the whole."""
    merged = dict(values)
    for key, new in changes.items():
        old = merged.get(key)
        merged[key] = new
        if isinstance(old, Mapping) and isinstance(new, Mapping) and new.get("type") in (None, old.get("type")):
            merged[key] = _merged(old, new)
    return merged
