"""A submitted job: bytes → JobSpec, and what can be checked before a trainer is started for it.

The reward service says what it has of environments and plug-ins: it runs them, and its image may have more packages
than the gateway's. The rest (tokens, context length, large data sets, a task's parameters) needs the model
or the data: the trainer checks it first thing, and fails the job with the field's name.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import symtable
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
from fastapi import Request
from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from broker.job_store import JobStore
from contracts.encoding.json_lines import open_plain
from contracts.encoding.wire import KEY_IN_PROBLEM, changed, decode_json, encode_json
from contracts.errors import ContractViolation, EnvironmentUnavailable, InvalidInput, NotFound, Refusal, SpecRefused
from contracts.hub_names import hub_cure
from contracts.jobs import ResumeRequest
from contracts.known_tasks import INSTALL
from contracts.monitor import ConsumerSeen, GeneratorSeen
from contracts.reward_arguments import ARGUMENTS, COMPLETIONS, OF_TRL, arguments_of, columns_among
from contracts.rewards import (
    NO_NUMBER,
    UP_TO_LUCK,
    PluginReward,
    RegexReward,
    RewardComponent,
    RewardItem,
    RewardPackages,
    RewardRequest,
    RewardResponse,
    Unscorable,
    breakdown_names,
)
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.datasets import (
    JsonlDataset,
    RowsTable,
    SourceDataset,
    dataset_field,
    environment_field,
    with_environments,
    with_tables,
)
from contracts.spec.environment import AGENT, EnvironmentSpec, environment_at
from contracts.spec.extras import refusals_of_missing
from contracts.spec.fork import fork_problem, unusable_fork
from contracts.spec.job import JobSpec
from contracts.spec.reading import SpecReading, read_json, where_read
from contracts.spec.serving import check_engines
from contracts.spec.trainer_plugins import refusals_of_absent
from gateway.hub_fetches import HubFetches
from gateway.named_files import with_file_digests, with_fork_digest
from onbeat.audit.folder import read_spec as read_spec_of
from onbeat.base.cage.helper_modules import (
    HELPER_CURE,
    PackageNextToFile,
    helpers_of,
    is_installed,
    with_helpers,
)
from onbeat.base.http.asker import asker_headers
from onbeat.base.http.bodies import JSON, media_type_of, read_body
from onbeat.base.http.outgoing import make_client
from onbeat.base.http.problems import Problem
from onbeat.base.machine_kernels import matmul_of_machine
from onbeat.data.datasets.loading import job_examples
from onbeat.data.named_files import files_of_rows
from onbeat.data.prompts.environment_prompts import check_determinism
from onbeat.data.prompts.environment_service import EnvironmentService
from onbeat.hub.spec_names import hub_requests
from onbeat.hub.spec_names import with_commits as spec_with_commits
from onbeat.scoring.patterns import takes_re2
from onbeat.weights.base_model.folder_check import check_files, check_sizes
from onbeat.weights.model_path import find_model

T = TypeVar("T")
N = TypeVar("N", PluginReward, EnvironmentSpec)
ENVIRONMENT_TIMEOUT_S = 15.0
"""The reward service may have to import the environment; a submission waits no longer."""
PLUGINS_TIMEOUT_S = 4.0
"""Longest that scoring an empty completion may take: a reward that takes longer is not refused at a submission."""
PATTERN_COMPILE_S = 2.0
"""The most that Python's `re` may take for a pattern."""
PATTERNS_TIMEOUT_S = 10.0
"""The same for all patterns of a job."""
TRIAL_TIMEOUT_S = 15.0
"""The reward service may have to start a process; a submission waits for it no longer."""
PATTERN_CURE = (
    "make it shorter; without look-around, back-references, and (?i) in front of characters beyond ASCII, it needs "
    "milliseconds"
)
INSTALL_SCORER = {"reasoning_gym": f"{INSTALL} there", "math_verify": "pip install math-verify there"}
"""Type of a reward that is scored by a package, and that package's name → how the reward service gets it."""
TRIAL = RewardItem(prompt="", completion="", reference="")
MAX_ROWS_BYTES = 4 * 2**20
MAX_SOURCE_BYTES = 65536
"""The characters that `PluginReward.source` may have, as bytes."""
IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,200}")


