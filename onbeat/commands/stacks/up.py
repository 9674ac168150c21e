"""`onbeat up`: the embedded stack in the foreground, or as a process of its own session until its stack.json says that
it is up. A second one in the same run folder is refused, and prints how to reach the first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from contracts.engines import VARIABLE, VllmOptions
from contracts.errors import Conflict, OnbeatError, Unavailable
from contracts.settings import engine_from
from onbeat.base.process.folders import make_private, writable_run_dir
from onbeat.base.process.waiting import Waiting
from onbeat.commands import options
from onbeat.doctor.cards import cards_of, check_cards, run_nvidia_smi, shared_engine, torch_build
from onbeat.stack.access import (
    FILE_NAME,
    StackFile,
    read_roots,
    read_stack_file,
    run_dir_flag,
)
from onbeat.stack.devices.device import device_in_words
from onbeat.stack.devices.gpus import GpuPlan, gpu_plan
from onbeat.stack.folder_lock import FolderLock
from onbeat.stack.options import StackOptions, stack_settings, threads_from
from onbeat.stack.stack import LOG, EmbeddedStack
from onbeat.terminal.output import BAD_INPUT, console_for, emit, emit_error, tell, tell_page

TICK_S = 0.25
DEMO_SPEC = Path("configs/demo.toml")


def up(
    generators: options.GeneratorCount = None,
    stage_workers: options.StageWorkers = None,
    consumers: options.Consumers = 1,
    profile: options.Profile = None,
    run_dir: options.RunDir = None,
    port: Annotated[int, typer.Option("--port", help="Port of the gateway; 0 takes a free one.")] = 0,
    threads: options.Threads = None,
    model_root: options.ModelRoot = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Trainer and vLLM on GPUs: on card 0, in turns, where no cards are named."),
    ] = False,
    trainer_gpus: Annotated[
        str,
        typer.Option("--trainer-gpus", metavar="N,…", help="Cards of the trainer's ranks, by nvidia-smi's numbers."),
    ] = "",
    generator_gpus: Annotated[
        str, typer.Option("--generator-gpus", metavar="N,…", help="Cards of the generators. [those of the trainer]")
    ] = "",
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Serve each process's metrics, and write prometheus_targets.json.")
    ] = False,
    tasks: Annotated[
        bool,
        typer.Option(
            "--tasks/--no-tasks", help="Run a worker of tasks (exports, checks, backups) and the clock, or neither."
        ),
    ] = True,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Leave it running: `onbeat jobs` shows its jobs, `onbeat down` ends it."),
    ] = False,
    json_output: options.Json = False,
) -> None:
    """Run the embedded stack in the foreground until Ctrl-C; its jobs go on at the next start."""
    stack_profile, num_generators = options.profile_and_count(profile, generators)
    from_environment = options.with_current_folder(stack_settings(os.environ), model_root)
    engine = engine_from(os.environ)
    gpus: GpuPlan | None = None
    if gpu or trainer_gpus or generator_gpus:
        from_environment = replace(from_environment, device="cuda")
        if VARIABLE not in os.environ and stack_profile is None:
            engine = VllmOptions()
            if not generator_gpus or generator_gpus == trainer_gpus:
                engine = shared_engine(engine, cards_of(run_nvidia_smi))
        gpus = gpu_plan(
            trainer=trainer_gpus,
            generators=generator_gpus,
            num_generators=1 if num_generators is None else num_generators,
            engine=engine,
        )
        for warning in check_cards(gpus.cards, engine, torch_build()):
            console_for(json_output=json_output).print(warning, soft_wrap=True, markup=False)
    stack_options = StackOptions(
        run_root=run_dir or Path(from_environment.run_root),
        model_root=options.model_root_or_default(model_root),
        generators=1 if num_generators is None else num_generators,
        stage_workers=stage_workers or 0,
        consumers=consumers,
        tasks=tasks,
        profile=stack_profile,
        threads=threads_from(os.environ, threads),
        gateway_port=port,
        metrics=metrics,
        settings=from_environment,
        engine=engine,
        gpus=gpus,
    )
    console = console_for(json_output=json_output)
    try:
        if detach:
            _up_in_background(stack_options, console, json_output=json_output)
        else:
            _up_in_foreground(EmbeddedStack(stack_options), console, json_output=json_output)
    except Conflict as error:
        running = _running_stack(stack_options.run_root)
        if running is None:
            raise
        _tell_running_stack(running, stack_options.run_root, error, json_output=json_output)
        raise typer.Exit(BAD_INPUT) from error


def _up_in_background(stack_options: StackOptions, console: Console, *, json_output: bool) -> None:
    """Starts the stack as a process of its own session, and prints how to reach and end it."""
    with console.status("starting redis and every other process"):
        started = start_detached(sys.argv[1:], stack_options.run_root)
    flag = run_dir_flag(os.environ, stack_options.run_root)
    if json_output:
        emit(
            {
                "gateway_url": started.gateway_url,
                "stack_file": str(_stack_file(stack_options)),
                "model_root": str(stack_options.model_root.resolve()),
                "pid": started.pid,
            }
        )
    console.print(f"onbeat is up, process {started.pid}   stop it: onbeat down{flag}", soft_wrap=True)
    console.print(f"model root {stack_options.model_root.resolve()}", markup=False, soft_wrap=True)
    console.print(f"device {_device(stack_options)}", markup=False, soft_wrap=True)
    tell_page(console, started.gateway_url, started.api_key)


def _up_in_foreground(stack: EmbeddedStack, console: Console, *, json_output: bool) -> None:
    """Runs the stack in this process until Ctrl-C."""
    try:
        with console.status("starting redis and every other process"):
            stack.start()
        where = {
            "gateway_url": stack.gateway_url,
            "stack_file": str(_stack_file(stack.options)),
            "model_root": str(stack.options.model_root.resolve()),
            "pids": stack.pids,
        }
        tell(where, _stack_panel(stack), json_output=json_output)
        tell_page(console, stack.gateway_url, stack.api_key)
        while True:
            stack.tick()
            time.sleep(TICK_S)
    except KeyboardInterrupt:
        console.print("stopping every process")
    finally:
        stack.stop()


def _running_stack(run_root: Path) -> StackFile | None:
    """Returns the file of the stack that another process runs in a folder; None where none runs."""
    stack = read_stack_file(run_root)
    if stack is None or stack.pid == os.getpid() or not psutil.pid_exists(stack.pid):
        return None
    return stack


def _tell_running_stack(stack: StackFile, run_root: Path, error: OnbeatError, *, json_output: bool) -> None:
    """Prints how to reach the stack that runs in the folder already, and why no second one was started.

    Args:
        stack: The file of the running stack.
        run_root: The folder of its runs.
        error: The refusal of the second stack.
        json_output: Prints one object, with the refusal and the facts.
    """
    roots = read_roots(run_root)
    extra_roots = [] if roots is None else [folder for folder in roots.extra_roots.split(os.pathsep) if folder]
    facts = {
        "gateway_url": stack.gateway_url,
        "run_dir": str(run_root.resolve()),
        "model_root": "" if roots is None else roots.model_root,
        "extra_roots": extra_roots,
        "pid": stack.pid,
    }
    if json_output:
        emit_error(error, json_output=True, facts={"stack": facts})
        return
    rows = [
        ("gateway", stack.gateway_url),
        ("key", f"in {run_root / FILE_NAME}"),
        ("run dir", facts["run_dir"]),
        ("model root", facts["model_root"]),
        *(("and below", folder) for folder in extra_roots),
        ("process", str(stack.pid)),
    ]
    console = console_for(json_output=False)
    for label, value in rows:
        # Each on a line that isn't wrapped, so that a path can be copied.
        console.print(Text.assemble((f"{label:<12}", "dim"), value), soft_wrap=True)
    tell_page(console, stack.gateway_url, stack.api_key)
    emit_error(error, json_output=False)


def _stack_panel(stack: EmbeddedStack) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("gateway", stack.gateway_url)
    table.add_row("key", Text(f"in {_stack_file(stack.options)}, for the commands of this folder"))
    table.add_row("processes", "   ".join(f"{name} {pid}" for name, pid in sorted(stack.pids.items())))
    table.add_row("logs", Text(str(stack.logs)))
    table.add_row("model root", Text(str(stack.options.model_root.resolve())))
    for folder in filter(None, stack.options.settings.extra_roots.split(os.pathsep)):
        table.add_row("and below", Text(folder))
    table.add_row("device", Text(_device(stack.options)))
    table.add_row("try", f"onbeat submit {DEMO_SPEC} --wait{run_dir_flag(os.environ, stack.options.run_root)}")
    table.add_row("stop", "Ctrl-C")
    return Panel(table, title="onbeat is up", title_align="left", border_style="green", padding=(1, 2))


def _device(stack_options: StackOptions) -> str:
    return device_in_words(stack_options.settings, is_chosen=bool(os.environ.get("ONBEAT_DEVICE")))


def _stack_file(stack_options: StackOptions) -> Path:
    return stack_options.run_root / FILE_NAME


DETACH = ("--detach", "-d")
UP_WITHIN_S, STOPS_WITHIN_S = 180.0, 60.0
POLL_S = 0.1
MAX_SAID_BYTES = 64 * 1024
"""The end of a log that is looked at for the reason why a stack ended."""


def start_detached(arguments: Sequence[str], run_root: Path) -> StackFile:
    """Starts a stack in a process of its own, and returns its file once it is up.

    Args:
        arguments: Of the command line that asks for it, `up` first.
        run_root: The folder of the stack's runs.

    Raises:
        Conflict: A stack runs in the folder.
        Unavailable: The stack ended; the error has its last line.
        DeadlineExceeded: The stack wasn't up in time, and was ended.
    """
    path = run_root / LOG
    with writable_run_dir():
        make_private(path.parent)
        # A folder that has a stack is refused here, by a Conflict, before a process is started.
        lock = FolderLock(run_root)
        lock.take()
        lock.release()
        log = path.open("ab")
    with log:
        at = log.tell()
        # Without --json the last line of its log is the reason why it ended.
        attached = [argument for argument in arguments if argument not in (*DETACH, "--json")]
        command = [sys.executable, "-m", "onbeat", *attached]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=os.environ
        )
    waiting = Waiting("the stack to be up", deadline_s=UP_WITHIN_S, cure=f"see {path.parent}")
    try:
        while (stack := read_stack_file(run_root)) is None or stack.pid != process.pid:
            if process.poll() is not None:
                with path.open("rb") as written:
                    written.seek(max(at, written.seek(0, os.SEEK_END) - MAX_SAID_BYTES))
                    output = written.read(MAX_SAID_BYTES).decode(errors="replace").strip()
                raise Unavailable(output.rpartition("\n")[2].removeprefix("onbeat: ") or "the stack ended")
            waiting.poke()
            time.sleep(POLL_S)
    except BaseException:
        process.terminate()
        process.wait(STOPS_WITHIN_S)
        raise
    return stack
