"""Chooses an iteration's prompts by a pure function of the job's spec and the iteration, also after a resume (I7)."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from contracts.encoding.arrays import pack_int32
from contracts.errors import InvalidInput
from contracts.rollouts import Prompt
from contracts.spec import JobSpec
from contracts.spec_tables.datasets import ChatSpec, MixtureDataset, dataset_field, no_chat_template, sources_of
from contracts.spec_tables.environment import played_by
from onbeat.process.entry_points import load_entry_point
from onbeat.prompts.examples import Example, ExampleSets
from onbeat.prompts.openings import OpenedPrompts, OpeningService
from onbeat.prompts.places import Pool, Walk
from onbeat.rendering import chat_template
from onbeat.rendering.text import first_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

DRAWS = "onbeat.draws"
"""Group of the functions (spec, a source's pool, the difficulty of each place) → the pool that is drawn from."""
TOKENIZED_AT_ONCE = 1024
TOO_LONG = ("rollout.max_prompt_tokens", "rollout.sampling.max_new_tokens")
"""The limits that an example may be left out for; the second one also stands for the model's context."""


class PromptSource:
    """Tokenises both sets once, and hands out each iteration's prompts.

    Raises InvalidInput that names the field if a prompt is empty or too long, or if the model's context
    (`context_tokens`) cannot hold a prompt and its answer.
    """

    def __init__(
        self,
        dataset: ExampleSets,
        *,
        tokenizer: PreTrainedTokenizerBase,
        spec: JobSpec,
        context_tokens: int,
        environments: OpeningService | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """environments: the reward service, for a job that has an environment. end_ids: the tokens that end what its
        model samples."""
        self._spec = spec
        self._end_ids = end_ids
        self._context_tokens = context_tokens
        self._tokenizer = tokenizer
        # Looked for once: it takes milliseconds among all packages, and says so in the log.
        learns = spec.algorithm.learns_given
        self._given_ids: Any = learns and load_entry_point("onbeat.completions", "given", field="algorithm.loss")
        self._chats = {source: part.chat for source, part in spec.tables.items()}
        self._opened = {
            name: OpenedPrompts(
                spec, name, service=environments, tokenizer=tokenizer, end_ids=end_ids, check_length=self._check_length
            )
            for name in spec.environments
        }
        self.environment = played_by({source: opened.version for source, opened in self._opened.items()})
        """Package and version of each environment, as its service names them; "" in a job without one."""
        self._train = self._prompts(dataset.train, held_out=False)
        self._evaluation = self._prompts(dataset.evaluation, held_out=True)
        pools = _pools(spec, self._train, {example.example_id: example.difficulty for example in dataset.train})
        self.walk = Walk(pools, num_prompts=spec.rollout.prompts_per_iteration, seed=spec.seed)
        _check_reserves(spec, pools)

    def training_prompts(self, iteration: int) -> tuple[Prompt, ...]:
        """Returns the next `rollout.prompts_per_iteration` prompts."""
        return _numbered([self._train[place] for place in self.walk.places(iteration)])

    def reserve_prompts(self, iteration: int) -> tuple[tuple[Prompt, ...], ...]:
        """Returns [rollout.max_resamples][rollout.prompts_per_iteration]: what takes the places of `training_prompts`.

        None of them is among those, and none comes twice as long as its source has others.
        """
        rollout = self._spec.rollout
        num_prompts = rollout.prompts_per_iteration
        places = self.walk.reserves(iteration, num_rounds=rollout.max_resamples)
        reserves = _numbered([self._train[place] for place in places], first=num_prompts)
        return tuple(reserves[start : start + num_prompts] for start in range(0, len(reserves), num_prompts))

    def evaluation_prompts(self) -> tuple[Prompt, ...]:
        """Returns all held-out prompts, set by set, the same at every evaluation; () where evaluation is off."""
        return _numbered(self._evaluation)

    def _prompts(self, examples: Sequence[Example], *, held_out: bool) -> list[Prompt]:
        """The examples' prompts in their order, of those that an environment plays its openings."""
        prompts: list[Prompt] = []
        plays_all = "" in self._opened
        for source, run in itertools.groupby(examples, lambda one: "" if plays_all else one.source):
            of_source, opened = list(run), self._opened.get(source)
            prompts += opened(of_source, held_out=held_out) if opened else self._tokenize(of_source, held_out=held_out)
        return prompts

    def _tokenize(self, examples: Sequence[Example], *, held_out: bool) -> list[Prompt]:
        """Those that are trained may be left out as too long, and their completions may be learnt."""
        filters = self._spec.rollout.filter_overlong_prompts is True and not held_out
        gives = self._spec.algorithm.learns_given and not held_out
        prompts, num_left_out = [], 0
        # What the tokenizer itself puts before plain text; a chat template writes its own.
        prefix = first_ids(self._tokenizer)
        for start in range(0, len(examples), TOKENIZED_AT_ONCE):
            chunk = examples[start : start + TOKENIZED_AT_ONCE]
            texts = [self._text(example) for example in chunk]
            token_rows = self._tokenizer(texts, add_special_tokens=False).input_ids
            for example, text, token_ids in zip(chunk, texts, token_rows, strict=True):
                whole = token_ids if self._chat_of(example) else [*prefix, *token_ids]
                try:
                    self._check_length(example, len(whole))
                    given = pack_int32(self._given(example, text)) if gives else UNSET
                except InvalidInput as error:
                    if not filters or error.field not in TOO_LONG:
                        raise
                    num_left_out += 1
                    continue
                prompts.append(
                    Prompt(
                        prompt_id=example.example_id,
                        index=0,
                        token_ids=pack_int32(whole),
                        text=text,
                        reference=example.reference,
                        task_entry=example.task_entry,
                        metadata=example.metadata or UNSET,
                        source=example.source or UNSET,
                        given=given,
                    )
                )
        if num_left_out:
            log.warning("%d of %d training prompts are too long, and left out", num_left_out, len(examples))
        if filters and not prompts:
            raise InvalidInput("every training prompt is too long", field=TOO_LONG[0], cure="raise the limit")
        return prompts

    def _chat_of(self, example: Example) -> ChatSpec | None:
        """Messages are a chat in any case."""
        return self._chats[example.source] or (ChatSpec() if example.messages else None)

    def _text(self, example: Example, *, answer: str = "") -> str:
        """The prompt, as the model reads it, or the conversation that the answer ends."""
        chat = self._chat_of(example)
        messages = example.messages or (("user", example.question),)
        if not chat:
            return example.question
        field = f"{dataset_field(self._spec.dataset, self._spec.evaluation, example.source)}.chat"
        return render_chat(self._tokenizer, messages, chat, answer=answer, field=field)

    def _given(self, example: Example, prompt: str) -> list[int]:
        return self._given_ids(
            self._tokenizer,
            example,
            prompt=prompt,
            write=partial(self._text, example) if self._chat_of(example) else None,
            end_ids=self._end_ids,
            most_tokens=self._spec.rollout.sampling.max_new_tokens,
        )

    def _check_length(self, example: Example, num_tokens: int) -> None:
        rollout = self._spec.rollout
        if num_tokens == 0:
            raise InvalidInput(f"prompt {example.example_id} is empty", field=example.field, cure="remove it")
        if num_tokens > rollout.max_prompt_tokens:
            raise InvalidInput(
                f"prompt {example.example_id} has {num_tokens} tokens, the limit is {rollout.max_prompt_tokens}",
                field="rollout.max_prompt_tokens",
                cure="raise the limit, or shorten the prompt",
            )
        bound, longest = self._spec.longest_completion(example.source)
        if num_tokens + longest > self._context_tokens:
            raise InvalidInput(
                f"prompt {example.example_id} with its answer takes up to {num_tokens} + {longest} tokens, "
                f"the model's context holds {self._context_tokens}",
                field=bound,
                cure="lower it, shorten the prompt, or choose a model with a longer context",
            )


def _pools(spec: JobSpec, prompts: Sequence[Prompt], difficulty: Mapping[str, float]) -> list[Pool]:
    """The sources of the data set, each with its prompts' places. Raises InvalidInput for one that has none left."""
    dataset = spec.dataset
    weights = {one.name: one.weight for one in dataset.sources} if isinstance(dataset, MixtureDataset) else {"": 1.0}
    pools = []
    for name, table in sources_of(dataset).items():
        places = [place for place, prompt in enumerate(prompts) if prompt.source == (name or UNSET)]
        if not places:
            raise InvalidInput(f"no training prompt of `{name}` is left", field="dataset.sources", cure="leave it out")
        pool = Pool(places=places, name=name, weight=weights[name])
        if table.drawn_by:
            draws = load_entry_point(DRAWS, table.drawn_by, field=f"dataset.{table.drawn_by}")
            pool = draws(spec, pool, [difficulty[prompts[place].prompt_id] for place in places])
        pools.append(pool)
    return pools


def _check_reserves(spec: JobSpec, pools: Sequence[Pool]) -> None:
    """Raises InvalidInput where an iteration may take a source whole, so that none of it is left to resample."""
    num_prompts = spec.rollout.prompts_per_iteration
    total = math.fsum(pool.weight for pool in pools)
    for pool in pools if spec.rollout.max_resamples else ():
        most = math.ceil(num_prompts * pool.weight / total)
        if len(pool.places) <= most:
            raise InvalidInput(
                f"an iteration takes {most} prompts, and the data set {pool.name and f'`{pool.name}` '}has "
                f"{len(pool.places)}: none is left to resample",
                field="rollout.max_resamples",
                cure="set it to 0, take fewer prompts an iteration, or a larger data set",
            )


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[tuple[str, str]],
    chat: ChatSpec,
    *,
    answer: str = "",
    field: str = "dataset.chat",
) -> str:
    """Writes (role, content) of each message, behind the system turn where there is one, and the assistant's opening,
    or the assistant's turn with its answer. field: that of `chat`, for a refusal."""
    if not tokenizer.chat_template:
        raise no_chat_template(field)
    system = [("system", chat.system_prompt)] if chat.system_prompt and messages[0][0] != "system" else []
    answered = [("assistant", answer)] if answer else []
    rows = [{"role": role, "content": content} for role, content in (*system, *messages, *answered)]
    variables = chat.chat_template_kwargs or {}
    try:
        for name in variables:
            if not chat_template.reads(tokenizer, name):
                raise InvalidInput(
                    f"the model's chat template doesn't read `{name}`",
                    field=f"{field}.chat_template_kwargs",
                    cure="leave it out, or take its name from the template",
                )
        return chat_template.write(tokenizer, rows, opens_turn=not answer, variables=variables)
    except chat_template.REFUSALS as error:
        raise InvalidInput(
            f"the model's chat template refuses the messages: {error}", field="model.path", cure="use another template"
        ) from error


def _numbered(prompts: Sequence[Prompt], *, first: int = 0) -> tuple[Prompt, ...]:
    """Numbers each prompt by its position, which seeds its samples (I7)."""
    return tuple(msgspec.structs.replace(prompt, index=index) for index, prompt in enumerate(prompts, first))