async def read_spec(request: Request, *, max_bytes: int) -> SpecReading:
    """Returns what can be read of a spec. Raises Problem 415, 413 and 400 where the bytes are no JSON."""
    _require_json(request)
    body = await _read_body(request, max_bytes=max_bytes)
    try:
        # In a thread: a spec with many wrong keys is read once for each of them.
        return await run_in_threadpool(read_json, body)
    except InvalidInput as error:
        raise Problem(HTTPStatus.BAD_REQUEST, error.problem, field=error.field, cure=error.cure) from error


async def read_resume(request: Request, *, max_bytes: int) -> ResumeRequest:
    """A request without a body asks for nothing but to go on. Raises Problem as `read_spec` does."""
    return await read_optional(request, ResumeRequest, max_bytes=max_bytes)


async def read_optional(request: Request, kind: type[T], *, max_bytes: int) -> T:
    """Returns the body as a record; where there is none, the record with its defaults.

    Raises Problem as `read_spec` does.
    """
    body = await _read_body(request, max_bytes=max_bytes)
    if not body:
        return kind()
    _require_json(request)
    return _decoded(body, kind)


def _require_json(request: Request) -> None:
    media_type = media_type_of(request)
    if media_type != JSON:
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"`{media_type}` is not understood", field="Content-Type", cure=JSON
        )


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return decode_json(body, kind)
    except InvalidInput as error:
        is_json = isinstance(error.__cause__, msgspec.ValidationError)
        status = HTTPStatus.UNPROCESSABLE_ENTITY if is_json else HTTPStatus.BAD_REQUEST
        raise Problem(status, error.problem, field=_field_of(error), cure=error.cure) from error


