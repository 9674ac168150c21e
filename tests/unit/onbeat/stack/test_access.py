"""A stack's key goes to that stack, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from contracts.errors import InvalidInput, NotFound
from onbeat.client.gateway import GatewayClient
from onbeat.stack.access import StackFile, gateway_access, run_dir_flag, write_stack_file

HERE = "http://127.0.0.1:8011"
ELSEWHERE = "http://gateway.example:8011"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The file of a running stack with the key `stack`."""
    write_stack_file(tmp_path, StackFile(gateway_url=HERE, api_key="stack", pid=os.getpid()))
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "gateway", "flag", "key"),
    [
        ({}, None, None, "stack"),
        ({}, HERE, None, "stack"),
        ({}, f"{HERE}/", None, "stack"),
        ({}, ELSEWHERE, None, ""),
        ({}, "https://127.0.0.1:8011", None, ""),
        ({}, "http://127.0.0.1:8012", None, ""),
        ({}, "http://127.0.0.1:8011@gateway.example", None, ""),
        ({}, ELSEWHERE, "flag", "flag"),
        ({"ONBEAT_GATEWAY_URL": ELSEWHERE}, None, None, ""),
        ({"ONBEAT_GATEWAY_URL": ELSEWHERE, "ONBEAT_API_KEY": "there"}, None, None, "there"),
        ({"ONBEAT_GATEWAY_URL": ELSEWHERE, "ONBEAT_API_KEY": "there"}, "http://third.example", None, ""),
        ({"ONBEAT_GATEWAY_URL": ELSEWHERE, "ONBEAT_API_KEY": "there"}, HERE, None, "stack"),
        ({"ONBEAT_API_KEY": "chosen"}, ELSEWHERE, None, "chosen"),
        ({"ONBEAT_API_KEY": "stack"}, ELSEWHERE, None, ""),
        ({"ONBEAT_API_KEY": "chosen"}, None, None, "chosen"),
    ],
)
def test_a_key_goes_only_to_its_own_address(
    environment: dict[str, str], gateway: str | None, flag: str | None, key: str, run_dir: Path
) -> None:
    assert gateway_access(environment, gateway=gateway, api_key=flag, run_dir=run_dir).key == key


def test_a_redirect_is_not_followed_and_carries_no_key() -> None:
    asked: list[httpx.Request] = []

    def redirect(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(307, headers={"Location": f"{ELSEWHERE}/v1/jobs"})

    with GatewayClient(HERE, "stack", transport=httpx.MockTransport(redirect)) as client:
        for ask in (client.jobs, lambda: list(client.events("job-1"))):
            with pytest.raises(InvalidInput, match=r"it redirects to .*gateway\.example"):
                ask()
    assert {request.url.host for request in asked} == {"127.0.0.1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_stack_file_that_another_user_planted_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(run_dir / "stack.json", 4321, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(InvalidInput, match="belongs to another user"):
        gateway_access({}, gateway=None, api_key=None, run_dir=run_dir)


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidInput) as refused:
        GatewayClient(HERE, "secret\n")
    assert "secret" not in str(refused.value)


def test_a_printed_command_names_the_run_folder_unless_it_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_dir_flag({}, Path("runs")) == run_dir_flag({}, tmp_path / "runs") == ""
    assert run_dir_flag({}, tmp_path / "runs" / "demo") == " --run-dir runs/demo"
    assert run_dir_flag({}, Path("/its own")) == " --run-dir '/its own'"
    for folder in ("runs", "other"):
        assert run_dir_flag({"ONBEAT_RUN_ROOT": "other"}, Path(folder)) == f" --run-dir {folder}"


def test_no_stack_and_no_such_job_are_said_together(tmp_path: Path) -> None:
    (tmp_path / "job-1").mkdir()
    with pytest.raises(InvalidInput, match="no stack is running"):
        gateway_access({"ONBEAT_RUN_ROOT": str(tmp_path)}, gateway=None, api_key=None, run_dir=None, job="job-1")
    with pytest.raises(NotFound, match=r"no stack is running in .*, and job-2 has no folder there \(.*--run-dir DIR\)"):
        gateway_access({"ONBEAT_RUN_ROOT": str(tmp_path)}, gateway=None, api_key=None, run_dir=None, job="job-2")
