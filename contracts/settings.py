"""Settings of a process of the stack: environment variables of its launcher, typed, closed, the same for all.

`onbeat` sets them for the embedded stack and docker-compose.yml for its services.

    ONBEAT_… ─┬─▶ settings_from ─▶ StackSettings    every process
              └─▶ engine_from ─▶ Engine             a generator, and the launcher of a stack (contracts/engines.py)
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

from msgspec import Meta

from contracts import engines
from contracts.encoding.wire import Record, convert, one_of
from contracts.engines import ENGINES, Engine, Patience, engine_options
from contracts.errors import InvalidInput
from contracts.spec.root import DATASET_MB, SpecRoot

PREFIX = "ONBEAT_"
MAX_NAME = 64
"""Most characters of the name of a process."""
OPERATOR = "the operator"
"""The name of a service's own key, in logs and in jobs. No line of the file of keys can have it: it has a space."""
KEY_FORM = re.compile(r"[\x21-\x7e]+")
"""A bearer key: what a header can carry."""

Start = Annotated[float, Meta(gt=0.0, le=86400.0)]
"""Seconds that a process may take to start: a day at most."""
DAY_S = 86400.0
"""Seconds of a day."""
Age = Annotated[float, Meta(ge=1.0, le=36500.0)]
"""Days since a job has ended: a hundred years at most, and a day at least, since for so long an Idempotency-Key answers
a repeated submission with the job."""
SECRETS = frozenset(
    {
        "redis_url",
        "redis_password",
        "celery_url",
        "celery_password",
        "reward_key",
        "api_key",
        "cache_key",
        "judge_key",
        "metrics_key",
        "hub_token",
    }
)
"""Settings that may come as a file: ONBEAT_API_KEY_FILE names the one with the value of ONBEAT_API_KEY."""
ENGINE_OPTIONS = sorted({option for kind in ENGINES.values() for option in kind.__struct_fields__})