def idempotency_key(request: Request) -> str:
    """Returns "" without the header: every such request is a new job. Raises InvalidInput."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return ""
    if not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidInput("must be 1 to 200 visible ASCII characters", field="Idempotency-Key", cure="send a UUID")
    return key


def with_matmul(spec: JobSpec, settings: StackSettings) -> JobSpec:
    """Returns the spec with the library that its products are by, where it leaves `model.matmul` out.

    A bfloat16 model has none: its products are by oneDNN in any case. On a GPU the choice has no effect.
    """
    if spec.model.matmul is not UNSET or spec.model.dtype != "float32":
        return spec
    if settings.device == "cuda":
        matmul = "torch"
    elif settings.matmul == "measured":
        matmul = matmul_of_machine()
    else:
        matmul = settings.matmul
    return changed(spec, model=changed(spec.model, matmul=matmul))


def with_commits(spec: JobSpec, hub: HubFetches, *, who: str, begins: bool = True) -> JobSpec | None:
    """Returns the spec with a commit in place of each revision of the hub, once all that it names is on this host.

    Args:
        spec: A spec that the judge takes.
        hub: The fetches of this gateway.
        who: The name of the caller's key.
        begins: False fetches nothing.

    Returns:
        The spec; None where something isn't there that would be fetched.

    Raises:
        SpecRefused: A name can't be fetched, or not for this key.
        Unavailable: It isn't there yet.
    """
    requests = hub_requests(spec)
    try:
        commits = hub.commits(requests, who=who, begins=begins)
    except InvalidInput as error:
        raise SpecRefused([Refusal.of(error)]) from error
    return spec_with_commits(spec, commits) if commits is not None else None


def ask_stack(
    spec: JobSpec,
    refusals: list[Refusal],
    *,
    settings: StackSettings,
    jobs: JobStore,
    generators: Sequence[GeneratorSeen],
    consumers: Sequence[ConsumerSeen] = (),
    unread: Set[str] = frozenset(),
) -> JobSpec:
    """Adds to the judge's refusals what only the stack knows of a spec: its paths, plug-ins and live generators.

    What starts a process, reads rows or asks another service is asked only of a spec without a refusal so far.

    Args:
        spec: The spec.
        refusals: Those of the judge; this adds to them.
        settings: The gateway's.
        jobs: The jobs of this stack, which a fork may name.
        generators: The live ones.
        consumers: The live ones.
        unread: The keys of the spec without a value, as `SpecReading.unread`; of these nothing is said.

    Returns:
        The spec with the text of its rewards' files, and the digest of each other file that it names.

    Raises:
        Unavailable: A service that has to say something doesn't answer.
    """
    with _added_to(refusals, unread):
        spec = with_columns(with_sources(spec, settings))
    with _added_to(refusals, unread):
        check_paths(spec, settings, reads_rows=not refusals, unread=unread)
    with _added_to(refusals, unread):
        check_fork(spec, settings, jobs)
    with _added_to(refusals, unread):
        check_generators(spec, generators)
    with _added_to(refusals, unread):
        refusals += refusals_of_consumers(spec, consumers)
    if refusals:
        return spec
    with _added_to(refusals):
        # Once more: the text of a reward says whether it needs a reference.
        if spec.algorithm.learns_given and any(isinstance(part, PluginReward) for part in spec.reward.components):
            check_rows(spec, settings)
    with _added_to(refusals):
        check_patterns(spec, settings)
    with _added_to(refusals):
        check_scorers(spec, settings)
        check_plugins(spec, settings)
        spec = with_packages(spec, settings)
    with _added_to(refusals):
        check_environment(spec, settings)
    with _added_to(refusals):
        spec = with_fork_digest(spec, settings, jobs)
    with _added_to(refusals):
        spec = with_file_digests(spec, settings)
    return spec


def refusals_of_consumers(spec: JobSpec, consumers: Sequence[ConsumerSeen]) -> list[Refusal]:
    """Returns a refusal for each key that needs what no live consumer's trainers would have.

    Each consumer looks at its own environment. One that doesn't say what it lacks, or has, may have everything.
    """
    lacks = [consumer.lacks or () for consumer in consumers]
    offers = [consumer.offers for consumer in consumers]
    return refusals_of_missing(spec, lacks) + refusals_of_absent(spec, offers)


def check_environments(spec: JobSpec, settings: StackSettings, consumers: Sequence[ConsumerSeen]) -> None:
    """Raises SpecRefused for what neither a trainer nor the reward service could do for a job that is to go on.

    A submission has judged the same of the spec, but packages may be gone, or be others, since.

    Args:
        spec: The spec of the job.
        settings: The gateway's.
        consumers: The live ones.
    """
    refusals = refusals_of_consumers(spec, consumers)
    with _added_to(refusals):
        check_scorers(spec, settings)
        # A resume may say what a completion without a number gets, so that is no reason to refuse it.
        check_plugins(spec, settings, takes_no_number=True)
        with_packages(spec, settings)
    with _added_to(refusals):
        check_environment(spec, settings)
    if refusals:
        raise SpecRefused(refusals)


@contextmanager
def _added_to(refusals: list[Refusal], unread: Set[str] = frozenset()) -> Iterator[None]:
    """Adds bad input that is met within to the refusals, and goes on behind.

    unread: the keys of the spec without a value. What looks at one of them ends there, and refuses nothing.
    """
    try:
        with where_read(unread):
            yield
    except SpecRefused as error:
        refusals += error.refusals
    except InvalidInput as error:
        refusals.append(Refusal.of(error))


def check_paths(
    spec: JobSpec, settings: StackSettings, *, reads_rows: bool = True, unread: Set[str] = frozenset()
) -> None:
    """Raises SpecRefused for folders and files that aren't there or lack something, else InvalidInput for rows.

    Args:
        spec: The spec.
        settings: The gateway's.
        reads_rows: True looks at rows, once each file is there.
        unread: The keys of the spec without a value.
    """
    refusals: list[Refusal] = []
    with _added_to(refusals, unread):
        check_model_files(spec, settings)
    with _added_to(refusals, unread):
        for name, table in spec.tables.items():
            place = dataset_field(spec.dataset, spec.evaluation, name)
            for key, path in table.files().items():
                with _added_to(refusals):
                    check_data_file(table, path, settings, field=f"{place}.{key}")
    if refusals:
        raise SpecRefused(refusals)
    if reads_rows:
        check_rows(spec, settings)


def check_model_files(spec: JobSpec, settings: StackSettings) -> None:
    """Raises InvalidInput for a model folder that isn't there or lacks something."""
    # By itself, since a spec whose data sets can't be read is looked at, too.
    find_model(spec.model, settings.spec_root)
    tables = {dataset_field(spec.dataset, spec.evaluation, name): table for name, table in spec.tables.items()}
    chats = [f"{field}.chat" for field, table in tables.items() if table.chat is not None]
    check_files(spec.model, settings.spec_root, chat=chats[0] if chats else "")
    check_sizes(spec, settings.spec_root)


