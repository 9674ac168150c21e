"""A server that another operator runs: what is sent, what is believed, and what happens when it errs or goes away.

tests/contract/test_engines.py runs the same engine against a real server of vLLM, where vllm is installed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.encoding.arrays import pack_int32, unpack_float32, unpack_int32
from contracts.engines import OpenaiOptions
from contracts.errors import BatchFailed, EngineUnavailable, InvalidInput, WeightsRejected
from contracts.probes import ProbeRow
from contracts.sampling import SamplingParams
from contracts.versions import WeightManifest
from onbeat.data.kept_sets import pack_kept_sets
from producer.engine.http.openai import OpenaiEngine
from producer.engine.http.server_requests import PAUSES_S
from tests.builders import tiny_model_folder
from tests.contract.engine_rigs import Rig, rig_of, scaled, setup
from tests.refusals import refusal_of
from tests.rooms.engines.stand_in_server import StandIn, serving

PROMPTS = ([5, 6, 7], [8])
FAILING = (500, b'{"error": "EngineDeadError"}')


async def at_once(_seconds: float) -> None:
    """Returns at once, in the place of a pause."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny_model_folder(root, "qwen3")
    return root


@pytest.fixture
def server() -> Iterator[StandIn]:
    with serving() as stand_in:
        yield stand_in


def engine_of(folders: Path, run_root: Path, stand_in: StandIn, **changes: Any) -> OpenaiEngine:
    fields: dict[str, Any] = {"url": stand_in.url, "timeout_s": 60.0}
    options = OpenaiOptions(**(fields | changes))
    return OpenaiEngine(setup(folders / "qwen3", weight_root=run_root), options, sleep=at_once)


@pytest.fixture
def rig(folders: Path, tmp_path: Path, server: StandIn) -> Iterator[Rig]:
    built = rig_of("vllm", engine_of(folders, tmp_path, server), folders / "qwen3", tmp_path)
    yield built
    built.close()


def sampled(rig: Rig, manifest: WeightManifest, **changes: Any) -> list[list[int]]:
    groups = rig.generate(manifest, PROMPTS, **changes)
    return [[token for completion in group for token in unpack_int32(completion.token_ids)] for group in groups]


def test_tokens_and_logprobs_come_back_as_the_server_gave_them(rig: Rig) -> None:
    groups = rig.generate(rig.load(), PROMPTS, group_size=3)
    assert [len(group) for group in groups] == [3, 3]
    for completion in (completion for group in groups for completion in group):
        assert unpack_int32(completion.token_ids) == [9, 1]
        assert unpack_float32(completion.generator_logprobs) == [-0.5, -0.25]
        assert completion.finish_reason == "stop"


@pytest.mark.parametrize("changed", [{}, {"min_new_tokens": 1, "logit_bias": {"5": -1.0}, "repetition_penalty": 1.1}])
def test_a_request_leaves_nothing_to_the_servers_defaults(rig: Rig, server: StandIn, changed: dict[str, Any]) -> None:
    sampling = SamplingParams(max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=4, **changed)
    rig.generate(rig.load(), PROMPTS, group_size=3, sampling=sampling, purpose="evaluation")
    bodies = [body for path, body, _ in server.requests if path == "/v1/completions"]
    assert sorted(body["prompt"] for body in bodies) == [[5, 6, 7], [8]]
    assert len({body.pop("seed") for body in bodies}) == 2
    assert {json.dumps({**body, "prompt": []}, sort_keys=True) for body in bodies} == {
        json.dumps(
            {
                "model": "served",
                "prompt": [],
                "n": 3,
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 4,
                "min_p": 0.0,
                "repetition_penalty": changed.get("repetition_penalty", 1.0),
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "logit_bias": changed.get("logit_bias", {}),
                "max_tokens": 7,
                "min_tokens": changed.get("min_new_tokens", 0),
                "ignore_eos": True,
                "stop_token_ids": [1],
                "stop": [],
                "include_stop_str_in_output": True,
                "logprobs": 0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "skip_special_tokens": False,
            },
            sort_keys=True,
        )
    }


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"min_new_tokens": 2}, "ended a completion after 2 tokens, and knows no min_new_tokens = 2"),
        ({"temperature": 0.009}, "sampling.temperature: .* vLLM has no temperature between 0 and 0.01"),
    ],
)
def test_what_a_server_would_ignore_or_change_without_a_word_fails_the_batch(
    rig: Rig, sampling: dict[str, Any], problem: str
) -> None:
    """The stand-in answers two tokens, the second of which is an end, whatever it is asked."""
    with pytest.raises(BatchFailed, match=problem):
        rig.generate(rig.load(), PROMPTS, sampling=SamplingParams(max_new_tokens=7, **sampling))


