"""Flags that several commands share, and the ids of jobs."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from msgspec.structs import replace

from contracts.encoding.names import check_job_id
from contracts.encoding.wire import convert
from contracts.errors import InvalidInput, OnbeatError, Refusal, SpecRefused
from contracts.jobs import JobState, ResumeRequest
from contracts.rewards import OnUnscorable
from contracts.settings import StackSettings, settings_from
from contracts.spec.job import JobSpec
from contracts.spec.reading import SpecReading, with_values
from contracts.spec.rules import judged, refusals_of
from contracts.spec.trainer import MOST_WIDER_BITS
from onbeat.base.http.outgoing import make_client
from onbeat.base.shipped import SPECS, is_shipped, shipped_root
from onbeat.client.gateway import GatewayClient
from onbeat.stack.access import GatewayAccess, gateway_access, read_roots, read_stack_file, same_origin, with_roots
from onbeat.stack.profile import StackProfile, load_profile
from onbeat.stack.spec_paths import STACK_CURE, PathSearch

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
Gateway = Annotated[str | None, typer.Option("--gateway", metavar="URL", help="Address of the gateway.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Bearer key of the gateway.")]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Run folder of the stack; holds stack.json. [runs]")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change one key of the spec; may be repeated."),
]
Schedule = Annotated[
    str | None, typer.Option("--schedule", help="periodic, synchronous, colocated, delayed or bounded.")
]
MaxPolicyLag = Annotated[
    int | None,
    typer.Option("--max-policy-lag", metavar="K", help="Versions that delayed and bounded may be behind, 1 or more."),
]
Correction = Annotated[
    str | None,
    typer.Option("--correction", help="tis, icepop, decoupled_ppo or none, for samples of an older version."),
]
Iterations = Annotated[int | None, typer.Option("--iterations", help="Optimizer steps.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of prompts and samples.")]
OnUnscorableScores = Annotated[
    list[str] | None,
    typer.Option(
        "--on-unscorable",
        metavar="COMPONENT=SCORE",
        help="What completions get that a reward component can't score: a number, or fail; may be repeated.",
    ),
]
OnFailureScores = Annotated[
    list[str] | None,
    typer.Option(
        "--on-failure",
        metavar="NAME=SCORE",
        help="What completions get that the environment (its name is environment) or a stage can't judge: a number, or "
        "fail; may be repeated.",
    ),
]
WiderSums = Annotated[
    int | None,
    typer.Option(
        "--wider-sums",
        metavar="BITS",
        min=1,
        max=MOST_WIDER_BITS,
        help="Sums take gradients 2**BITS times as large, from the first iteration that isn't trained; for a job that "
        "ended with a gradient beyond their range.",
    ),
]
Generators = Annotated[int, typer.Option("--generators", help="Generator processes.")]
GeneratorCount = Annotated[
    int | None, typer.Option("--generators", help="Generator processes. [1 or 2, or the profile's]")
]
StageWorkers = Annotated[
    int | None,
    typer.Option(
        "--stage-workers", help="Processes that serve stages of Onbeat's own. [up: 0; else 1 where the job has any]"
    ),
]
Consumers = Annotated[
    int, typer.Option("--consumers", metavar="N", help="Trainer processes: so many jobs are trained at a time.")
]
Profile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Stack profile: which engines the generators have. [transformers]"),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Compute threads of each process. [cores shared among them]")
]
ModelRoot = Annotated[
    Path | None, typer.Option("--model-root", metavar="DIR", help="Where relative model paths of a spec start.")
]

log = logging.getLogger(__name__)

WITHIN_S = 1.0
NUM_JOBS = 100


def job_ids(incomplete: str) -> list[tuple[str, str]]:
    """Returns (job id, its state) of the newest jobs, for `onbeat watch <TAB>`; [] where no gateway answers in time.

    zsh evaluates what it is given here, so nothing is in it that a user or a gateway may choose freely, like a name.
    """
    try:
        access = gateway_access(os.environ, gateway=None, api_key=None, run_dir=None)
        with make_client(access.url, headers={"Authorization": f"Bearer {access.key}"}, timeout=WITHIN_S) as http:
            answer = http.get("/v1/jobs", params={"limit": NUM_JOBS})
        jobs = [(check_job_id(job["job_id"]), JobState(job["state"]).value) for job in answer.json()["jobs"]]
    except (OnbeatError, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return []
    return [(job_id, state) for job_id, state in jobs if job_id.startswith(incomplete)]


Job = Annotated[str, typer.Argument(metavar="JOB", help="Job id; `onbeat jobs` lists them.", autocompletion=job_ids)]


def stated_scores_from(texts: Sequence[str], flag: str, *, e_g: str) -> dict[str, OnUnscorable]:
    """`math_verify=0` → {"math_verify": 0.0}. Raises InvalidInput that names the flag."""
    changes: dict[str, OnUnscorable] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise InvalidInput(f"`{text}` is not NAME=SCORE", field=flag, cure=f"write it as {e_g}")
        try:
            changes[name] = "fail" if value == "fail" else float(value)
        except ValueError as error:
            raise InvalidInput(
                f"`{value}` is neither fail nor a number", field=flag, cure="write it as NAME=fail or NAME=0.0"
            ) from error
    key = flag.removeprefix("--").replace("-", "_")
    return getattr(convert({key: changes}, ResumeRequest), key)


def model_root_or_default(chosen: Path | None) -> Path:
    """Takes the flag, ONBEAT_MODEL_ROOT, the working folder if it has configs/, or the root of the shipped files."""
    if chosen is not None:
        return chosen
    from_environment = os.environ.get("ONBEAT_MODEL_ROOT")
    if from_environment:
        return Path(from_environment)
    here = Path.cwd()
    if (here / SPECS).is_dir():
        return here
    return shipped_root()


def own_root_of(spec: Path, chosen: Path | None) -> Path | None:
    """Returns the model root that a spec has by itself: a shipped one trains a shipped model.

    That holds also in a folder that has a configs/ of its own without that model.

    Args:
        spec: The job's file, as it was named.
        chosen: What --model-root says, which counts first; None where it isn't given.
    """
    if chosen is None and not os.environ.get("ONBEAT_MODEL_ROOT") and is_shipped(spec):
        return shipped_root()
    return chosen


def model_root_for(spec: Path, chosen: Path | None) -> Path:
    """Returns the model root of a stack that is started for one job. The arguments are those of `own_root_of`."""
    return model_root_or_default(own_root_of(spec, chosen))


def with_current_folder(settings: StackSettings, chosen: Path | None) -> StackSettings:
    """Returns the settings of `onbeat up` with the folder in which it is started among the extra roots.

    So specs next to each other find their files, as in any program. A home folder, or one around it, is not opened to
    the stack's clients, and neither is anything where a flag or ONBEAT_MODEL_ROOT names the model root.

    Args:
        settings: From the environment.
        chosen: The model root of the flag.
    """
    here = Path.cwd().resolve()
    is_open = chosen is None and not os.environ.get("ONBEAT_MODEL_ROOT")
    if not is_open or Path.home().resolve().is_relative_to(here) or here.is_relative_to(model_root_or_default(None)):
        return settings
    return replace(settings, extra_roots=os.pathsep.join(filter(None, (settings.extra_roots, str(here)))))


def with_run_roots(settings: StackSettings, run_root: Path, chosen: Path | None) -> StackSettings:
    """Returns the settings with the roots by which the jobs of a run folder name their models.

    Args:
        settings: Of this process.
        run_root: The folder of the runs.
        chosen: The flag, which counts first.
    """
    return with_roots(settings, run_root, chosen, default=model_root_or_default(None))


def spec_for_gateway(
    reading: SpecReading,
    folders: Sequence[Path],
    access: GatewayAccess,
    *,
    typed: Collection[str] = (),
    left: Collection[str] = (),
) -> JobSpec:
    """Returns the spec for a gateway, with its relative paths found by their author's folders.

    Args:
        reading: The spec as far as it can be read.
        folders: Where a relative path may start; the current folder comes after them.
        access: The gateway. At one of another machine or user the paths stay: they are below the model root there.
        typed: Keys whose path was typed at the command line, and so starts at the current folder first.
        left: Paths that the stack's jobs have already; they stay.

    Raises:
        SpecRefused: A key is wrong, the spec breaks rules, or a path is in none of the folders, nor below the stack's
            model root. With these come the refusals of the gateway, which is asked at once.
    """
    search = _search_at(access, folders, typed=typed, left=left)
    places: dict[str, str] = {}
    nowhere: list[Refusal] = []
    if search is not None and reading.spec is not None:
        places, nowhere = search.look(reading.spec)
    refusals = [*refusals_of(reading), *nowhere]
    if refusals:
        # The gateway says the same of a wrong key and of a path, in other words where it is another version.
        fields = {refusal.field for refusal in (*reading.refusals, *nowhere)}
        theirs = _refusals_at(access, with_values(reading.plain, places))
        others = [refusal for refusal in theirs if refusal not in refusals and refusal.field not in fields]
        raise SpecRefused([*refusals, *others])
    spec = reading.whole
    return spec if search is None else search.resolve(spec)


def _search_at(
    access: GatewayAccess, folders: Sequence[Path], *, typed: Collection[str], left: Collection[str]
) -> PathSearch | None:
    """Returns the search for a stack of this machine and user; None for another one."""
    run_root = Path(access.run_root)
    stack = read_stack_file(run_root)
    roots = read_roots(run_root)
    if stack is None or roots is None or not same_origin(stack.gateway_url, access.url):
        return None
    here = Path.cwd()
    return PathSearch(
        folders=(*folders, here),
        model_root=Path(roots.model_root),
        typed=dict.fromkeys(typed, here),
        left=left,
        cure=STACK_CURE,
    )


def _refusals_at(access: GatewayAccess, values: Any) -> Sequence[Refusal]:
    """Returns what a gateway refuses of a spec; () where it can't be asked: the spec is refused without it, too."""
    try:
        with client_for(access) as client:
            return client.check(values)
    except OnbeatError as error:
        log.warning("the gateway doesn't say what else it would refuse: %s", error)
        return ()