def check_data_file(table: SourceDataset, path: str, settings: StackSettings, *, field: str) -> None:
    """Raises InvalidInput for a file of rows that isn't there. field: the key that names it."""
    place = settings.spec_root.find(path, field=field)
    try:
        # Of a folder's files `folder/train` are some. Which splits a folder has, the trainer finds out.
        is_there = place.is_dir() or bool(files_of_rows(place, path)) if table.has_folders else place.is_file()
    except OSError:
        is_there = False  # there is no folder around it
    if is_there:
        return
    cure = "name a file of JSON lines that the stack can read"
    if table.has_folders:
        cure = "name a parquet or arrow file, or a folder of them"
    if hub_cure(path):
        name = path.removeprefix("datasets/")
        cure += f'; of the hub it is dataset = {{ type = "huggingface", path = "hub:{name}" }}'
    what = "file or folder" if table.has_folders else "file"
    raise InvalidInput(f"there is no {what} {path} under the model root, {settings.model_root}", field=field, cure=cure)


def check_rows(spec: JobSpec, settings: StackSettings) -> None:
    """Raises InvalidInput for wrong rows of files of JSON lines.

    Rows of more than MAX_ROWS_BYTES are the trainer's to read, and so is what isn't a JSON object a line.
    """
    tables = (spec.dataset, *spec.tables.values())
    if not all(isinstance(table, JsonlDataset) for table in tables):
        return
    paths = [path for table in spec.tables.values() for path in table.files().values()]
    places = [settings.spec_root.find(path, field="dataset") for path in paths]
    if sum(place.stat().st_size for place in places if place.is_file()) <= MAX_ROWS_BYTES:
        job_examples(spec, settings.spec_root)


def check_fork(spec: JobSpec, settings: StackSettings, jobs: JobStore) -> None:
    """Raises InvalidInput for a job to go on from that isn't there, is of another kind, or lacks the checkpoint.

    A run folder that only the trainer's host has, or an object store, is looked at there.
    """
    fork = spec.fork
    if fork is UNSET:
        return
    source = RunFolder(settings.run_root_path, fork.job)
    try:
        theirs = jobs.spec(fork.job)
    except NotFound as error:
        if not source.spec.is_file():
            raise unusable_fork(fork, source, "there is no such job") from error
        theirs = read_spec_of(source)
    problem = fork_problem(theirs, spec)
    if not problem and source.path.is_dir() and not source.checkpoint_after(fork.version - 1).is_dir():
        problem = "it has no checkpoint of it" if not settings.objects else ""
    if problem:
        raise unusable_fork(fork, source, problem)


def check_generators(spec: JobSpec, live: Sequence[GeneratorSeen]) -> None:
    """Raises InvalidInput as `check_engines` does, by what the live generators say of theirs."""
    not_reproducible = [generator.not_reproducible for generator in live]
    check_engines(
        spec,
        not_reproducible=not_reproducible,
        silent=[generator.no_kept_sets for generator in live],
        no_routes=[generator.no_routes for generator in live],
    )


def _field_of(error: InvalidInput) -> str | None:
    """A key that is unknown or missing is itself the field: `model` and `pth` make `model.pth`."""
    match = KEY_IN_PROBLEM.fullmatch(error.problem)
    return ".".join(part for part in (error.field, match["key"] if match else None) if part) or None


async def _read_body(request: Request, *, max_bytes: int) -> bytes:
    try:
        return await read_body(request, max_bytes=max_bytes, cure="a job spec names models and data by path")
    except ClientDisconnect as error:  # no client reads the answer; the counters see it
        raise Problem(HTTPStatus.REQUEST_TIMEOUT, "the body ended early", field="body") from error


log = logging.getLogger(__name__)


def check_environment(spec: JobSpec, settings: StackSettings) -> None:
    """Raises InvalidInput for an environment that isn't there, refuses its parameters, or can't be in such a job.

    A service that is away is no reason to refuse a job, which may wait for it: then its trainer finds out.
    """
    for source, environment in spec.environments.items():
        field = environment_field(spec.dataset, source)
        try:
            with environment_at(field):
                facts = EnvironmentService(settings, deadline_s=ENVIRONMENT_TIMEOUT_S).facts(environment)
        except (EnvironmentUnavailable, InvalidInput) as error:
            if error.field in (f"{field}.name", f"{field}.params"):
                raise
            log.warning(
                "the reward service can't be asked which environments it has, so a job's isn't checked: %s", error
            )
            return
        check_determinism(spec, environment, facts)