def test_kept_sets_are_read_by_number_and_a_server_that_does_not_say_them_fails_the_batch(
    rig: Rig, server: StandIn
) -> None:
    manifest, sampling = rig.load(), SamplingParams(max_new_tokens=7, top_k=2)
    others = {f"token_id:{one}": -9999.0 for one in range(20, 30)}
    server.top_logprobs = [{"token_id:9": -0.5, "token_id:4": -1.0, **others}, {"token_id:1": -0.25, **others}]
    (group, _) = rig.generate(manifest, PROMPTS, sampling=sampling)
    assert group[0].kept_sets == pack_kept_sets([np.array([4, 9]), np.array([1])])
    assert {body["logprobs"] for path, body, _ in server.requests if path == "/v1/completions"} == {11}
    server.top_logprobs = [None, None]
    with pytest.raises(BatchFailed, match=r"sampling\.top_k: .* 0 of the 11 most likely tokens"):
        rig.generate(manifest, PROMPTS, sampling=sampling)


def test_vllm_is_paused_while_its_weights_change(rig: Rig, server: StandIn) -> None:
    rig.load()
    calls = [body["method"] if path == "/collective_rpc" else path for path, body, _ in server.requests]
    assert calls == ["/pause", "clear_kv_cache", "load_version", "/resume"]


def test_lost_answers_and_errors_are_asked_again(rig: Rig, server: StandIn) -> None:
    manifest = rig.publish(0)
    server.next = {"/collective_rpc": [FAILING], "/v1/completions": [FAILING, (429, b"busy"), (200, b"{")]}
    rig.run(rig.engine.load_weights(manifest))
    assert sampled(rig, manifest) == [[9, 1, 9, 1]] * 2


def test_a_server_that_stays_broken_ends_the_generator(rig: Rig, server: StandIn) -> None:
    manifest = rig.load()
    server.next = {"/v1/completions": [FAILING] * (2 * len(PROMPTS) * (1 + len(PAUSES_S)))}
    with pytest.raises(EngineUnavailable, match=r"500 .*EngineDeadError"):
        rig.generate(manifest, PROMPTS)


def test_a_server_that_is_gone_ends_the_generator(rig: Rig, server: StandIn) -> None:
    manifest = rig.load()
    rig.engine._requests._http.base_url = "http://127.0.0.1:9"  # type: ignore[attr-defined]
    with pytest.raises(EngineUnavailable, match="ConnectError"):
        rig.generate(manifest, PROMPTS)


def test_a_server_that_hangs_ends_the_generator_at_the_deadline(
    rig: Rig, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = rig.load()
    monkeypatch.setattr(rig.engine, "_timeout_s", 0.2)
    server.hang.clear()
    with pytest.raises(EngineUnavailable, match="is not done after"):
        rig.generate(manifest, PROMPTS)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((400, b'{"error": "prompt is too long"}'), "prompt is too long"),
        ((200, b"<html>"), "does not decode"),
        ((200, b'{"choices": []}'), "answered 0 of 2|does not decode"),
    ],
)
def test_nonsense_fails_the_batch_and_the_next_one_waits_for_a_load(
    rig: Rig, server: StandIn, answer: tuple[int, bytes], reason: str
) -> None:
    manifest = rig.load()
    server.next = {"/v1/completions": [answer] * (2 * len(PROMPTS) * (1 + len(PAUSES_S)))}
    with pytest.raises(BatchFailed, match=reason):
        rig.generate(manifest, PROMPTS)
    assert rig.engine.policy_version is None
    server.next = {}
    assert sampled(rig, rig.load()) == [[9, 1, 9, 1]] * 2


