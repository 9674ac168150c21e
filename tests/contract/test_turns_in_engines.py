"""Later turns in engines: the bytes of a trajectory are the same whether its keys and values were kept or fed again.

Rows that go on, observations and what is forgotten in between are ragged; batches come and go beside them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from contracts.encoding.arrays import pack_int32, unpack_float32, unpack_int32
from contracts.engines import TransformersOptions
from contracts.rollouts import Completion, PromptBatch, turn_seed
from contracts.sampling import SamplingParams
from contracts.settings import StackSettings
from contracts.spec.job import ModelSpec
from producer.engine.base import Trajectories, Turn
from producer.engine.growing_rows import GrowingBatch
from producer.engine.sampling import Ends
from producer.engine.transformers import row_independence
from producer.engine.transformers.engine import TransformersEngine
from producer.engine.transformers.row_independence import Verdict, judge
from producer.engine.transformers.shared_decoding import SharedDecoding
from producer.engine.transformers.trajectory_caches import KeptRows
from producer.served_model import LoadedModel
from producer.wiring import fingerprint_for
from tests.builders import DEVICE, char_tokenizer, job_spec, prompt_batch, tiny_model_folder
from tests.contract.engine_rigs import Rig, fake_rig, rig_of, scaled, setup, transformers_rig, under, untrained_model
from tests.contract.test_row_steps import LEAN, OWN, PACKED_BYTES, decode
from tests.fakes import spell

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU an engine samples one batch at a time")

ENDS = Ends(frozenset({1}))
PROMPTS = ([5, 6, 7], [8], [4, 9, 10, 11, 12, 3, 2] * 3, [13, 5])
SAMPLING = SamplingParams(max_new_tokens=5)
Forget = Callable[[Trajectories, int], Awaitable[None]]
"""Is called before each later turn, with its number."""


class Generates(Protocol):
    async def generate(self, batch: PromptBatch, turn: Turn, /) -> list[list[Completion]]: ...


async def nothing(trajectories: Trajectories, turn: int) -> None:
    """Leaves all that is kept."""


async def all_of_it(trajectories: Trajectories, turn: int) -> None:
    trajectories.pasts.clear()


async def every_third(trajectories: Trajectories, turn: int) -> None:
    for row in list(trajectories.pasts)[turn % 3 :: 3]:
        del trajectories.pasts[row]


@dataclass
class Game:
    """What an environment would have the rows of a batch see: a function of row, turn and what was sampled."""

    prompt_batch: PromptBatch
    contexts: dict[int, list[int]] = field(default_factory=dict)
    """Row → all its tokens, of those that go on."""
    turn: int = 0

    def __post_init__(self) -> None:
        prompts = [prompt for prompt in self.prompt_batch.prompts for _ in range(self.prompt_batch.group_size)]
        self.contexts = {row: unpack_int32(prompt.token_ids) for row, prompt in enumerate(prompts)}

    def take(self, completions: Sequence[Sequence[Completion]]) -> None:
        """Appends a turn and what is said to it; every fifth row has no further one."""
        flat = [one for group in completions for one in group]
        self.turn += 1
        for row, completion in zip(list(self.contexts), flat, strict=True):
            sampled = unpack_int32(completion.token_ids)
            said = [3 + (sampled[0] + 7 * row + number) % 50 for number in range(1 + (5 * row + 3 * self.turn) % 21)]
            self.contexts[row] += sampled + said
            if (row + self.turn) % 5 == 0:
                del self.contexts[row]

    def next_batch(self) -> PromptBatch:
        group_size = self.prompt_batch.group_size
        prompts = [
            replace(
                self.prompt_batch.prompts[row // group_size],
                token_ids=pack_int32(context),
                sampler_seed=turn_seed(
                    self.prompt_batch,
                    self.prompt_batch.prompts[row // group_size],
                    sample=row % group_size,
                    turn=self.turn,
                ),
            )
            for row, context in self.contexts.items()
        ]
        return replace(self.prompt_batch, group_size=1, prompts=tuple(prompts))


async def played(
    engine: Generates,
    prompt_batch: PromptBatch,
    forget: Forget = nothing,
    *,
    play: type[Game] = Game,
    num_turns: int = 4,
) -> tuple[list[list[list[Completion]]], int]:
    """All turns, and the number of tokens before them that were kept."""
    game, trajectories, num_kept = play(prompt_batch), Trajectories(prompt_batch=prompt_batch), 0
    batch, turn = prompt_batch, Turn(trajectories=trajectories)
    sampled = []
    while True:
        sampled.append(await engine.generate(batch, turn))
        game.take(sampled[-1])
        num_kept += turn.num_kept_tokens
        if game.turn == num_turns:
            return sampled, num_kept
        await forget(trajectories, game.turn)
        batch, turn = game.next_batch(), Turn(trajectories=trajectories, rows=list(game.contexts))


@functools.cache
def judged(name: str) -> tuple[PreTrainedModel, Verdict]:
    model = untrained_model((LEAN | OWN)[name])
    with torch.inference_mode():
        verdict = judge(model, most_rows=64, most_packed_bytes=PACKED_BYTES)
    assert verdict.problem == ""
    return model, verdict


class Decoder:
    """An engine that is nothing but a SharedDecoding; other batches join before each of its own and after."""

    def __init__(self, name: str, *, company: Sequence[PromptBatch] = (), most_rows: int = 64) -> None:
        model, verdict = judged(name)
        assert verdict.step is not None
        bounds: dict[str, Any] = {"most_rows": most_rows, "most_bytes": 2**30}
        self._decoding = SharedDecoding(
            model, verdict.step, ENDS, alike=verdict.alike, kept_rows=KeptRows(2**30), **bounds
        )
        self._company = company

    async def generate(self, batch: PromptBatch, turn: Turn) -> list[list[Completion]]:
        return completions_of(self._decoding, GrowingBatch(batch=batch, turn=turn), self._company)


def decoded(
    name: str, prompt_batch: PromptBatch, forget: Forget, *, play: type[Game] = Game, **options: Any
) -> tuple[list[list[list[Completion]]], int]:
    return asyncio.run(played(Decoder(name, **options), prompt_batch, forget, play=play))


@torch.inference_mode()
def completions_of(
    decoding: SharedDecoding, growing: GrowingBatch, company: Sequence[PromptBatch]
) -> list[list[Completion]]:
    before, after = company[::2], company[1::2]
    for batch in before:
        decoding.join(GrowingBatch(batch=batch))
    for _ in range(2 * bool(before)):
        decoding.advance()
    decoding.join(growing)
    for batch in after:
        decoding.advance()
        decoding.join(GrowingBatch(batch=batch))
    while not growing.finished:
        assert decoding.advance() == []
    return growing.completions


def prompt_batch_of(group_size: int = 3, **changes: Any) -> PromptBatch:
    return prompt_batch(PROMPTS, group_size=group_size, sampling=SAMPLING, **changes)


def companies() -> list[PromptBatch]:
    return [
        prompt_batch([[5] * 30, [8, 9]], group_size=4, sampling=SamplingParams(max_new_tokens=9), iteration=1),
        prompt_batch([[11] * 20, [12]], group_size=3, sampling=SamplingParams(max_new_tokens=14), iteration=2),
    ]


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, whatever the tests were started with."""
    before = torch.get_num_threads()
    monkeypatch.setattr("producer.engine.transformers.engine.STARTED_THREADS", 1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [*LEAN, *OWN])
