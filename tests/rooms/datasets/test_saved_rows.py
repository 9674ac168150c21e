"""Rows that Hugging Face's `datasets` has saved: each layout gives the rows of the same file of JSON lines."""

from __future__ import annotations

import datetime
import decimal
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from contracts.encoding.wire import convert
from contracts.environments.messages import Message
from contracts.errors import InvalidInput
from contracts.rewards import ExactReward, NumericReward
from contracts.spec.datasets import HuggingFaceDataset
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.examples import Example
from onbeat.data.prompts.table_files import read_table
from tests.chaos.short_job import long_variant

pyarrow = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "extra_info": {"index": number},
        "reward_model": {"ground_truth": str(number + 1)},
        "image": b"which nothing reads",
    }
    for number in range(5)
]
"""As verl has them."""


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    with ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Every layout of the same five rows."""
    (tmp_path / "saved" / "train").mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1f"}
    (tmp_path / "saved" / "train" / "state.json").write_text(json.dumps(state))
    for name, rows in zip(names, (ROWS[:3], ROWS[3:]), strict=True):
        write_arrow(tmp_path / "saved" / "train" / name, rows)
    (tmp_path / "hub").mkdir()
    for number, rows in enumerate((ROWS[:1], ROWS[1:])):
        write_parquet(tmp_path / "hub" / f"train-0000{number}-of-00002.parquet", rows)
    write_parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", ROWS[:1])
    (tmp_path / "one").mkdir()
    write_parquet(tmp_path / "one" / "rows.parquet", ROWS)
    return tmp_path


def load(root: Path, path: str) -> tuple[Example, ...]:
    table = {
        "type": "huggingface",
        "train_path": path,
        "columns": {"reference": "reward_model.ground_truth"},
        "metadata_columns": ["extra_info"],
    }
    spec = convert(table, HuggingFaceDataset)
    return load_dataset(spec, num_evaluation=0, seed=0, model_root=SpecRoot(root)).train


@pytest.mark.parametrize("path", ["saved/train", "hub/train", "one", "one/rows.parquet"])
def test_each_layout_has_the_same_rows_in_order(root: Path, path: str) -> None:
    examples = load(root, path)
    assert [example.messages for example in examples] == [
        (Message(role="user", content=f"{number}+1="),) for number in range(5)
    ]
    assert [example.reference for example in examples] == ["1", "2", "3", "4", "5"]
    assert [example.example_id for example in examples] == [f"train/{number}" for number in range(5)]
    assert json.loads(examples[4].metadata) == {"extra_info": {"index": 4}}


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("saved", r"has the splits train \(name one: saved/train\)"),
        ("hub", r"has the splits test, train \(name one: hub/test\)"),
        ("hub/valid", r"no file or folder .*hub/valid, nor files"),
        ("nowhere/train", "no file or folder"),
        ("saved/train/state.json", "is no such file"),
        ("empty", r"has no file of \.parquet or \.arrow"),
    ],
)
def test_what_is_not_one_split_is_refused_with_the_cure(root: Path, path: str, problem: str) -> None:
    (root / "empty").mkdir()
    with pytest.raises(InvalidInput, match=problem) as error:
        load(root, path)
    assert error.value.field == "dataset.train_path"


def test_a_shard_that_leads_out_of_the_root_is_not_read(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "rows.parquet"
    write_parquet(outside, ROWS)
    (root / "one" / "rows.parquet").unlink()
    (root / "one" / "rows.parquet").symlink_to(outside)
    with pytest.raises(InvalidInput, match="leads out of the model root"):
        load(root, "one")


GSM8K = [
    {"question": "How many eggs?", "answer": "Two times 529 are <<2*529=1058>>1058.\n#### 1,058"},
    {"question": "How many hens?", "answer": "None.\n#### 0"},
]
"""As the hub has them."""


def test_the_table_that_the_recipes_print_for_gsm8k_reads_it_as_it_is_published(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    (printed,) = re.findall(r"`(dataset = \{[^`]*hub:openai/gsm8k[^`]*\})`", page)
    table = convert(tomllib.loads(printed)["dataset"], HuggingFaceDataset)
    # What a job's record has, and the folders that a fetch makes of it.
    spec = replace(table, path=f"hub:openai/gsm8k@{'0' * 40}")
    for split, rows in (("train", GSM8K), ("test", [{"question": "How many cows?", "answer": "#### 7"}])):
        folder = tmp_path / "datasets" / "openai" / "gsm8k" / ("0" * 40) / "main" / split
        folder.mkdir(parents=True)
        write_parquet(folder / "00000-part.parquet", rows)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "00000-part.parquet"}]}')
    loaded = load_dataset(
        spec,
        num_evaluation=1,
        seed=0,
        model_root=SpecRoot(tmp_path / "models", hub=tmp_path),
        components=(NumericReward(), ExactReward()),
    )
    assert [(one.question, one.reference) for one in loaded.evaluation] == [("How many cows?", "7")]
    assert [(one.question, one.reference) for one in loaded.train] == [
        ("How many eggs?", "1,058"),
        ("How many hens?", "0"),
    ]


def repeated(text: str, *, num_rows: int) -> Any:
    """A table of one text in each row, of which a file holds one copy."""
    ones = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * num_rows, pyarrow.int32()), pyarrow.array([text]))
    return pyarrow.table({"prompt": ones, "reference": ones})


CODECS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
MANY_ROWS = (1000, 300_000, r"more than 64 MiB at rows\.parquet:\d+: ")
"""Bytes of a row, rows, and what is said of the file: rows are counted as they come, whatever has decoded them."""
LONG_ROWS = (
    4_000_000,
    1000,
    r"rows\.parquet (needs more than 1,073,741,824 bytes of memory to be decoded|.* process )",
)
"""The same of a file that a decoder's memory is bounded for."""
READ = """
import resource, sys
from pathlib import Path
from contracts.errors import InvalidInput
from contracts.rewards import ExactReward, NumericReward
from contracts.spec.datasets import HuggingFaceDataset
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import load_dataset
try:
    root = SpecRoot(Path(sys.argv[1]), dataset_mb=64)
    load_dataset(HuggingFaceDataset(train_path=sys.argv[2]), num_evaluation=0, seed=0, model_root=root)
except InvalidInput as error:
    print(error.field, error.problem, sep="|")
# A process's own ru_maxrss has that of the process which started it: its memory was that one's until its program began.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) // 1024)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


@pytest.mark.parametrize(
    ("text_bytes", "num_rows", "problem", "codec"),
    [
        *(
            pytest.param(*MANY_ROWS, codec, id=f"many rows-{codec}", marks=() if codec == "zstd" else long_variant)
            for codec in CODECS
        ),
        *(pytest.param(*LONG_ROWS, codec, id=f"long rows-{codec}") for codec in CODECS),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel keeps the bound of a process's memory on Linux")
def test_a_small_file_that_becomes_gigabytes_is_refused_within_a_bound_of_memory(
    tmp_path: Path, codec: str, text_bytes: int, num_rows: int, problem: str
) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(repeated("x" * text_bytes, num_rows=num_rows), path, compression=codec)
    if codec in ("gzip", "brotli", "zstd"):
        assert path.stat().st_size < 70_000
    result = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path), "rows.parquet"], capture_output=True, text=True, timeout=300
    )
    refusal, own_mib, decoder_mib = result.stdout.splitlines()
    assert re.match(r"dataset\.train_path\|.*" + problem, refusal), (refusal, result.stderr)
    assert int(own_mib) < 600
    assert int(decoder_mib) < 1024 + 256, "its private memory, and pages of libraries and of the file"


@pytest.mark.parametrize(("text_bytes", "num_rows"), [(1000, 300_000), (4_000_000, 1000), (60_000_000, 100)])
def test_a_small_arrow_file_that_becomes_gigabytes_is_refused(tmp_path: Path, text_bytes: int, num_rows: int) -> None:
    table = repeated("x" * text_bytes, num_rows=num_rows)
    options = ipc.IpcWriteOptions(compression="zstd")
    with ipc.new_stream(tmp_path / "rows.arrow", table.schema, options=options) as stream:
        stream.write_table(table)
    assert (tmp_path / "rows.arrow").stat().st_size < 70_000
    root = SpecRoot(tmp_path, dataset_mb=64)
    with pytest.raises(
        InvalidInput, match=r"more than 64 MiB at rows\.arrow:|has a row of more|needs more than"
    ) as error:
        load_dataset(HuggingFaceDataset(train_path="rows.arrow"), num_evaluation=0, seed=0, model_root=root)
    assert error.value.field == "dataset.train_path"


def test_a_row_that_repeats_a_value_without_end_is_refused(tmp_path: Path) -> None:
    values = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 100_000, pyarrow.int32()), pyarrow.array(["x" * 1_000_000])
    )
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 100_000], pyarrow.int32()), values)
    table = pyarrow.table({"prompt": lists, "reference": ["1"]})
    with ipc.new_stream(tmp_path / "rows.arrow", table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(InvalidInput, match=r"rows\.arrow (needs more than|can't be decoded)") as error:
        load_dataset(
            HuggingFaceDataset(train_path="rows.arrow"), num_evaluation=0, seed=0, model_root=SpecRoot(tmp_path)
        )
    assert error.value.field == "dataset.train_path"


def test_long_rows_and_values_of_every_kind_come_as_they_are(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    rows = [
        {"prompt": str(number) + "é" * 1_000_000, "reference": 0.5, "at": moment, "price": decimal.Decimal("1.20")}
        for number in range(20)
    ]
    write_parquet(tmp_path / "rows.parquet", rows)
    spec = HuggingFaceDataset(train_path="rows.parquet", metadata_columns=("at", "price"))
    loaded = load_dataset(spec, num_evaluation=0, seed=0, model_root=SpecRoot(tmp_path)).train
    assert [example.question[:2] for example in loaded[:3]] == ["0é", "1é", "2é"]
    assert {example.reference for example in loaded} == {"0.5"}
    assert json.loads(loaded[0].metadata) == {"at": "2026-01-02T03:04:05+02:00", "price": "1.20"}


@pytest.mark.parametrize("state", ["[", "{}", '{"_data_files": [{}]}', '{"_data_files": 3}'])
def test_a_damaged_state_of_a_saved_folder_is_refused_by_its_field(root: Path, state: str) -> None:
    (root / "saved" / "train" / "state.json").write_text(state)
    with pytest.raises(InvalidInput, match=r"state\.json is damaged") as error:
        load(root, "saved/train")
    assert error.value.field == "dataset.train_path"


def test_a_reader_that_is_left_early_leaves_no_process(root: Path) -> None:
    rows = read_table(root / "one" / "rows.parquet", "dataset.train_path")
    assert next(rows).place == "0"
    rows.close()
    assert not [child for child in psutil.Process().children() if "table_process" in " ".join(child.cmdline())]