def placed(reading: SpecReading, folders: Sequence[Path], *, model_root: Path | None) -> tuple[JobSpec, list[Path]]:
    """Finds the files that a spec names, for a stack of its own.

    Args:
        reading: The spec as far as it can be read.
        folders: Where a relative path may start: the spec's, the program's. The current folder comes after them, and
            the model root last; one that is given comes first.
        model_root: The model root that is given.

    Returns:
        The spec with the paths, and the folders, other than the model root, that have some of them.

    Raises:
        SpecRefused: A key is wrong, the spec breaks rules, or a path is in none of the folders.
    """
    first = [] if model_root is None else [model_root]
    root = model_root_or_default(model_root)
    search = PathSearch(folders=(*first, *folders, Path.cwd()), model_root=root)
    refusals = refusals_of(reading)
    if reading.spec is not None:
        refusals += search.look(reading.spec)[1]
    if refusals:
        raise SpecRefused(refusals)
    return search.resolve(reading.whole), search.found_below


def profile_and_count(path: Path | None, generators: int | None) -> tuple[StackProfile | None, int | None]:
    """Returns what the flags say about generators, and how many they are. Raises InvalidInput where both do."""
    if path is None:
        return None, generators
    if generators is not None:
        raise InvalidInput(
            "the profile sets the number of generators", field="--generators", cure="edit `count` in the profile"
        )
    profile = load_profile(path)
    return profile, len(profile.each)


def access_from(
    gateway: str | None, api_key: str | None, run_dir: Path | None, *, job: str | None = None
) -> GatewayAccess:
    settings_from(os.environ)
    return gateway_access(os.environ, gateway=gateway, api_key=api_key, run_dir=run_dir, job=job)


def access_for(
    readings: Sequence[SpecReading], gateway: str | None, api_key: str | None, run_dir: Path | None
) -> GatewayAccess:
    """Does `access_from` for specs to submit. Where no gateway is named, those that are refused in any case are."""
    try:
        return access_from(gateway, api_key, run_dir)
    except OnbeatError:
        for reading in readings:
            judged(reading)
        raise


def client_for(access: GatewayAccess) -> GatewayClient:
    return GatewayClient(access.url, access.key)