def test_a_kept_past_and_one_that_is_fed_again_give_the_same_bytes_alone_and_in_any_company(name: str) -> None:
    expected, num_kept = decoded(name, prompt_batch_of(), nothing)
    assert num_kept > 0
    assert decoded(name, prompt_batch_of(), all_of_it) == (expected, 0)
    some, _ = decoded(name, prompt_batch_of(), every_third)
    assert some == expected
    for forget in (nothing, every_third):
        together, _ = decoded(name, prompt_batch_of(), forget, company=companies())
        assert together == expected
    lone, _ = decoded(name, prompt_batch_of(), every_third, most_rows=0)
    assert lone == expected


@pytest.mark.parametrize("group_size", [1, 2, 9, 20])
def test_any_number_of_rows_has_them(group_size: int) -> None:
    """Up to 80 rows: more than are fed at once, and than the self-test compared at the start."""
    expected, _ = decoded("qwen3", prompt_batch_of(group_size), nothing)
    assert decoded("qwen3", prompt_batch_of(group_size), every_third, company=companies())[0] == expected


def test_more_rows_are_compared_by_the_weights_that_the_model_has_by_then() -> None:
    """Up to 128 rows are multiplied by packed weights, more of them aren't."""
    model = untrained_model(LEAN["qwen3"])
    with torch.inference_mode():
        verdict = judge(model, most_rows=64, most_packed_bytes=PACKED_BYTES)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        assert verdict.alike is not None
        assert verdict.alike(192) == ""