class StackSettings(Record, frozen=True, kw_only=True):
    """Field `redis_url` is read from ONBEAT_REDIS_URL, and so on."""

    name: Annotated[str, Meta(max_length=MAX_NAME, pattern=r"^[A-Za-z0-9._-]*$(?![\s\S])")] = ""
    """The name of this process in its log, on the page and, with random characters behind it, in ids. With "" it is the
    container's name in a container of Docker or podman, and otherwise host and process number."""
    redis_url: str = ""
    """redis://user:password@host:port/0, rediss:// by TLS, unix://user:password@/path?db=0 for a socket file, or
    redis+sentinel://user:password@host:port,host:port/NAME/0 for a primary that sentinels watch; "" without a broker.
    The user is the role's (docs/redis.md); ONBEAT_REDIS_PASSWORD, or its file, may have the password."""
    redis_replicas: Annotated[int, Meta(ge=0, le=100)] = 0
    """The number of replicas that must have a commit, and what comes before a deletion, before a process goes on. With
    0 a failover may lose what the primary confirmed."""
    celery_url: str = ""
    """The address of the same server for the messages of Celery, with a user of their own. Gateways, workers of tasks
    and the clock need it. With "" it is redis_url."""
    task_events: bool = False
    """Makes a worker of tasks report what it does over Celery's events, which Flower shows."""
    reward_url: str = "http://127.0.0.1:8100"
    """Base URL of the reward service, which scores and plays."""
    reward_key: str = ""
    """Bearer key of the reward service, which doesn't start without one; generators, trainers and the
    gateway send it."""
    gateway_url: str = "http://127.0.0.1:8000"
    """Base URL of the gateway, for the command line."""
    api_key: str = ""
    """Bearer key of the gateway, which doesn't start without one."""
    keys_file: str = ""
    """A file of more keys of the gateway, with a line for each: NAME SCOPE SHA-256. It is read again when it changes.
    "": none."""
    run_root: str = "runs"
    """Folder of run folders: weights, checkpoints, metrics. Shared by trainers and generators."""
    weight_root: str = ""
    """The folder of the published versions, which trainers and generators share, for example below /dev/shm of one
    host. With "" it is the run root. If it is another folder, a job's versions are removed when the job ends."""
    objects: str = ""
    """The object store of jobs whose hosts share no folder: s3://bucket/prefix, gs://, az://, or file:///folder.
    Accounts and endpoints come from the provider's own variables. "": none."""
    cache: str = ""
    """A folder of this host in which its processes keep what they read from the object store, each byte once. "":
    none."""
    cache_mb: Annotated[int, Meta(ge=1, le=2**30)] = 65536
    """The MiB that this folder may take. What was used longest ago is removed first."""
    cache_hosts: str = ""
    """Base URLs of other hosts that serve their caches, with commas between them. They are asked before the object
    store."""
    cache_key: str = ""
    """Bearer key of these services, which don't start without one."""
    model_root: str = "."
    """The folder in which relative model and data paths of a spec start. What a spec names has to be below it, also
    behind links."""
    extra_roots: str = ""
    """More folders below which specs may name models and data by absolute paths, separated as in PATH. Run root, weight
    root and hidden files stay closed."""
    hub_root: str = ""
    """The folder of the models and data sets that were fetched from the Hugging Face hub. With "" it is `onbeat` in
    HF_HOME, which is ~/.cache/huggingface unless it is set. Hosts that share the folder fetch once."""
    hub_fetch: Literal["", "none", "operator", "all"] = ""
    """The keys for which the gateway fetches a name of the hub that its host doesn't have. none: no key, only `onbeat
    fetch` fetches. operator: ONBEAT_API_KEY only. all: the keys of ONBEAT_KEYS_FILE, too. "": operator, or none if
    HF_HUB_OFFLINE is set, as in the images."""
    hub_mb: Annotated[int, Meta(ge=1, le=2**30)] = 262_144
    """The MiB that this folder may take. What doesn't fit isn't fetched."""
    hub_token: str = ""
    """The token of the hub, for models and data sets that are gated or private. With "" it is HF_TOKEN, or that of `hf
    auth login`. It is in no spec, no log and no error."""
    dataset_mb: Annotated[int, Meta(ge=1, le=2**24)] = DATASET_MB
    """The MiB that the rows of a job's data files may take in a trainer's memory: their texts, and 1 KiB for each row.
    They are counted while they are read, and a job with more is refused by the file's key."""
    host: str = "127.0.0.1"
    """Address that an HTTP service listens on."""
    allowed_hosts: str = ""
    """More names that a request's `Host` may have, with commas between them. localhost, ONBEAT_HOST and numeric
    addresses are always allowed; other names are refused."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port that an HTTP service listens on. 0 takes the service's default."""
    threads: Annotated[int, Meta(ge=1, le=4096)] = 1
    """The compute threads of a process: OMP_NUM_THREADS, which the launcher sets before torch is imported."""
    colocated_threads: Annotated[int, Meta(ge=0, le=4096)] = 0
    """The compute threads of a process in its turn of a colocated job. 0: all its cores, which the ranks of a trainer
    share."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device on which trainers and the transformers engine of generators compute. If it is left out, `onbeat up`,
    `demo` and `onbeat.train` take cuda if torch sees a GPU, and print which device they took; a service that is started
    by itself takes cpu."""
    matmul: Literal["measured", "torch", "onednn"] = "measured"
    """The library by which the gateway lets float32 jobs multiply that leave out model.matmul. measured: the one that
    is faster on its machine, which it measures once. torch or onednn: always that one, for trainers on machines of
    another kind."""
    held_weights_mb: Annotated[int, Meta(ge=0, le=2**30)] = 16384
    """The MiB of a transformers generator's memory for versions that arrive in the background under a lag. If a version
    doesn't fit, it is loaded between two batches."""
    peak_flops: Annotated[float, Meta(ge=0.0, le=1e21)] = 0.0
    """The floating-point operations a second that one trainer rank could do at best, for the metric mfu. 0: unknown."""
    network: str = ""
    """The interface or the range of addresses (such as 10.0.0.0/8, but no public one) over which ranks of several hosts
    talk. A consumer that has it offers its host to jobs with trainer.hosts. With "" the consumer leaves such jobs
    alone."""
    max_ranks: Annotated[int, Meta(ge=0, le=4096)] = 0
    """The most ranks of a trainer here, for a job that asks for more. 0: as many as this process may use cores."""
    max_passes: Annotated[int, Meta(ge=0, le=64)] = 0
    """The most batches that one trainer process trains at a time, each in a thread. 0: one, and two once an iteration
    is sampled, if the process has two cores and a pass takes one thread."""
    max_jobs: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    """The most jobs that the gateway keeps. At that number a new one is refused until an ended one is removed."""
    max_specs_mb: Annotated[int, Meta(ge=1, le=2**20)] = 64
    """The MiB that all specs together may take in Redis, at most 1 MiB each. A job without room is refused until an
    ended one is removed."""
    max_key_jobs: Annotated[int, Meta(ge=1, le=1_000_000)] = 250
    """The most jobs that the gateway keeps for one key of ONBEAT_KEYS_FILE. For the key of ONBEAT_API_KEY only max_jobs
    counts."""
    max_key_specs_mb: Annotated[int, Meta(ge=1, le=2**20)] = 16
    """The MiB that the specs of one such key may take in Redis."""
    max_key_streams: Annotated[int, Meta(ge=1, le=1000)] = 25
    """The most event streams that one such key may have open. All keys together may have 100."""
    keep_ended_days: Age = 36500.0
    """How many days after its end a job is removed as by `onbeat delete`, with its run folder and its trained weights.
    With 36500, a hundred years, none is removed by age."""
    verify_timeout_s: Patience = 600.0
    """The longest time of one check of an audit chain. The check hashes all weights of the job that the worker of tasks
    can read."""
    verify_kept_days: Annotated[float, Meta(ge=0.0, le=36500.0)] = 0.0
    """After this number of days the clock has every ended job verified again whose run folder is kept, some at a time.
    0: never."""
    backup_root: str = ""
    """The folder in which a worker of tasks makes a backup each night at 3:00 UTC. "": none is made."""
    backups_kept: Annotated[int, Meta(ge=1, le=10_000)] = 7
    """The number of newest backups that stay there. Older ones are removed when another is made."""
    redis_folder: str = ""
    """The folder of Redis' data, with the append-only file and the seal, for the backups of a stack whose Redis isn't
    in the run root. With "" it is `redis` in the run root, if that is there."""
    log_format: Literal["human", "json"] = "human"
    """human: lines for people. json: one object a line."""
    broker_timeout_s: Patience = 30.0
    """How long a process keeps trying to reach Redis before it ends with an error."""
    broker_full_timeout_s: Patience = 3600.0
    """How long a generator holds a finished batch while Redis is at maxmemory, before it ends with an error."""
    trainer_start_s: Start = 180.0
    """The longest time from a trainer's start until it holds its job, which is mostly imports. After it the consumer
    kills the trainer and starts another one."""
    scorer_start_s: Start = 120.0
    """The longest time in which a scorer's process starts, or imports a scorer. After it its items are errors. A scorer
    that loads a model may need more, and more reward.request_timeout_s."""
    scorer_memory_mb: Annotated[int, Meta(ge=256, le=2**24)] = 4096
    """The address space of a scorer's process in MiB, which is more than it uses: torch on a CPU takes 2048, and with
    CUDA several times that."""
    scorer_network: Literal["none", "host"] = "none"
    """none: no scorer can open a connection. host: every scorer can, as a plug-in that asks a judge over HTTP needs. A
    completion that breaks out of a scorer can connect then, too."""
    cage_readable: str = ""
    """Files and folders, with a `:` between them, that scorers and environments may read, such as data of a plug-in, a
    tokenizer, or the program of an MCP server. They may always read the interpreter, installed packages and the
    system's libraries."""
    environment_children: Annotated[int, Meta(ge=0, le=200)] = 0
    """The number of processes that play the sessions of one environment of one job. 0: as many as the service may use
    cores."""
    environment_sessions: Annotated[int, Meta(ge=1, le=2**20)] = 16384
    """The most sessions of the reward service at a time. It refuses new ones beyond that."""
    environment_reply_kb: Annotated[int, Meta(ge=1, le=2**14)] = 256
    """The longest initial observation or reply of an environment, in KiB. A longer one fails its session."""
    environment_kept_mb: Annotated[int, Meta(ge=1, le=2**20)] = 2048
    """The memory in MiB for the histories of all sessions, from which they are played again. Sessions fail beyond
    it."""
    environment_start_s: Start = 120.0
    """The longest time in which an environment's process starts and imports what it needs."""
    environment_memory_mb: Annotated[int, Meta(ge=256, le=2**24)] = 4096
    """The address space of one environment's process in MiB, which is more than it uses."""
    environment_network: Literal["none", "host"] = "none"
    """none: no environment can open a connection. host: every environment can, and so can what a model makes it do."""
    mcp_servers: str = ""
    """Programs whose tools specs may name, for environment `mcp`: JSON {"name": {"command": …, "args": […], "env":
    {…}}}, or a file of it. Only the reward service gets this setting."""
    trl_modules: str = ""
    """Modules, with commas between them, whose classes specs may name as `module:Class` for environment `trl`, in
    addition to the entry points of group `onbeat.trl_environments`."""
    judge_url: str = ""
    """The base URL, without /v1, of the OpenAI-compatible server that stages of type `llm_judge` ask. With "" this
    stage worker leaves such stages alone."""
    judge_key: str = ""
    """The bearer key of that server. With "" no key is sent. It is in no spec, no log and no error."""
    judge_questions: Annotated[int, Meta(ge=1, le=1024)] = 8
    """The most questions that a stage worker has at the judge's server at a time."""
    judge_timeout_s: Annotated[float, Meta(gt=0.0, le=3600.0)] = 60.0
    """The longest time of one request to the judge's server, with the whole answer."""
    stage_models: Annotated[int, Meta(ge=1, le=1024)] = 4
    """The most models that a stage worker keeps in memory. Beyond that the one that was used longest ago is removed."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port on which a process that is no HTTP service serves `/metrics`, at ONBEAT_HOST. 0: it serves none."""
    trainer_metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The metrics_port of the trainers that a consumer starts, one at a time."""
    metrics_key: str = ""
    """A bearer key that opens `/metrics` of every process, and nothing else. Without it, an HTTP service's own key
    opens its own metrics, and other processes serve metrics on loopback only."""
    crash_at: str = ""
    """Crash point (docs/evidence.md) at which a trainer, a generator, a stage worker or the environment
    service kills itself; for tests."""
    wrong_numbers: str = ""
    """Fault (docs/proofs.md) with which a generator's transformers engine computes other numbers than its weights
    give: `attention`, `layer` or `stale`, `NAME:N` from the Nth load on, `NAME:N:once` until the engine is made anew;
    for tests."""

    def colocated_threads_each(self, num_processes: int = 1) -> int:
        """Returns the compute threads of each of the processes that have a turn together."""
        return self.colocated_threads or max(1, usable_cores() // num_processes)

    def process_id(self, what: str = "") -> str:
        """Makes an id for this life of this process. what: the kind of process, where the id is to say it.

        The name, or host and process number, are for people; random characters, because a container's process is always
        number 1, and a name is that of the next life too: what a dead process has claimed comes again to no other.
        """
        return f"{self.process_name(what)}-{uuid.uuid4().hex[:8]}"

    def process_name(self, what: str = "") -> str:
        """Returns the name of this process in its log and, before random characters, in its ids.

        what: as of process_id.
        """
        return self.name or "-".join(filter(None, (what, socket.gethostname(), str(os.getpid()))))

    @property
    def most_ranks(self) -> int:
        """Most ranks of a trainer here."""
        return self.max_ranks or usable_cores()

    @property
    def run_root_path(self) -> Path:
        return Path(self.run_root).resolve()

    @property
    def weight_root_path(self) -> Path:
        if self.weight_root:
            return Path(self.weight_root).resolve()
        return self.run_root_path

    @property
    def own_folders(self) -> tuple[str, ...]:
        """The folders that the stack alone reads and writes: no spec leads there, and no caged process sees them."""
        folders = (self.run_root, self.weight_root, self.cache, self.objects.partition("file://")[2])
        folders += (self.backup_root, self.redis_folder)
        return tuple(str(Path(folder).resolve()) for folder in folders if folder)

    @property
    def readable_in_cages(self) -> tuple[str, ...]:
        """Files and folders of the operator that caged processes may read."""
        return tuple(str(Path(path).resolve()) for path in self.cage_readable.split(os.pathsep) if path)

    @property
    def spec_root(self) -> SpecRoot:
        """Roots below which a spec's model and data may lie."""
        extra = [Path(folder) for folder in self.extra_roots.split(os.pathsep) if folder]
        closed = tuple(map(Path, self.own_folders))
        return SpecRoot(
            Path(self.model_root), extra=extra, closed=closed, dataset_mb=self.dataset_mb, hub=self.hub_root_path
        )

    @property
    def hub_root_path(self) -> Path:
        """Folder of what was fetched from the hub."""
        if self.hub_root:
            return Path(self.hub_root).resolve()
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
        return Path(os.path.expandvars(os.path.expanduser(home)), "onbeat").resolve()

    def environment(self) -> dict[str, str]:
        """Returns the variables that make another process read these settings."""
        return {f"{PREFIX}{name.upper()}": str(getattr(self, name)) for name in self.__struct_fields__}


