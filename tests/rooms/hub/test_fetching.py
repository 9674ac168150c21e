"""The real huggingface_hub against a hub on loopback: what is fetched is whole and what the hub lists, or isn't there.

A fetch is a process of its own; the tests look at the folder that a host has afterwards.
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.wire import decode_json, encode_json
from contracts.errors import InvalidInput, Unavailable
from contracts.hub_names import HubName
from contracts.settings import StackSettings
from onbeat.hub import fetching
from onbeat.hub.events import Fetched, HubEvent, HubOrder
from onbeat.hub.fetching import fetch
from onbeat.hub.store import STAGING, HubRequest, HubStore
from tests.rooms.hub.conftest import MODEL, MODEL_NAME, SUMS, lines, model_files
from tests.rooms.hub.hub_server import HubHandler, HubServer, cut_after, hang, trickle, wrong_bytes

WEIGHTS = "model.safetensors"
TOKEN = "hf_a-token-that-nobody-may-see"
READ = {path.name for path in MODEL.iterdir() if path.suffix in (".json", ".safetensors", ".jinja")}
"""The files of the model that a trainer or a generator reads."""


def model(revision: str = "main") -> HubRequest:
    return HubRequest(name=HubName(kind="model", repository=MODEL_NAME, revision=revision))


def rows(*splits: str, config: str = "main", revision: str = "main") -> HubRequest:
    name = HubName(kind="dataset", repository=SUMS, revision=revision)
    return HubRequest(name=name, config=config or UNSET, splits=splits or ("train",))


def whole_folders(host: StackSettings) -> list[Path]:
    """The folders of models and splits that the host has."""
    root = host.hub_root_path
    places = [place for kind in ("models", "datasets") for place in (root / kind).glob("*/*/*")]
    return sorted(place for place in places if place.name != "refs")


def halves(host: StackSettings) -> list[Path]:
    """Files that huggingface_hub had begun."""
    return list((host.hub_root_path / STAGING).rglob("*.incomplete"))


def fetching_process(hub: HubServer) -> psutil.Process:
    """The process of the one fetch, once it has asked for the weights."""
    until_s = time.monotonic() + 60.0
    while not hub.asked[f"GET {WEIGHTS}"] and time.monotonic() < until_s:
        time.sleep(0.05)
    (process,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if fetching.PROCESS in " ".join(process.cmdline())
    ]
    return process


def test_of_a_model_what_is_read_is_fetched_and_nothing_that_is_pickled_or_run(
    hub: HubServer, host: StackSettings
) -> None:
    result = fetch(model(), host)
    (folder,) = map(Path, result.folders)
    assert {path.name for path in folder.iterdir()} == READ
    assert all((folder / name).read_bytes() == (MODEL / name).read_bytes() for name in READ)
    commit = hub.models[MODEL_NAME].refs["main"]
    assert result.request.name.revision == folder.name == commit
    assert result.is_new
    assert not [asked for asked in hub.asked if "pytorch_model" in asked or "modeling" in asked]
    # The second time the commit is asked for, and no file.
    before = sum(hub.asked.values())
    assert not fetch(model(), host).is_new
    assert sum(hub.asked.values()) == before + 1


def test_only_the_weights_that_the_index_names_are_fetched(hub: HubServer, host: StackSettings) -> None:
    files = model_files()
    weights = files.pop(WEIGHTS)
    index = b'{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    files |= {"model-00001-of-00001.safetensors": weights, "model.safetensors.index.json": index}
    files |= {"consolidated.safetensors": weights}
    hub.models[MODEL_NAME].push(files)
    (folder,) = map(Path, fetch(model(), host).folders)
    names = {path.name for path in folder.iterdir() if "safetensors" in path.name}
    assert names == {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}


def test_of_a_data_set_the_files_of_the_split_are_fetched_in_their_order(hub: HubServer, host: StackSettings) -> None:
    result = fetch(rows("train", "test"), host)
    train, test = map(Path, result.folders)
    assert train.name == "train"
    assert sorted(path.name for path in train.iterdir()) == [
        "00000-train-00000-of-00002.jsonl",
        "00001-train-00001-of-00002.jsonl",
        "state.json",
    ]
    assert b"".join(path.read_bytes() for path in sorted(train.glob("*.jsonl"))) == lines(10, 60)
    assert (test / "00000-test-00000-of-00001.jsonl").read_bytes() == lines(70, 16)
    assert not [asked for asked in hub.asked if "hard/" in asked or "script" in asked]


@pytest.mark.parametrize(
    ("request_of_rows", "words"),
    [
        (rows("validation"), r"has no split `validation` \(its splits are: train, test\)"),
        (rows(config=""), r"several configurations, and none is named \(set config to one of: main, hard\)"),
        (rows(config="other"), r"has no configuration `other` \(set config to one of: main, hard\)"),
        (rows(revision="v2"), r"onbeat/sums has no revision v2"),
        (
            HubRequest(name=HubName(kind="dataset", repository="a/none"), splits=("x",)),
            r"has no dataset a/none \(check",
        ),
        (HubRequest(name=HubName(kind="model", repository="a/none")), r"has no model a/none \(check"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_what_there_is(
    hub: HubServer, host: StackSettings, request_of_rows: HubRequest, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        fetch(request_of_rows, host)
    assert not whole_folders(host)


def test_a_connection_that_is_cut_goes_on_where_it_ended(hub: HubServer, host: StackSettings) -> None:
    hub.faults[WEIGHTS] = cut_after(300_000, times=2)
    (folder,) = map(Path, fetch(model(), host).folders)
    assert (folder / WEIGHTS).read_bytes() == (MODEL / WEIGHTS).read_bytes()
    # It counts by 256 KiB.
    assert hub.ranges == [f"bytes={2**18}-", f"bytes={2**19}-"]


def test_a_connection_that_is_cut_each_time_leaves_nothing_that_is_taken_for_whole(
    hub: HubServer, host: StackSettings
) -> None:
    hub.faults[WEIGHTS] = cut_after(0)
    with pytest.raises(Unavailable, match=r"no answer of 127\.0\.0\.1 for hub:onbeat/two-digit-addition"):
        fetch(model(), host)
    assert not whole_folders(host)
    assert not halves(host)
    # The files that were whole by then are not asked for again.
    hub.faults.clear()
    asked = hub.asked["GET tokenizer.json"] + hub.asked["GET config.json"]
    assert fetch(model(), host).is_new
    assert hub.asked["GET tokenizer.json"] + hub.asked["GET config.json"] <= max(asked, 2)
    assert hub.asked["GET config.json"] == 1


@pytest.mark.parametrize("fault", [trickle, hang])
def test_a_hub_that_does_not_go_on_is_left_within_the_deadline(
    hub: HubServer, host: StackSettings, fault: object
) -> None:
    hub.faults[WEIGHTS] = fault  # pyright: ignore[reportArgumentType]
    with pytest.raises(Unavailable, match=r"the hub stopped sending .*: nothing of use came for 3 s"):
        fetch(model(), host, stall_s=3.0)
    assert not whole_folders(host)
    hub.faults.clear()
    assert fetch(model(), host).is_new
    assert not halves(host)


def test_a_list_of_files_that_never_comes_is_left_within_the_deadline(hub: HubServer, host: StackSettings) -> None:
    hub.faults["list"] = hang
    with pytest.raises(Unavailable, match="the hub stopped sending"):
        fetch(model(), host, stall_s=3.0)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_with_another_hash_than_the_hub_lists_is_refused(hub: HubServer, host: StackSettings, name: str) -> None:
    hub.faults[name] = wrong_bytes
    with pytest.raises(Unavailable, match=rf"{name} of hub:onbeat/\S+ came with other bytes than the hub lists, twice"):
        fetch(model(), host)
    assert not whole_folders(host)
    hub.faults.clear()
    (folder,) = map(Path, fetch(model(), host).folders)
    assert (folder / name).read_bytes() == (MODEL / name).read_bytes()


def test_a_copy_of_huggingface_hubs_own_cache_is_taken_and_a_damaged_one_is_not(
    hub: HubServer, host: StackSettings, tmp_path: Path
) -> None:
    download = "import sys; from huggingface_hub import hf_hub_download as d; print(d(sys.argv[1], sys.argv[2]))"
    command = [sys.executable, "-c", download, MODEL_NAME]
    for name in ("tokenizer.json", WEIGHTS):
        subprocess.run([*command, name], check=True, capture_output=True)
    commit = hub.models[MODEL_NAME].refs["main"]
    cached = tmp_path / "hf-home" / "hub" / f"models--{MODEL_NAME.replace('/', '--')}" / "snapshots" / commit
    data = (cached / WEIGHTS).read_bytes()
    (cached / WEIGHTS).resolve().write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    hub.asked.clear()
    (folder,) = map(Path, fetch(model(), host).folders)
    assert (folder / WEIGHTS).read_bytes() == (MODEL / WEIGHTS).read_bytes()
    assert hub.asked["GET tokenizer.json"] == 0
    assert hub.asked[f"GET {WEIGHTS}"] == 1


def test_a_fetch_that_is_killed_leaves_no_half_and_the_next_one_goes_on(hub: HubServer, host: StackSettings) -> None:
    hub.faults[WEIGHTS] = hang
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            fetch(model(), host)
        except Unavailable as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    fetching_process(hub).send_signal(signal.SIGKILL)
    thread.join(30.0)
    assert "was killed by signal 9" in str(outcome[0])
    assert halves(host)
    assert not whole_folders(host)
    hub.faults.clear()
    assert fetch(model(), host).is_new
    assert not halves(host)
    assert hub.asked["GET config.json"] == 1


def test_a_disk_that_is_full_is_named_and_the_next_fetch_goes_on(hub: HubServer, host: StackSettings) -> None:
    is_full = threading.Event()

    def later(handler: HubHandler, data: bytes) -> None:
        is_full.wait(60.0)
        handler.wfile.write(data)

    hub.faults[WEIGHTS] = later
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            fetch(model(), host)
        except Unavailable as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    # Writes beyond so many bytes of a file fail, as on a full disk.
    resource.prlimit(fetching_process(hub).pid, resource.RLIMIT_FSIZE, (2**18, 2**18))
    is_full.set()
    thread.join(60.0)
    assert "the disk is full: " in str(outcome[0])
    assert "ONBEAT_HUB_ROOT" in str(outcome[0])
    assert not whole_folders(host)
    assert not halves(host)
    hub.faults.clear()
    assert fetch(model(), host).is_new


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine lets no program have a disk of its own",
)
def test_a_disk_that_is_too_small_is_refused_before_a_file_comes(
    hub: HubServer, host: StackSettings, tmp_path: Path
) -> None:
    (tmp_path / "fetched").mkdir()
    order = HubOrder(request=model(), root=host.hub_root, max_bytes=2**40)
    small_disk = f"mount -t tmpfs -o size=64m none {tmp_path}/fetched && exec {sys.executable} -m {fetching.PROCESS}"
    process = subprocess.run(
        ["unshare", "-rm", "sh", "-c", small_disk], input=encode_json(order), capture_output=True, check=True
    )
    event = decode_json(process.stdout.splitlines()[-1], HubEvent)
    assert "takes 1 MB, and the disk of" in event.problem
    assert "make room" in event.cure
    assert hub.asked[f"GET {WEIGHTS}"] == 0


def test_two_fetches_of_one_name_load_it_once(hub: HubServer, host: StackSettings) -> None:
    results: list[Fetched] = []
    threads = [threading.Thread(target=lambda: results.append(fetch(model(), host))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(result.is_new for result in results) == [False, True]
    assert hub.asked[f"GET {WEIGHTS}"] == 1


def test_two_requests_that_share_a_split_both_have_it(hub: HubServer, host: StackSettings) -> None:
    (alone,) = fetch(rows("train"), host).folders
    both = fetch(rows("train", "test"), host).folders
    assert both[0] == alone
    assert all(Path(folder).is_dir() for folder in both)
    assert hub.asked["GET main/train-00000-of-00002.jsonl"] == 1


def test_what_has_no_room_is_refused_before_a_file_comes(hub: HubServer, host: StackSettings) -> None:
    files = model_files()
    hub.models[MODEL_NAME].push(files | {WEIGHTS: files[WEIGHTS] * 3})
    with pytest.raises(Unavailable, match=r"takes 2 MB, and \S+ has 0 MB of the 1 MB that it may take \(remove"):
        fetch(model(), replace(host, hub_mb=1))
    assert hub.asked[f"GET {WEIGHTS}"] == 0


def test_a_moved_branch_is_another_commit_and_the_earlier_one_stays(hub: HubServer, host: StackSettings) -> None:
    before = fetch(model(), host)
    hub.models[MODEL_NAME].push(model_files() | {"generation_config.json": b"{}"})
    store = HubStore(host.hub_root_path)
    name = model().name
    assert store.commit_of(name) == before.request.name.revision
    after = fetch(model(), host)
    assert after.request != before.request
    assert store.commit_of(name) == after.request.name.revision
    assert (Path(after.folders[0]) / "generation_config.json").read_bytes() == b"{}"
    assert store.has(before.request)
    # Of the earlier commit nothing is asked but its list, though the branch has moved.
    assert fetch(before.request, host).folders == before.folders


@pytest.mark.parametrize(
    ("is_private", "words"), [(False, "is gated"), (True, "has no model onbeat/two-digit-addition")]
)
def test_a_gated_or_private_one_needs_the_token_which_no_error_shows(
    hub: HubServer, host: StackSettings, is_private: bool, words: str
) -> None:
    hub.models[MODEL_NAME].token = TOKEN
    hub.models[MODEL_NAME].is_private = is_private
    with pytest.raises(InvalidInput, match=words) as error:
        fetch(model(), host)
    assert "HF_TOKEN" in (error.value.cure or "")
    wrong = replace(host, hub_token="hf_another-one")
    with pytest.raises(InvalidInput, match=words) as error:
        fetch(model(), wrong)
    assert "hf_another-one" not in str(error.value)
    assert fetch(model(), replace(host, hub_token=TOKEN)).is_new
    kept = [path for path in host.hub_root_path.rglob("*") if path.is_file()]
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]
    assert f"Bearer {TOKEN}" in hub.tokens


def test_the_token_of_the_environment_opens_it_too(
    hub: HubServer, host: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[MODEL_NAME].token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch(model(), host).is_new


def test_names_that_lead_elsewhere_are_left_out(hub: HubServer, host: StackSettings) -> None:
    hostile = {"../../config.json": b"{}", "/etc/x.json": b"{}", ".hidden/a.json": b"{}", "a/../../b.json": b"{}"}
    hub.models[MODEL_NAME].push(model_files() | hostile)
    (folder,) = map(Path, fetch(model(), host).folders)
    assert {path.name for path in folder.iterdir()} == READ


def test_weights_that_are_pickled_alone_are_refused(hub: HubServer, host: StackSettings) -> None:
    files = model_files()
    del files[WEIGHTS]
    hub.models[MODEL_NAME].push(files)
    with pytest.raises(InvalidInput, match=r"has no weights as safetensors \(load it where you trust it"):
        fetch(model(), host)
    assert hub.asked["GET pytorch_model.bin"] == 0


def test_json_that_is_one_list_is_refused_with_the_cure(hub: HubServer, host: StackSettings) -> None:
    hub.datasets[SUMS].push({"data/train.json": b'[{"question": "1"}]'})
    with pytest.raises(
        InvalidInput, match=r"isn't a JSON object on each line \(the hub converts .*refs/convert/parquet"
    ):
        fetch(rows(config=""), host)
    assert not whole_folders(host)


def test_each_step_says_how_far_it_is(hub: HubServer, host: StackSettings) -> None:
    events: list[HubEvent] = []
    fetch(model(), host, advance=events.append)
    total = sum((MODEL / name).stat().st_size for name in READ)
    assert events[-1].bytes_done == events[-1].bytes_total == total
    assert [event.bytes_done for event in events] == sorted(event.bytes_done for event in events)


def test_a_hub_that_is_away_is_named(hub: HubServer, host: StackSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"no answer of 127\.0\.0\.1 for hub:onbeat/two-digit-addition: ConnectError"):
        fetch(model(), host)