@pytest.mark.parametrize("name", [*LEAN, *OWN])
def test_log_probs_of_a_later_turn_are_those_of_a_full_forward_pass(name: str) -> None:
    (model, _), prompt_batch = judged(name), prompt_batch_of()
    sampled, _ = decoded(name, prompt_batch, nothing)
    tolerance = 0.3 if model.dtype == torch.bfloat16 else 1e-3
    game = Game(prompt_batch)
    for completions in sampled[:-1]:
        game.take(completions)
    for context, (completion,) in zip(game.contexts.values(), sampled[-1], strict=True):
        tokens = context + unpack_int32(completion.token_ids)
        with torch.inference_mode():
            full = model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        expected = [full[at - 1, tokens[at]].item() for at in range(len(context), len(tokens))]
        assert unpack_float32(completion.generator_logprobs) == pytest.approx(expected, abs=tolerance)


class Rewritten(Game):
    """Tokens that an engine has kept are others at the next turn."""

    def next_batch(self) -> PromptBatch:
        for row, context in self.contexts.items():
            context[-3 - row] = 3
        return super().next_batch()


class BegunAgain(Game):
    """Every other row is at its prompt again."""

    def take(self, completions: Sequence[Sequence[Completion]]) -> None:
        super().take(completions)
        prompts = [unpack_int32(prompt.token_ids) for prompt in self.prompt_batch.prompts]
        self.contexts = {row: prompts[row] if row % 2 else context for row, context in self.contexts.items()}


