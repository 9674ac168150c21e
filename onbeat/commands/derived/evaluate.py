"""`onbeat evaluate`: held-out scores of a model, without training it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated

import typer

from onbeat.client.derived_specs import evaluating
from onbeat.client.spec_file import read_spec, read_toml
from onbeat.commands import options
from onbeat.commands.following import follow_to_end
from onbeat.terminal.output import console_for, tell_fetch
from onbeat.terminal.scores import score_table


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the model, or its name of the hub.")],
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC", help="Job spec: its held-out prompts, reward, sampling and environment.")
    ],
    settings: options.Settings = None,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Score a model on the held-out prompts of a spec, and train nothing; exit code 1 unless it comes to its end.

    Keys of the spec about training are passed over. The completions are recorded: `onbeat samples JOB` shows them.
    """
    reading = read_spec(evaluating(read_toml(spec), model), settings or [])
    access = options.access_for([reading], gateway, api_key, run_dir)
    job_spec = options.spec_for_gateway(reading, [spec.parent], access, typed=["model.path"])
    with options.client_for(access) as client:
        status = client.submit(job_spec, idempotency_key=uuid.uuid4().hex, fetching=tell_fetch)
        status = follow_to_end(client, status.job_id, json_output=json_output)
    if not json_output and status.evaluation_latest is not None:
        console_for(json_output=False).print(score_table(status.evaluation_latest))