def with_sources(spec: JobSpec, settings: StackSettings) -> JobSpec:
    """Returns the spec with the text of each file that it names for a reward or an environment. Raises InvalidInput."""
    components: list[RewardComponent] = []
    for index, component in enumerate(spec.reward.components):
        if isinstance(component, PluginReward):
            field = f"reward.components[{index}]"
            component = _with_source(component, component.entry_point, settings, field, "entry_point")
        components.append(component)
    played = with_environments(
        spec.dataset,
        spec.environment,
        lambda source, environment: _environment_with_source(
            environment, settings, environment_field(spec.dataset, source)
        ),
    )
    return changed(spec, reward=changed(spec.reward, components=tuple(components)), **played)


def with_columns(spec: JobSpec) -> JobSpec:
    """Returns the spec with the columns that rewards' functions name among the metadata of the rows that they score.

    Raises InvalidInput for an argument that neither Onbeat nor the rows of a data set have.
    """
    needed: dict[str, list[str]] = {}
    for place, component in enumerate(spec.reward.components):
        if not isinstance(component, PluginReward) or not component.arguments:
            continue
        columns = columns_among(component.arguments, COMPLETIONS in component.arguments)
        scored = [name for name in spec.tables if component.scores(name or UNSET)]
        for source in scored:
            _check_columns(columns, spec.tables[source], function=component.entry_point, place=place)
            needed.setdefault(source, []).extend(columns)

    def change(source: str, table: SourceDataset) -> SourceDataset:
        if not isinstance(table, RowsTable) or not needed.get(source):
            return table
        return changed(table, metadata_columns=tuple(dict.fromkeys((*(table.metadata_columns or ()), *needed[source]))))

    dataset, evaluation = with_tables(spec.dataset, spec.evaluation, change)
    return changed(spec, dataset=dataset, evaluation=evaluation)


def _check_columns(columns: Sequence[str], table: SourceDataset, *, function: str, place: int) -> None:
    """Raises InvalidInput for a column that no row of the table can have."""
    field = f"reward.components[{place}].entry_point"
    for column in columns:
        if column in OF_TRL:
            raise InvalidInput(
                f"`{function}` needs `{column}`, which is of TRL's trainer",
                field=field,
                cure="leave the argument out, or give it a default",
            )
        if not isinstance(table, RowsTable):
            raise InvalidInput(
                f"`{function}` needs `{column}`, and this data set's rows have no columns of their own",
                field=field,
                cure=f"name some of {', '.join(ARGUMENTS)}, or give the argument a default",
            )


def _environment_with_source(environment: EnvironmentSpec, settings: StackSettings, field: str) -> EnvironmentSpec:
    """Returns an environment with the text of its file, which defines its class, or the function of its agent."""
    if environment.name != AGENT:
        return _with_source(environment, environment.name, settings, field, "name")
    return _with_source(environment, str(environment.params.get(AGENT, "")), settings, field, f"params.{AGENT}")


def _with_source(named: N, name: str, settings: StackSettings, field: str, key: str) -> N:
    """Returns a reward or an environment with the text of its file, which takes along the modules next to it.

    Args:
        named: It has a file, or is of an installed package and stays as it is.
        name: The name of the function or class in the file.
        settings: The gateway's.
        field: The place of `named` in the spec.
        key: The key of its name there.

    Raises:
        InvalidInput: The file can't be read, is no Python, lacks the name, or imports a package next to it.
    """
    if not named.file and not named.source:
        return changed(named, arguments=UNSET) if isinstance(named, PluginReward) else named
    text = _text_of(named.file, settings, f"{field}.file")
    with _valid_python(named.file, f"{field}.file"):
        names = symtable.symtable(text, named.file, "exec").get_identifiers()
        try:
            helpers = helpers_of(text, partial(_helper_text, named.file, settings, f"{field}.file"))
        except PackageNextToFile as error:
            raise InvalidInput(
                f"{named.file} imports {error.name}, a package next to it, which isn't there where it runs",
                field=f"{field}.file",
                cure=HELPER_CURE,
            ) from error
    source = with_helpers(text, helpers)
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise InvalidInput(
            f"{named.file} and what it imports ({', '.join(helpers)}) are over {MAX_SOURCE_BYTES} bytes",
            field=f"{field}.file",
            cure=HELPER_CURE,
        )
    if named.source not in ("", source):
        raise InvalidInput("differs from the text of the file", field=f"{field}.source", cure="leave it out")
    if name not in names:
        raise InvalidInput(f"{named.file} has no `{name}`", field=f"{field}.{key}")
    if isinstance(named, PluginReward):
        arguments = arguments_of(text, name)
        return changed(named, source=source, arguments=UNSET if arguments is None else arguments)
    return changed(named, source=source)