class BeginsAnew(Game):
    """A row has a part of its prompt in common with what it sees next, then all of it, then nothing."""

    def take(self, completions: Sequence[Sequence[Completion]]) -> None:
        super().take(completions)
        for row in self.contexts:
            prompt = unpack_int32(self.prompt_batch.prompts[row].token_ids)
            common = (prompt[: len(prompt) // 2], prompt, [])[(row + self.turn) % 3]
            self.contexts[row] = [*common, *([2 + row + self.turn] * (5 + row)), 7]


@pytest.mark.parametrize("play", [Rewritten, BegunAgain, BeginsAnew])
def test_of_a_context_that_is_another_one_the_common_tokens_alone_are_kept(play: type[Game]) -> None:
    prompt_batch = prompt_batch_of(1)
    expected, num_kept = decoded("qwen3", prompt_batch, nothing, play=play)
    assert num_kept > 0
    assert decoded("qwen3", prompt_batch, all_of_it, play=play)[0] == expected


def test_where_fed_tokens_have_other_bits_than_stepped_ones_turns_are_batches_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = untrained_model(LEAN["qwen3"])
    honest = row_independence.LeanStep.feed

    def otherwise(step: Any, tokens: torch.Tensor, positions: torch.Tensor, cache: Any) -> None:
        honest(step, tokens, positions, cache)
        if len(tokens) > 1:
            cache._store *= 1.0 + 2e-7

    monkeypatch.setattr(row_independence.LeanStep, "feed", otherwise)
    with torch.inference_mode():
        verdict = judge(model, most_rows=64)
    assert verdict.alike is None
    assert "are fed at once" in verdict.problem
    monkeypatch.undo()
    assert verdict.step is not None
    decoding = SharedDecoding(model, verdict.step, ENDS, most_rows=0, most_bytes=2**30, kept_rows=KeptRows(2**30))
    prompt_batch = prompt_batch_of()
    trajectories, game = Trajectories(prompt_batch=prompt_batch), Game(prompt_batch)
    game.take(completions_of(decoding, GrowingBatch(batch=prompt_batch, turn=Turn(trajectories=trajectories)), ()))
    later = game.next_batch()
    turn = Turn(trajectories=trajectories, rows=list(game.contexts))
    expected = decode(decoding, [[later]])[0]
    assert completions_of(decoding, GrowingBatch(batch=later, turn=turn), ()) == expected
    assert (trajectories.pasts, turn.num_kept_tokens) == ({}, 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for architecture in ("qwen3", "llama"):
        tiny_model_folder(root, architecture, tied=True)  # type: ignore[arg-type]
    return root


@pytest.fixture(params=["fake", "qwen3", "llama"])
def rig(request: pytest.FixtureRequest, folders: Path, tmp_path: Path) -> Iterator[Rig]:
    built = fake_rig(tmp_path) if request.param == "fake" else transformers_rig(request.param, folders, tmp_path)
    yield built
    built.close()


OPTIONS = {
    "alone": TransformersOptions(shared_sequences=1),
    "nothing kept": TransformersOptions(turns_cache_mb=0),
    "unpacked": TransformersOptions(packed_weights_mb=0),
}


def test_an_engine_gives_turns_the_same_bytes_whatever_it_kept_and_whatever_it_samples_beside_them(rig: Rig) -> None:
    manifest = rig.load()
    prompt_batch = under(manifest, PROMPTS, group_size=3, sampling=SAMPLING)
    others = [under(manifest, PROMPTS[:2], group_size=2, sampling=SAMPLING, iteration=number) for number in (1, 2)]
    expected, num_kept = rig.run(played(rig.engine, prompt_batch))
    assert (num_kept > 0) == (rig.kind != "fake")

    async def together() -> list[Any]:
        plain = asyncio.gather(*(rig.engine.generate(batch) for batch in others))
        runs = asyncio.gather(*(played(rig.engine, prompt_batch, forget) for forget in (nothing, every_third)))
        await plain
        return [sampled for sampled, _ in await runs]

    assert rig.run(together()) == [expected] * 2
    assert rig.run(played(rig.engine, prompt_batch, all_of_it))[0] == expected


def test_tokens_before_later_turns_are_counted_by_where_they_came_from(rig: Rig) -> None:
    prompt_batch = under(rig.load(), PROMPTS, group_size=3, sampling=SAMPLING)
    loaded = LoadedModel(model=ModelSpec(path="m"), deterministic=True, engine=rig.engine, detokenizer=spell)

    async def played_and_counted() -> tuple[int, int]:
        game, trajectories = Game(prompt_batch), Trajectories(prompt_batch=prompt_batch)
        turn = Turn(trajectories=trajectories)
        game.take(await loaded.generate(prompt_batch, turn, deadline_s=60.0))
        assert not loaded.context_tokens
        later = Turn(trajectories=trajectories, rows=list(game.contexts))
        await loaded.generate(game.next_batch(), later, deadline_s=60.0)
        return sum(map(len, game.contexts.values())), later.num_kept_tokens

    num_tokens, num_kept = rig.run(played_and_counted())
    assert loaded.context_tokens == {"kept": num_kept, "fed": num_tokens - num_kept}


def test_a_job_with_turns_has_an_engine_fingerprint_of_its_own(folders: Path) -> None:
    settings = StackSettings(api_key="key", reward_key="key", model_root=str(folders))
    plain = job_spec(model__path="qwen3")
    with_turns = job_spec(model__path="qwen3", environment={"name": "echo", "renderer": "text"}, reward__components=[])
    found = [fingerprint_for(spec, engine=TransformersOptions(), settings=settings) for spec in (plain, with_turns)]
    assert found[1] == f"{found[0]}; turn steps 1"


@pytest.mark.parametrize("number", [1, 32])
@pytest.mark.parametrize("name", OWN)
def test_how_many_sequences_share_steps_changes_no_byte_of_any_architecture(
    name: str, number: int, tmp_path: Path
) -> None:
    """A lone batch of transformers' own cache and forward would have others."""
    model, verdict = judged(name)
    assert verdict.step is not None
    model.save_pretrained(tmp_path / "m")
    char_tokenizer().save_pretrained(tmp_path / "m")
    engine = TransformersEngine(setup(tmp_path / "m"), TransformersOptions(shared_sequences=number))
    rig = rig_of(name, engine, tmp_path / "m", tmp_path / "runs")
    asked = under(rig.load(), PROMPTS, group_size=3, sampling=SAMPLING)
    decoding = SharedDecoding(model, verdict.step, ENDS, most_rows=64, most_bytes=2**30)
    assert rig.run(engine.generate(asked)) == decode(decoding, [[asked]])[0]
    rig.close()


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_changes_a_byte_of_a_turn(name: str, folders: Path, tmp_path: Path) -> None:
    answers = []
    for number, options in enumerate((None, OPTIONS[name])):
        rig = transformers_rig("qwen3", folders, tmp_path / str(number), options)
        prompt_batch = under(rig.load(), PROMPTS, group_size=3, sampling=SAMPLING)
        answers.append(rig.run(played(rig.engine, prompt_batch)))
        rig.close()
    assert answers[0][0] == answers[1][0]
    assert (answers[1][1] == 0) == (name == "nothing kept")


def test_what_is_kept_stays_within_its_bound_and_ends_with_its_trajectories(folders: Path, tmp_path: Path) -> None:
    rig = transformers_rig("qwen3", folders, tmp_path, TransformersOptions(turns_cache_mb=1))
    kept: KeptRows = rig.engine._kept_rows  # type: ignore[attr-defined]
    longest = [[5 + number % 40 for number in range(70)]] * 2
    prompt_batch = under(rig.load(), longest, group_size=40, sampling=SAMPLING)
    seen: list[tuple[int, int]] = []

    async def note(trajectories: Trajectories, turn: int) -> None:
        seen.append((len(trajectories.pasts), kept.free_bytes))

    rig.run(played(rig.engine, prompt_batch, note, num_turns=2))
    assert all(0 < num_rows < 80 and 0 <= free_bytes < 2**20 for num_rows, free_bytes in seen), seen
    # The engine's thread may still be at the end of the last turn.
    rig.run(rig.engine.wake(num_threads=None))
    assert kept.free_bytes == 2**20
    rig.close()


def test_other_weights_and_a_pause_end_what_was_kept(folders: Path, tmp_path: Path) -> None:
    rig = transformers_rig("qwen3", folders, tmp_path)
    first = rig.load()
    prompt_batch = under(first, PROMPTS, group_size=3, sampling=SAMPLING)
    expected, _ = rig.run(played(rig.engine, prompt_batch))

    async def replaced(trajectories: Trajectories, turn: int) -> None:
        assert trajectories.pasts
        await rig.engine.load_weights(rig.publish(1, scaled(rig.tensors, 0.5)))
        await rig.engine.load_weights(first)

    async def paused(trajectories: Trajectories, turn: int) -> None:
        assert trajectories.pasts
        await rig.engine.sleep()
        await rig.engine.wake(num_threads=None)

    for forget in (replaced, paused):
        assert rig.run(played(rig.engine, prompt_batch, forget)) == (expected, 0)
    rig.close()
