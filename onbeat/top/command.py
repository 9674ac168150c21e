"""`onbeat top`: all of a stack on one screen, once or live."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from onbeat.commands import options
from onbeat.terminal.output import console_for, emit
from onbeat.top.keyboard import DOWN, QUIT, UP, keyboard
from onbeat.top.look import Look, TopReader, TopWatch
from onbeat.top.view import KEYS, screen

FRAME_S = 0.25


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look, and end.")] = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Show all jobs, generators, streams and alerts on one screen, live."""
    console = console_for(json_output=False)
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        reader = TopReader(client)
        look = reader.look()  # a gateway that is away, or refuses the key, is told in one line
        if json_output:
            emit(look)
        elif once or not console.is_terminal:
            console.print(screen(look, chosen=0, now_s=look.at_s, url=client.url))
        else:
            _watch(reader, look, console, client.url)


def _watch(reader: TopReader, look: Look, console: Console, url: str) -> None:
    watch, chosen = TopWatch(reader), 0
    watch.newest = look
    watch.start()
    with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while watch.error is None:
            look = watch.newest or look
            chosen = max(0, min(chosen, len(look.jobs) - 1))
            shown = screen(look, chosen=chosen, now_s=time.time(), url=url, away=watch.away, keys=KEYS)
            live.update(shown, refresh=True)
            match keys.pressed(FRAME_S):
                case key if key == QUIT:
                    break
                case key if key == UP:
                    chosen -= 1
                case key if key == DOWN:
                    chosen += 1
    watch.close()
    if watch.error is not None:
        raise watch.error
