"""`onbeat fetch`: brings models and data sets of the hub onto this host, before a job or in place of its gateway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from msgspec import UNSET

from contracts.encoding.wire import convert
from contracts.errors import InvalidInput, Unavailable
from contracts.hub_names import is_hub_name, read_hub_files, read_hub_name
from contracts.settings import StackSettings, settings_from
from onbeat.client.spec_file import load_spec
from onbeat.commands import options
from onbeat.hub.events import Fetched
from onbeat.hub.fetching import fetch as fetch_from_hub
from onbeat.hub.fetching import is_offline, progress_text
from onbeat.hub.spec_names import hub_requests
from onbeat.hub.store import HubRequest, HubStore
from onbeat.terminal.output import console_for, tell

SPEC_SUFFIX = ".toml"
MB = 10**6


def fetch(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME…",
            help="hub:OWNER/NAME of a model, hub:datasets/OWNER/NAME of a data set, each with @REVISION for another "
            "than main; or a job spec, whose names are fetched.",
        ),
    ],
    config: Annotated[
        str, typer.Option("--config", help="Configuration of a data set. [the only one, or default]")
    ] = "",
    splits: Annotated[
        list[str] | None, typer.Option("--split", help="Split of a data set; may be repeated. [train]")
    ] = None,
    settings: options.Settings = None,
    json_output: options.Json = False,
) -> None:
    """Fetch models and data sets of the Hugging Face hub: jobs of this host then find them without a network."""
    requests = _requests(names, config, splits or [], settings or [])
    stack = settings_from(os.environ)
    console = console_for(json_output=True)
    fetched = []
    for request in requests:
        with console.status(f"{request.name}: the hub is asked") as line:
            fetched.append(
                _there_already(request, stack)
                if is_offline(os.environ)
                else fetch_from_hub(
                    request, stack, advance=lambda event, of=request: line.update(f"{of.name}: {progress_text(event)}")
                )
            )
    shown = "\n".join(_line(result) for result in fetched)
    tell({"fetched": fetched}, shown, json_output=json_output)


def _requests(names: list[str], config: str, splits: list[str], changes: list[str]) -> list[HubRequest]:
    """Returns what the arguments ask for, in their order."""
    requests: list[HubRequest] = []
    for text in names:
        if text.endswith(SPEC_SUFFIX):
            of_spec = hub_requests(load_spec(Path(text), changes))
            if not of_spec:
                raise InvalidInput("names nothing of the hub", field=text, cure='write path = "hub:OWNER/NAME" in it')
            requests += of_spec.values()
            continue
        if not is_hub_name(text):
            cure = f"write it as hub:{text}, or as hub:datasets/{text} of a data set; or name a spec, {SPEC_SUFFIX}"
            raise InvalidInput(f"`{text}` is no name of the hub", field="NAME", cure=cure)
        files = read_hub_files(text)
        if files is not None:
            name, config_of_files, split = files
            requests.append(convert({"name": name, "config": config_of_files, "splits": [split]}, HubRequest))
            continue
        name = read_hub_name(text, kind=None, field="NAME")
        if name.kind == "model" and (config or splits):
            raise InvalidInput(
                f"applies to data sets, and {name} is a model",
                field="--config" if config else "--split",
                cure=f"write {text.replace('hub:', 'hub:datasets/')} for a data set",
            )
        parts = {"config": config or UNSET, "splits": splits or ["train"]} if name.kind == "dataset" else {}
        requests.append(convert({"name": name, **parts}, HubRequest))
    return requests


def _there_already(request: HubRequest, settings: StackSettings) -> Fetched:
    """Returns what was fetched earlier. Raises Unavailable where that isn't there."""
    store = HubStore(settings.hub_root_path)
    commit = store.commit_of(request.name)
    if commit is None or not store.has(request.at_commit(commit)):
        raise Unavailable(f"{request.name} isn't fetched, and HF_HUB_OFFLINE is set", cure="unset it to fetch")
    at_commit = request.at_commit(commit)
    return Fetched(request=at_commit, folders=tuple(map(str, store.folders(at_commit))), num_bytes=0, is_new=False)


def _line(result: Fetched) -> str:
    what = f"fetched, {result.num_bytes / MB:,.1f} MB" if result.is_new else "is there"
    return "\n".join(f"{result.request.name}  {what}  {folder}" for folder in result.folders)
