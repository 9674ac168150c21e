"""A job that names a plug-in which the reward service doesn't have is refused when it is submitted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import convert, decode_json, encode_json
from contracts.environments.service import table_of
from contracts.errors import InvalidInput
from contracts.rewards import (
    ExactReward,
    PluginReward,
    RewardItem,
    RewardRequest,
    RewardResponse,
    Scored,
    Unscorable,
    source_digests,
)
from contracts.settings import StackSettings
from contracts.spec.datasets import JsonlDataset
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.job import JobSpec
from gateway.submission import MAX_SOURCE_BYTES, check_plugins, check_rows, with_columns, with_packages, with_sources
from onbeat.data.datasets.loading import job_examples
from onbeat.stack.ports import free_port
from reward_service.app import create_app
from reward_service.player.registry import factory_of
from tests.builders import job_spec
from tests.served import serving

SPEC = job_spec(reward__components=(ExactReward(), PluginReward(entry_point="brevity")))


@pytest.fixture
def rewards(settings: StackSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StackSettings]:
    """Settings that lead to a real reward service with two plug-ins, of which one can't be imported."""
    info = tmp_path / "site" / "brief-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brief\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[onbeat.rewards]\nbrevity = brief:brevity\nlost = not_there:lost\n")
    (tmp_path / "site" / "brief.py").write_text("def brevity(**_): raise ValueError('an empty completion')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with serving(create_app(settings, num_threads=1)) as url:
        yield replace(settings, reward_url=url)


def test_a_plugin_that_is_installed_passes_and_one_that_is_not_is_named_with_its_place(rewards: StackSettings) -> None:
    check_plugins(SPEC, rewards)
    other = job_spec(reward__components=(ExactReward(), PluginReward(entry_point="brevitiy")))
    with pytest.raises(InvalidInput, match=r"no package offers `brevitiy` .* installed: brevity, lost") as caught:
        check_plugins(other, rewards)
    assert caught.value.field == "reward.components[1].entry_point"
    unimported = (ExactReward(), PluginReward(entry_point="brevity"), PluginReward(entry_point="lost"))
    with pytest.raises(InvalidInput, match=r"`lost` of brief 1\.0 cannot be imported: ModuleNotFoundError") as caught:
        check_plugins(job_spec(reward__components=unimported), rewards)
    assert caught.value.field == "reward.components[2].entry_point"


def test_a_reward_service_that_is_away_or_refuses_the_key_refuses_no_job(
    rewards: StackSettings, caplog: pytest.LogCaptureFixture
) -> None:
    other = job_spec(reward__components=(PluginReward(entry_point="absent"),))
    check_plugins(other, replace(rewards, reward_key="wrong"))
    check_plugins(other, replace(rewards, reward_url=f"http://127.0.0.1:{free_port()}"))
    check_plugins(other, replace(rewards, reward_url="not an address"))
    assert len([record for record in caplog.records if "aren't checked" in record.getMessage()]) == 3
    assert "it answered 401" in caplog.text


def test_a_job_names_the_version_of_an_installed_reward_and_another_version_scores_nothing(
    rewards: StackSettings, tmp_path: Path
) -> None:
    spec = with_packages(SPEC, rewards)
    plugin = PluginReward(entry_point="brevity", package="brief 1.0")
    assert spec.reward.components == (ExactReward(), plugin)
    assert with_packages(spec, rewards) == spec
    check_plugins(spec, rewards)
    (tmp_path / "site" / "brief-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: brief\nVersion: 1.1\n"
    )
    with serving(create_app(rewards, num_threads=1)) as url:
        upgraded = replace(rewards, reward_url=url)
        with pytest.raises(InvalidInput, match=r"`brevity` is of brief 1\.1 .* accepted with brief 1\.0") as caught:
            check_plugins(spec, upgraded)
        assert caught.value.field == "reward.components[1].entry_point"
        with pytest.raises(InvalidInput, match=r"the reward service has brief 1\.1") as caught:
            with_packages(spec, upgraded)
        assert caught.value.field == "reward.components[1].package"
        assert with_packages(SPEC, upgraded).reward.components[1] == PluginReward(
            entry_point="brevity", package="brief 1.1"
        )


def test_a_job_whose_reward_service_refuses_the_key_names_no_version_and_the_log_says_why(
    rewards: StackSettings, caplog: pytest.LogCaptureFixture
) -> None:
    assert with_packages(SPEC, replace(rewards, reward_key="wrong")) == SPEC
    assert "can't be asked which packages a job's rewards need, so that isn't checked: it answered 401" in caplog.text


def test_a_job_whose_reward_service_is_away_names_no_version(rewards: StackSettings) -> None:
    assert with_packages(SPEC, replace(rewards, reward_url=f"http://127.0.0.1:{free_port()}")) == SPEC


SOURCE = "import re\n\nSIGN = re.compile('-')\n\n\ndef signed(completion):\n    return len(SIGN.findall(completion))\n"


def of_file(entry_point: str = "signed", file: str = "rewards.py", **fields: str) -> JobSpec:
    return job_spec(reward__components=(PluginReward(entry_point=entry_point, file=file, **fields),))


WITH_HELPER = "from math import sqrt\nfrom not_there import gold\n\n\ndef signed(completion):\n    return gold\n"
LAZY_HELPER = "def signed(completion):\n    import not_there\n\n    return not_there.gold\n"
LATE_HELPER = "def signed(completion):\n    if completion:\n        import not_there\n    return 0.0\n"
OPTIONAL = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import not_there
try:
    import not_there
except ImportError:
    not_there = None


def signed(completion):
    return 0.0
"""


@pytest.mark.parametrize(
    ("source", "line"),
    [(WITH_HELPER, 2), (LAZY_HELPER, 2), (LATE_HELPER, 3), (OPTIONAL, 0), ("def signed(completion):\n    1 / 0", 0)],
)
def test_a_file_that_imports_what_is_not_there_is_refused_with_its_line_and_a_cure(
    rewards: StackSettings, tmp_path: Path, source: str, line: int
) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "mine.py").write_text(source)
    spec = with_sources(of_file(file="mine.py"), replace(rewards, model_root=str(tmp_path / "root")))
    if not line:  # of another error a completion may be the cause
        check_plugins(spec, rewards)
        return
    problem = (
        rf"`signed` cannot be imported: mine\.py, line {line}: ModuleNotFoundError: No module named 'not_there' "
        r"\(put the helper into the same file, or install it where the reward service runs\)"
    )
    with pytest.raises(InvalidInput, match=problem) as caught:
        check_plugins(spec, rewards)
    assert caught.value.field == "reward.components[0].entry_point"


NEXT_TO_FILE = """from __future__ import annotations
from helpers import gold


def signed(completion):
    return gold(completion)
"""
FROM_PACKAGE = """from parts.numbers import one


def signed(completion):
    return one
"""
HELPERS = """import math
from scale import SCALE


def gold(completion):
    return SCALE * math.sqrt(float(completion))
"""


@pytest.fixture
def project(rewards: StackSettings, tmp_path: Path) -> StackSettings:
    """Settings over a model root with a project: a reward in a folder of its own, with two helpers next to it."""
    folder = tmp_path / "root" / "project"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "numbers.py").write_text("one = 1.0\n")
    (folder / "score.py").write_text(NEXT_TO_FILE)
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "scale.py").write_text("SCALE = 2.0\n")
    return replace(rewards, model_root=str(tmp_path / "root"))


def test_modules_next_to_a_rewards_file_go_along_and_errors_have_the_lines_of_both(project: StackSettings) -> None:
    spec = with_sources(of_file(file="project/score.py"), project)
    (component,) = spec.reward.components
    assert isinstance(component, PluginReward)
    assert component.arguments == ("completion",)
    assert with_sources(spec, project) == spec
    # The files are not read again: the cage has the text alone.
    for file in (Path(project.model_root) / "project").glob("*.py"):
        file.unlink()
    items = tuple(RewardItem(prompt="", completion=text, reference="") for text in ("4", "-1"))
    request = encode_json(RewardRequest(components=(component,), items=items))
    headers = {"Authorization": f"Bearer {project.reward_key}", "Content-Type": "application/json"}
    answer = httpx.post(f"{project.reward_url}/v1/score", content=request, headers=headers, timeout=60)
    scored, failed = decode_json(answer.content, RewardResponse).results
    assert isinstance(scored, Scored)
    assert scored.reward == 4.0
    assert isinstance(failed, Unscorable)
    assert "at helpers.py:6 in gold: return SCALE * math.sqrt(float(completion))" in failed.detail


def test_two_files_in_different_folders_each_get_their_own_helper_of_one_name(project: StackSettings) -> None:
    """Both are in one process, and come to their imports when they are called: at the top, late, and in a helper."""
    components = []
    for place, side in enumerate(("left", "right")):
        folder = Path(project.model_root) / side
        folder.mkdir()
        (folder / "score.py").write_text(
            f"import scale\n\n\ndef {side}(completion):\n"
            "    import helpers\n    from scale import SCALE\n\n    assert helpers.scale() == scale.SCALE == SCALE\n"
            "    return helpers.scale()\n"
        )
        (folder / "helpers.py").write_text("def scale():\n    from scale import SCALE\n\n    return SCALE\n")
        (folder / "scale.py").write_text(f"SCALE = {place + 1}.0\n")
        components.append(PluginReward(entry_point=side, file=f"{side}/score.py"))
    spec = with_sources(job_spec(reward__components=tuple(components)), project)
    items = (RewardItem(prompt="", completion="4", reference=""),) * 2
    request = encode_json(RewardRequest(components=spec.reward.components, items=items))
    headers = {"Authorization": f"Bearer {project.reward_key}", "Content-Type": "application/json"}
    answer = httpx.post(f"{project.reward_url}/v1/score", content=request, headers=headers, timeout=60)
    for scored in decode_json(answer.content, RewardResponse).results:
        assert isinstance(scored, Scored), scored
        assert scored.breakdown == {"left": 1.0, "right": 2.0}


def test_modules_next_to_an_environments_file_go_along(project: StackSettings) -> None:
    text = "import helpers\n\n\nclass Game:\n    gold = helpers.gold('4')\n"
    (Path(project.model_root) / "project" / "game.py").write_text(text)
    environment = with_sources(job_spec(environment={"name": "Game", "file": "project/game.py"}), project).environment
    assert environment is not None
    game, version = factory_of(table_of(environment))
    assert game.gold == 4.0  # type: ignore[attr-defined]
    assert version == environment.file_version


def test_a_helper_that_was_edited_is_another_reward(project: StackSettings) -> None:
    spec = with_sources(of_file(file="project/score.py"), project)
    (Path(project.model_root) / "project" / "scale.py").write_text("SCALE = 3.0\n")
    with pytest.raises(InvalidInput, match="differs from the text of the file"):
        with_sources(spec, project)
    other = with_sources(of_file(file="project/score.py"), project)
    assert source_digests(spec.reward.components) != source_digests(other.reward.components)


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("score.py", FROM_PACKAGE, r"project/score\.py imports parts, a package next to it, which"),
        ("scale.py", "import parts\n", r"project/score\.py imports parts, a package next to it, which"),
        ("helpers.py", "def gold(:\n", r"project/helpers\.py is not valid Python"),
        ("helpers.py", "#" * MAX_SOURCE_BYTES + "\nimport scale", r"project/helpers\.py: is over"),
        (
            "helpers.py",
            "#" * (MAX_SOURCE_BYTES - 99) + "\nimport scale",
            r"what it imports \(scale, helpers\) are over",
        ),
    ],
    ids=["package", "package of a helper", "no Python", "long helper", "long together"],
)
def test_a_helper_that_cannot_go_along_is_refused_by_its_name(
    project: StackSettings, file: str, text: str, problem: str
) -> None:
    (Path(project.model_root) / "project" / file).write_text(text)
    with pytest.raises(InvalidInput, match=problem) as caught:
        with_sources(of_file(file="project/score.py"), project)
    assert caught.value.field == "reward.components[0].file"


@pytest.fixture
def root(settings: StackSettings, tmp_path: Path) -> StackSettings:
    """Settings over a model root with one file of rewards."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "rewards.py").write_text(SOURCE)
    return replace(settings, model_root=str(tmp_path / "root"))


def test_a_job_keeps_what_the_file_of_its_reward_said_when_it_was_submitted(root: StackSettings) -> None:
    spec = with_sources(of_file(), root)
    check_plugins(spec, root)
    signed = PluginReward(entry_point="signed", file="rewards.py", source=SOURCE, arguments=("completion",))
    assert spec.reward.components == (signed,)
    assert source_digests(spec.reward.components) == {"signed": content_digest(SOURCE.encode())}
    assert with_sources(spec, root) == spec
    other = job_spec()
    assert with_sources(other, root) == other


OF_TRL = """
def right(completions, solution, **kwargs):
    return [float(text == answer) for text, answer in zip(completions, solution)]


def long(completion, level, factor=2.0):
    return factor * level * len(completion)
"""


def rows_spec(*names: str, **dataset: object) -> JobSpec:
    components = tuple(PluginReward(entry_point=name, file="trl.py") for name in names)
    table = convert({"type": "jsonl", "train_path": "rows.jsonl", **dataset}, JsonlDataset)
    return job_spec(dataset=table, reward__components=components, evaluation__num_prompts=1)


def test_columns_that_a_reward_names_go_along_and_its_rows_need_no_reference(root: StackSettings) -> None:
    folder = Path(root.model_root)
    (folder / "trl.py").write_text(OF_TRL)
    rows = ['{"prompt": "2+2=", "solution": "4", "level": 1}', '{"prompt": "2+3=", "solution": "5", "level": 2}']
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    spec = with_columns(with_sources(rows_spec("right", "long", metadata_columns=["level"]), root))
    assert isinstance(spec.dataset, JsonlDataset)
    assert spec.dataset.metadata_columns == ("level", "solution")
    check_rows(spec, root)
    examples = job_examples(spec, root.spec_root)
    assert [json.loads(example.metadata) for example in examples.train] == [{"level": 1, "solution": "4"}]
    assert with_columns(spec) == spec

    (folder / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n' * 2)
    with pytest.raises(InvalidInput, match=r"no column `solution`, which dataset\.metadata_columns or an argument"):
        check_rows(with_columns(with_sources(rows_spec("right"), root)), root)
    with pytest.raises(InvalidInput, match="there is no column `reference`"):
        check_rows(rows_spec("right"), root)


def test_an_argument_that_no_row_can_have_is_refused_by_name(root: StackSettings) -> None:
    (Path(root.model_root) / "trl.py").write_text("def right(completions, trainer_state):\n    return [0.0]\n")
    with pytest.raises(InvalidInput, match=r"`right` needs `trainer_state`, which is of TRL's trainer") as caught:
        with_columns(with_sources(rows_spec("right"), root))
    assert caught.value.field == "reward.components[0].entry_point"
    (Path(root.model_root) / "trl.py").write_text("def right(completion, level):\n    return 0.0\n")
    sums = job_spec(reward__components=(PluginReward(entry_point="right", file="trl.py"),))
    with pytest.raises(InvalidInput, match="`right` needs `level`, and this data set's rows have no columns"):
        with_columns(with_sources(sums, root))


def test_what_an_installed_package_offers_has_no_source_and_stays_as_it_is(root: StackSettings) -> None:
    offered = job_spec(reward__components=(PluginReward(entry_point="signed"),), environment={"name": "signed"})
    assert with_sources(offered, root) == offered


def test_a_job_keeps_what_the_file_of_its_environment_said_and_a_name_that_is_not_in_it_is_refused(
    root: StackSettings,
) -> None:
    spec = with_sources(job_spec(environment={"name": "signed", "file": "rewards.py"}), root)
    assert spec.environment == EnvironmentSpec(name="signed", file="rewards.py", source=SOURCE)
    assert spec.environment.file_version == f"signed {content_digest(SOURCE.encode())}"
    with pytest.raises(InvalidInput, match=r"rewards\.py has no `Signed`") as caught:
        with_sources(job_spec(environment={"name": "Signed", "file": "rewards.py"}), root)
    assert caught.value.field == "environment.name"


@pytest.mark.parametrize(
    ("spec", "field", "problem"),
    [
        (of_file(file="absent.py"), "file", "absent.py: No such file"),
        (of_file(file="../outside.py"), "file", "leads out of the model root"),
        (of_file(entry_point="sined"), "entry_point", "rewards.py has no `sined`"),
        (of_file(source="def signed(): ..."), "source", "differs from the text of the file"),
        (of_file(file="", source=SOURCE), "file", "no file"),
        (of_file(file="broken.py"), "file", "broken.py is not valid Python"),
        (of_file(file="long.py"), "file", f"is over {MAX_SOURCE_BYTES} bytes"),
    ],
)
def test_a_file_that_can_be_no_reward_is_refused_by_its_field(
    root: StackSettings, spec: JobSpec, field: str, problem: str
) -> None:
    (Path(root.model_root) / "broken.py").write_text("def signed(:")
    (Path(root.model_root) / "long.py").write_text("#" * (MAX_SOURCE_BYTES + 1))
    with pytest.raises(InvalidInput, match=problem) as caught:
        with_sources(spec, root)
    assert caught.value.field == f"reward.components[0].{field}"