def usable_cores() -> int:
    """Returns the cores that this process may run on, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def settings_from(environment: Mapping[str, str]) -> StackSettings:
    """Reads every ONBEAT_ variable but service links; an unknown one fails and names itself.

    The variables of a generator's engine are `engine_from`'s.
    """
    texts = _setting_texts(environment)
    own = {name: texts[name] for name in StackSettings.__struct_fields__ if name in texts}
    for server in ("redis", "celery"):
        password = texts.get(f"{server}_password")
        if password:
            variable = f"{PREFIX}{server.upper()}"
            own[f"{server}_url"] = _with_password(own.get(f"{server}_url", ""), quote(password, safe=""), variable)
    try:
        return convert(own, StackSettings, strict=False)
    except InvalidInput as error:
        if error.field not in own:
            raise
        raise _named(error, own[error.field], f"{PREFIX}{error.field.upper()}") from error


def engine_from(environment: Mapping[str, str]) -> Engine:
    """Reads ONBEAT_ENGINE and its options; an option that the engine would ignore fails and names itself."""
    texts = _setting_texts(environment)
    own = {name: texts[f"engine_{name}"] for name in ENGINE_OPTIONS if f"engine_{name}" in texts}
    name = texts.get("engine", engines.DEFAULT)
    try:
        return engine_options(name, own, strict=False)
    except InvalidInput as error:
        variables = {"type": engines.VARIABLE} | {option: engines.variable(option) for option in own}
        if error.field not in variables:
            raise
        raise _named(error, own.get(error.field, name), variables[error.field]) from error


def _setting_texts(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns setting → its text. Raises InvalidInput for a variable of ours that is no setting."""
    known = {*StackSettings.__struct_fields__, *SECRETS, "engine", *(f"engine_{name}" for name in ENGINE_OPTIONS)}
    texts: dict[str, str] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or is_service_link(variable, text):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name.removesuffix("_file") in SECRETS:
            if name.endswith("_file"):
                name = name.removesuffix("_file")
                text = _secret(variable, path=text)
            if name in texts:
                raise InvalidInput("is set both as a variable and as a file", field=variable, cure="set one of the two")
        if name not in known:
            variables = sorted(f"{PREFIX}{name.upper()}" for name in known)
            raise InvalidInput("unknown setting", field=variable, cure=one_of(variable, variables))
        texts[name] = text
    return texts