def _text_of(file: str, settings: StackSettings, field: str) -> str:
    """Reads a file of Python. Raises InvalidInput that names the field."""
    path = settings.spec_root.find(file, field=field)
    with _valid_python(file, field), open_plain(path, max_bytes=MAX_SOURCE_BYTES) as opened:
        text = opened.read(MAX_SOURCE_BYTES).decode()
        ast.parse(text, file)
    return text


@contextmanager
def _valid_python(file: str, field: str) -> Iterator[None]:
    """Raises InvalidInput for a file that can't be read, or is no Python."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{file or 'no file'}: {error.strerror}", field=field) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidInput(f"{file} is not valid Python: {error}", field=field) from error


def _helper_text(file: str, settings: StackSettings, field: str, module: str) -> str | None:
    """Reads the module of a name next to a file; None where there is none. Raises PackageNextToFile for a package."""
    helper = str(Path(file).parent / f"{module}.py")
    if settings.spec_root.find(helper, field=field).is_file():
        return _text_of(helper, settings, field)
    package = settings.spec_root.find(str(Path(file).parent / module), field=field)
    if package.is_dir() and any(package.glob("*.py")) and not is_installed(module):
        raise PackageNextToFile(module)
    return None


def check_patterns(spec: JobSpec, settings: StackSettings) -> None:
    """Raises InvalidInput for a pattern that is no regular expression, or that takes too long to compile.

    RE2 compiles in this thread what it takes, in milliseconds and bounded memory. Any other pattern is compiled by the
    reward service, in a cage under a deadline. A service that is away is no reason to refuse a job.
    """
    ends_s = time.monotonic() + PATTERNS_TIMEOUT_S
    for index, component in enumerate(spec.reward.components):
        for key, pattern in component.patterns.items():
            if not takes_re2(pattern):
                _check_in_cage(pattern, settings, field=f"reward.components[{index}].{key}", ends_s=ends_s)


def _check_in_cage(pattern: str, settings: StackSettings, *, field: str, ends_s: float) -> None:
    """ends_s: monotonic time by which all patterns of the job are to be compiled."""
    if time.monotonic() > ends_s:
        problem = f"its turn to be compiled did not come within {PATTERNS_TIMEOUT_S:g} s, since others took so long"
        raise InvalidInput(problem, field=field, cure=PATTERN_CURE)
    trial = (RegexReward(pattern=pattern),)
    failure = _tried(trial, settings, item_timeout_s=PATTERN_COMPILE_S, timeout_s=TRIAL_TIMEOUT_S)
    if failure is None:
        return
    if failure.reason == "bad_pattern":
        raise InvalidInput(failure.detail.removeprefix("pattern: "), field=field)
    if failure.reason in UP_TO_LUCK:
        problem = f"Python's `re` does not compile it within {PATTERN_COMPILE_S:g} s: {failure.detail}"
        raise InvalidInput(problem, field=field, cure=PATTERN_CURE)


def check_plugins(spec: JobSpec, settings: StackSettings, *, takes_no_number: bool = False) -> None:
    """Raises InvalidInput for a plug-in that the reward service does not have, can't import or call, or that answers an
    empty completion with what is no number, where that would fail its batch.

    A module that the call itself imports, and that isn't there, counts as well. A reward service that is away is no
    reason to refuse a job, which may wait for it: then its generators find out. takes_no_number: an answer that is no
    number is no reason either.
    """
    components = spec.reward.components
    plugins = tuple(component for component in components if isinstance(component, PluginReward))
    if not plugins:
        return
    columns = {column: "" for table in spec.tables.values() for column in getattr(table, "metadata_columns", ()) or ()}
    trial = RewardItem(prompt="", completion="", reference="", metadata=json.dumps(columns))
    failure = _tried(plugins, settings, item=trial, item_timeout_s=PLUGINS_TIMEOUT_S, timeout_s=TRIAL_TIMEOUT_S)
    if failure is None or not failure.component:
        return
    plugin = plugins[breakdown_names(plugins).index(failure.component)]
    is_no_number = failure.detail.endswith(NO_NUMBER) and plugin.on_unscorable == "fail"
    if (is_no_number and not takes_no_number) or failure.reason == "unknown_entry_point":
        place = f"reward.components[{components.index(plugin)}].entry_point"
        raise InvalidInput(failure.detail.removeprefix("entry_point: "), field=place)


def check_scorers(spec: JobSpec, settings: StackSettings) -> None:
    """Raises SpecRefused for rewards whose package isn't installed where the reward service runs.

    A service that is away is no reason to refuse a job, which may wait for it: then its generators find out.
    """
    kinds = [str(component.__struct_config__.tag) for component in spec.reward.components]
    if not INSTALL_SCORER.keys() & set(kinds):
        return
    lacks = _packages(settings).lacks or ()
    refusals = [
        Refusal(
            field=f"reward.components[{place}].type",
            problem=f"needs the package {kind}, which isn't installed where the reward service runs",
            cure=INSTALL_SCORER[kind],
        )
        for place, kind in enumerate(kinds)
        if kind in lacks
    ]
    if refusals:
        raise SpecRefused(refusals)


def with_packages(spec: JobSpec, settings: StackSettings) -> JobSpec:
    """Returns the spec with name and version of each installed package that it names for a reward.

    A reward service that is away leaves them unsaid. Raises InvalidInput where the spec names another version.
    """
    components = spec.reward.components
    if all(not isinstance(component, PluginReward) or component.source for component in components):
        return spec
    packages = _packages(settings).packages
    named: list[RewardComponent] = []
    for place, component in enumerate(components):
        package = None
        if isinstance(component, PluginReward):
            package = packages.get(component.entry_point)
        if not isinstance(component, PluginReward) or component.source or package is None:
            named.append(component)
            continue
        if component.package not in (UNSET, package):
            raise InvalidInput(
                f"the reward service has {package}",
                field=f"reward.components[{place}].package",
                cure="install the named version there, or leave package out",
            )
        named.append(changed(component, package=package))
    return changed(spec, reward=changed(spec.reward, components=tuple(named)))


def _packages(settings: StackSettings) -> RewardPackages:
    """Asks the reward service what it has, and lacks; nothing of either where it does not say."""
    headers = {"Authorization": f"Bearer {settings.reward_key}", "Accept": JSON} | asker_headers(settings)
    try:
        with make_client(settings.reward_url, headers=headers, timeout=PLUGINS_TIMEOUT_S) as http:
            answer = http.get("/v1/rewards")
        if answer.status_code != HTTPStatus.OK:
            raise ContractViolation(f"it answered {answer.status_code}")
        return decode_json(answer.content, RewardPackages)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, InvalidInput, ContractViolation) as error:
        log.warning(
            "the reward service can't be asked which packages a job's rewards need, so that isn't checked: %s", error
        )
        return RewardPackages(packages={})


def _tried(
    components: tuple[RewardComponent, ...],
    settings: StackSettings,
    *,
    item: RewardItem = TRIAL,
    item_timeout_s: float,
    timeout_s: float,
) -> Unscorable | None:
    """Scores an empty completion by them; None where that went well, or without an answer within timeout_s."""
    headers = {"Authorization": f"Bearer {settings.reward_key}", "Content-Type": JSON, "Accept": JSON}
    headers |= asker_headers(settings)
    request = encode_json(RewardRequest(components=components, items=(item,), item_timeout_s=item_timeout_s))
    try:
        with make_client(settings.reward_url, headers=headers, timeout=timeout_s) as http:
            answer = http.post("/v1/score", content=request)
        if answer.status_code != HTTPStatus.OK:
            raise ContractViolation(f"it answered {answer.status_code}")
        (result,) = decode_json(answer.content, RewardResponse).results
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, InvalidInput, ContractViolation) as error:
        log.warning("the reward service can't try a job's plug-ins and patterns now, so they aren't checked: %s", error)
        return None
    return result if isinstance(result, Unscorable) else None