def test_what_other_weights_sampled_is_not_believed(rig: Rig, server: StandIn) -> None:
    manifest = rig.load()
    server.digest = "default"
    with pytest.raises(BatchFailed, match=r"holds the weights `default`.*check that it wasn't restarted"):
        rig.generate(manifest, PROMPTS)
    assert rig.engine.policy_version is None


PROBE_ROWS = [
    ProbeRow(prompt=pack_int32([5, 6]), scored=pack_int32([7, 8])),
    ProbeRow(prompt=pack_int32([4, 3]), scored=pack_int32([2, 9])),
]


def test_log_probs_of_given_tokens_are_asked_of_each_copy_of_the_model(rig: Rig, server: StandIn) -> None:
    rig.load()
    expected = [-7.0, -8.0, -2.0, -9.0]
    assert unpack_float32(rig.run(rig.engine.logprobs(PROBE_ROWS))) == expected
    assert server.asked_copies == ["", ""]
    server.num_copies = 3
    server.asked_copies.clear()
    rig.load(1)
    of_copies = rig.run(rig.engine.logprobs_of_copies(PROBE_ROWS))
    assert [unpack_float32(logprobs) for logprobs in of_copies] == [expected] * 3
    assert sorted(server.asked_copies) == ["0", "0", "1", "1", "2", "2"]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b'{"choices": []}', "0 log-probs of a row of 4 tokens"),
        (b'{"choices": [{"index": 0}]}', "0 log-probs of a row of 4 tokens"),
        (b'{"choices": [{"index": 0, "prompt_logprobs": [null, null]}]}', "2 log-probs of a row of 4 tokens"),
    ],
)
def test_a_server_that_leaves_out_log_probs_of_given_tokens_is_given_the_version_again(
    rig: Rig, server: StandIn, answer: bytes, problem: str
) -> None:
    rig.load()
    server.next = {"/v1/completions": [(200, answer)] * len(PROBE_ROWS)}
    with pytest.raises(BatchFailed, match=problem):
        rig.run(rig.engine.logprobs(PROBE_ROWS))
    assert rig.engine.policy_version is None


def test_a_token_that_a_server_says_nothing_of_is_no_number(rig: Rig, server: StandIn) -> None:
    rig.load()
    answer = (
        b'{"choices": [{"index": 0, "prompt_logprobs": [null, {"6": {"logprob": -1}}, null, {"1": {"logprob": -2}}]}]}'
    )
    server.next = {"/v1/completions": [(200, answer)]}
    values = unpack_float32(rig.run(rig.engine.logprobs(PROBE_ROWS[:1])))
    assert all(map(math.isnan, values))
    assert len(values) == 2


def test_log_probs_of_given_tokens_by_other_weights_than_the_loaded_ones_are_not_believed(
    rig: Rig, server: StandIn
) -> None:
    rig.load()
    server.digest = "default"
    with pytest.raises(
        BatchFailed, match=r"a probe: the server holds the weights `default`.*check that it wasn't restarted"
    ):
        rig.run(rig.engine.logprobs(PROBE_ROWS))
    assert rig.engine.policy_version is None