def _with_password(url: str, password: str, variable: str) -> str:
    """Returns the address with its user's password, as it stands in a URL; variable: ONBEAT_REDIS of ONBEAT_REDIS_URL.

    Raises InvalidInput that shows neither.
    """
    parts = re.fullmatch(r"([a-z+]+://[^:@/]*)(?::([^:@/]*))?(@.*)", url)
    problem = ""
    if parts is None:
        problem = f"has no place in {variable}_URL"
    elif parts[2] not in (None, "", password):
        problem = f"differs from the password in {variable}_URL"
    if parts is None or problem:
        raise InvalidInput(problem, field=f"{variable}_PASSWORD", cure="write the address as redis://USER@HOST:PORT/0")
    return f"{parts[1]}:{password}{parts[3]}"


def _secret(variable: str, path: str) -> str:
    """Reads a secret from a file, without the line's end. Raises InvalidInput."""
    try:
        return Path(path).read_text().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeError) as error:
        raise InvalidInput(
            f"{path} cannot be read: {error}", field=variable, cure="fix the file or its permissions"
        ) from error


def _named(error: InvalidInput, text: str, variable: str) -> InvalidInput:
    """Returns the error with the variable as its field.

    Every variable is a text: a value that msgspec `got` as a text was no number.
    """
    problem = error.problem
    if problem.endswith("got `str`"):
        problem = f"`{text}` is not a number"
    return InvalidInput(problem, field=variable, cure=error.cure)