def test_log_probs_of_given_tokens_are_asked_again_and_have_a_deadline(
    rig: Rig, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.load()
    server.next = {"/v1/completions": [FAILING, (429, b"busy"), (200, b"{")]}
    assert unpack_float32(rig.run(rig.engine.logprobs(PROBE_ROWS))) == [-7.0, -8.0, -2.0, -9.0]
    monkeypatch.setattr(rig.engine, "_timeout_s", 0.2)
    server.hang.clear()
    with pytest.raises(EngineUnavailable, match="measuring a probe is not done after"):
        rig.run(rig.engine.logprobs(PROBE_ROWS))


def test_a_server_without_room_for_a_token_behind_a_row_is_named(rig: Rig, server: StandIn) -> None:
    server.context_tokens = "4"
    rig.load()
    with pytest.raises(
        BatchFailed, match=r"a probe needs 5 tokens of context, the engine has 4 .*rollout\.probe\.tokens"
    ):
        rig.run(rig.engine.logprobs(PROBE_ROWS))


def test_a_version_that_is_damaged_or_refused_is_not_held(rig: Rig, server: StandIn) -> None:
    manifest = rig.publish(1, scaled(rig.tensors, 0.5))
    server.next = {"/collective_rpc": [(200, b'{"results": [null]}'), (200, b'{"results": [{"rejected": "no"}]}')]}
    with pytest.raises(WeightsRejected, match="no"):
        rig.run(rig.engine.load_weights(manifest))
    assert rig.engine.policy_version is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [((404, b"Not Found"), "VLLM_SERVER_DEV_MODE=1"), ((200, b'{"results": []}'), "ranks disagree")],
)
def test_a_vllm_that_was_started_otherwise_is_told_how_to(
    rig: Rig, server: StandIn, answer: tuple[int, bytes], reason: str
) -> None:
    server.next = {"/collective_rpc": [answer]}
    with pytest.raises((InvalidInput, EngineUnavailable), match=reason):
        rig.load()


@pytest.mark.parametrize(
    ("attribute", "wrong", "cure"),
    [("logprobs_mode", "raw_logprobs", "processed_logprobs"), ("max_logprobs", "20", "--max-logprobs -1")],
)
def test_a_vllm_with_other_logprobs_or_too_few_is_refused(
    rig: Rig, server: StandIn, attribute: str, wrong: str, cure: str
) -> None:
    setattr(server, attribute, wrong)
    with refusal_of("ONBEAT_ENGINE_URL", match=f"{wrong}.*{cure}"):
        rig.load()


def test_all_workers_of_a_server_must_hold_one_version(rig: Rig, server: StandIn) -> None:
    server.num_workers = 2
    manifest = rig.load()
    assert sampled(rig, manifest) == [[9, 1] * 2, [9, 1] * 2]
    described = {
        "policy_version": "1",
        "weights_digest": manifest.weights_digest,
        "logprobs_mode": "",
        "rejected": "no",
    }
    results = [described, {**described, "weights_digest": ""}]
    server.next = {
        "/collective_rpc": [(200, b'{"results": [null, null]}'), (200, json.dumps({"results": results}).encode())]
    }
    with pytest.raises(EngineUnavailable, match="load_version: its ranks disagree"):
        rig.load(1)


def test_a_batch_beyond_the_rows_that_a_server_was_started_for_is_not_sent(rig: Rig, server: StandIn) -> None:
    server.context_tokens = "20"
    manifest = rig.load()
    with pytest.raises(BatchFailed, match="needs 23 tokens of context, the model has 20"):
        rig.generate(manifest, PROMPTS, sampling=SamplingParams(max_new_tokens=20))
    assert not [path for path, _, _ in server.requests if path == "/v1/completions"]


def test_the_key_is_sent_and_a_wrong_one_is_named(folders: Path, tmp_path: Path, server: StandIn) -> None:
    server.key = "secret"
    with pytest.raises(InvalidInput) as caught:
        engine_of(folders, tmp_path, server, api_key="wrong")
    assert caught.value.field == "ONBEAT_ENGINE_API_KEY"
    engine = engine_of(folders, tmp_path, server, api_key="secret")
    rig = rig_of("vllm", engine, folders / "qwen3", tmp_path)
    rig.load()
    assert {authorization for _, _, authorization in server.requests} == {"Bearer secret"}
    rig.close()


def test_a_server_that_never_answers_is_named(folders: Path, tmp_path: Path, server: StandIn) -> None:
    server.url = "http://127.0.0.1:9"
    with pytest.raises(EngineUnavailable, match=r"the server at http://127\.0\.0\.1:9"):
        engine_of(folders, tmp_path, server, timeout_s=0.2)