PROTOCOL = r"(?:tcp|udp|sctp)"
"""An orchestrator puts variables for a service called onbeat, or onbeat-gateway, into every process: no settings of
ours. Kubernetes: ONBEAT_SERVICE_HOST, ONBEAT_SERVICE_PORT, ONBEAT_SERVICE_PORT_HTTP=8000; it and Docker:
ONBEAT_PORT=tcp://10.0.0.1:8000, ONBEAT_PORT_8000_TCP=tcp://10.0.0.1:8000, ONBEAT_PORT_8000_TCP_PROTO, _PORT, _ADDR."""
URL = rf"{PROTOCOL}://\S+"
LINKS = (
    (r"_SERVICE_HOST", r"[0-9A-Za-z.:-]+"),
    (r"_SERVICE_PORT(?:_[A-Z0-9_]+)?", r"\d+"),
    (r"_PORT", URL),
    (r"_PORT_\d+_(?:TCP|UDP|SCTP)", URL),
    (r"_PORT_\d+_(?:TCP|UDP|SCTP)_PROTO", PROTOCOL),
    (r"_PORT_\d+_(?:TCP|UDP|SCTP)_PORT", r"\d+"),
    (r"_PORT_\d+_(?:TCP|UDP|SCTP)_ADDR", r"[0-9A-Za-z.:-]+"),
)
"""(end of the name, form of the value)."""


def is_service_link(variable: str, value: str) -> bool:
    """Returns True where both a variable's name and its value are of the form that orchestrators write."""
    return any(
        re.fullmatch(rf"ONBEAT(?:_[A-Z0-9_]+)?{name}", variable) and re.fullmatch(form, value) for name, form in LINKS
    )
