"""Chooses an iteration's prompts by a pure function of the job's spec and the iteration, also after a resume (I7)."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from contracts.encoding.arrays import pack_int32
from contracts.environments.messages import Message
from contracts.errors import InvalidInput
from contracts.rollouts import Prompt
from contracts.spec.datasets import ChatSpec, MixtureDataset, dataset_field, no_chat_template, sources_of
from contracts.spec.environment import played_by
from contracts.spec.job import JobSpec
from onbeat.data.prompts.completions import given_ids
from onbeat.data.prompts.curriculum import ColumnPool
from onbeat.data.prompts.difficulty import MeasuredPool
from onbeat.data.prompts.environment_prompts import EnvironmentQueries, OpenedPrompts
from onbeat.data.prompts.examples import Example, ExampleSets
from onbeat.data.prompts.pools import Pool, Walk
from onbeat.data.rendering.chat_template import TemplateEnded, TemplateRefuses, invalid
from onbeat.data.rendering.single_turn import RowMessages
from onbeat.data.rendering.text import first_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

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
        environments: EnvironmentQueries | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """environments: the reward service, for a job that has an environment. end_ids: the tokens that end what its
        model samples."""
        self._spec = spec
        self._end_ids = end_ids
        self._context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._chats = {source: part.chat for source, part in spec.tables.items()}
        self._messages = RowMessages(tokenizer, end_ids=end_ids)
        self._checked: set[str] = set()
        """Sources whose table `chat` was checked against the template."""
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
        self._messages.report()
        del self._messages  # and the process of the chat template with it
        pools: list[Pool] = []
        # A job that only evaluates draws no prompt, and may have held out each one.
        if spec.iterations:
            pools = _pools(spec, self._train, {example.example_id: example.difficulty for example in dataset.train})
        self.walk = Walk(pools, num_prompts=spec.rollout.prompts_per_iteration, seed=spec.seed)
        _check_reserves(spec, pools)

    @property
    def train(self) -> Sequence[Prompt]:
        """Every training prompt, in the order of the data sets; the held-out ones of a job that only evaluates."""
        return self._train or self._evaluation

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
        """Returns the examples' prompts in their order; a played example's is its initial observation."""
        prompts: list[Prompt] = []
        plays_all = "" in self._opened
        for source, run in itertools.groupby(examples, lambda example: "" if plays_all else example.source):
            of_source = list(run)
            opened = self._opened.get(source)
            if opened:
                prompts += opened(of_source, held_out=held_out)
            else:
                prompts += self._tokenize(of_source, held_out=held_out)
        return prompts

    def _tokenize(self, examples: Sequence[Example], *, held_out: bool) -> list[Prompt]:
        """Tokenizes examples; of training, too long ones may be left out, and their completions may be learnt."""
        filters = self._spec.rollout.filter_overlong_prompts is True and not held_out
        gives = self._spec.algorithm.learns_given and not held_out
        prompts: list[Prompt] = []
        num_left_out = 0
        # What the tokenizer itself puts before plain text; a chat template writes its own.
        prefix = first_ids(self._tokenizer)
        for start in range(0, len(examples), TOKENIZED_AT_ONCE):
            chunk = examples[start : start + TOKENIZED_AT_ONCE]
            texts = self._texts(chunk)
            token_rows = self._tokenizer(texts, add_special_tokens=False).input_ids
            self._check_controls(chunk, texts, token_rows)
            for example, text, token_ids in zip(chunk, texts, token_rows, strict=True):
                whole = token_ids if self._chat_of(example) else [*prefix, *token_ids]
                try:
                    self._check_length(example, len(whole))
                    completion = UNSET
                    if gives:
                        completion = pack_int32(self._completion_ids(example, text))
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
                        dataset_completion=completion,
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

    def _texts(self, examples: Sequence[Example]) -> list[str]:
        """Returns the prompts as the model reads them."""
        texts: list[str] = []
        for _, run in itertools.groupby(examples, lambda example: (example.source, self._chat_of(example) is None)):
            of_chat = list(run)
            chat = self._chat_of(of_chat[0])
            texts += self._rendered(of_chat, chat) if chat else [example.question for example in of_chat]
        return texts

    def _rendered(self, examples: Sequence[Example], chat: ChatSpec) -> list[str]:
        """Returns the prompts of examples of one source by the chat template, all in one call."""
        self._check_chat(examples[0].source, chat)
        conversations = [_conversation(example) for example in examples]
        try:
            return self._messages.prompts(
                conversations, system=chat.system_prompt, variables=chat.chat_template_kwargs or {}
            )
        except (TemplateRefuses, TemplateEnded) as error:
            example = None
            if isinstance(error, TemplateRefuses):
                example = examples[error.place]
            raise invalid(error, where=(example.origin or example.example_id) if example else "") from error

    def _check_chat(self, source: str, chat: ChatSpec) -> None:
        """Checks a source's table `chat` against the model's template, once. Raises InvalidInput."""
        if source in self._checked:
            return
        self._checked.add(source)
        field = f"{dataset_field(self._spec.dataset, self._spec.evaluation, source)}.chat"
        if not self._tokenizer.chat_template:
            raise no_chat_template(field)
        variables = chat.chat_template_kwargs or {}
        try:
            unread = next((name for name in variables if not self._messages.reads(name)), None)
        except (TemplateRefuses, TemplateEnded) as error:
            raise invalid(error) from error
        if unread is not None:
            raise InvalidInput(
                f"the model's chat template doesn't read `{unread}`",
                field=f"{field}.chat_template_kwargs",
                cure="leave it out, or take its name from the template",
            )
        sampling = self._spec.rollout.sampling
        if self._end_ids and not sampling.stop:
            own_ends = () if self._spec.algorithm.learns_given else sampling.stop_token_ids or ()
            self._messages.check_end(end_ids=[*self._end_ids, *own_ends], variables=variables)

    def _check_controls(
        self, examples: Sequence[Example], texts: Sequence[str], token_rows: Sequence[Sequence[int]]
    ) -> None:
        """Counts chats in which a row's text became a token of control."""
        chats = [place for place, example in enumerate(examples) if self._chat_of(example)]
        self._messages.check_tokens([texts[place] for place in chats], [token_rows[place] for place in chats])

    def _answered(self, example: Example, *, answer: str) -> str:
        """Returns the conversation that the answer ends."""
        chat = self._chat_of(example) or ChatSpec()
        try:
            return self._messages.answered(
                _conversation(example), answer, system=chat.system_prompt, variables=chat.chat_template_kwargs or {}
            )
        except (TemplateRefuses, TemplateEnded) as error:
            raise invalid(error, where=example.origin or example.example_id) from error

    def _completion_ids(self, example: Example, prompt: str) -> list[int]:
        return given_ids(
            self._tokenizer,
            example,
            prompt=prompt,
            write=partial(self._answered, example) if self._chat_of(example) else None,
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
                cure="raise the limit, shorten the prompt, or leave such prompts out by "
                "rollout.filter_overlong_prompts = true",
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
    """Returns the sources of the data set, each with its prompts' places. Raises InvalidInput for one without any."""
    dataset = spec.dataset
    weights = {"": 1.0}
    if isinstance(dataset, MixtureDataset):
        weights = {source.name: source.weight for source in dataset.sources}
    pools: list[Pool] = []
    for name, table in sources_of(dataset).items():
        places = [place for place, prompt in enumerate(prompts) if prompt.source == (name or UNSET)]
        if not places:
            raise InvalidInput(f"no training prompt of `{name}` is left", field="dataset.sources", cure="leave it out")
        pool = Pool(places=places, name=name, weight=weights[name])
        if table.drawn_by == "curriculum":
            pool = ColumnPool.of(spec, pool, [difficulty[prompts[place].prompt_id] for place in places])
        elif table.drawn_by == "difficulty_pools":
            pool = MeasuredPool.of(spec, pool)
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


def _conversation(example: Example) -> tuple[Message, ...]:
    """Returns the messages before the answer. Raises InvalidInput where the assistant has said the last one."""
    messages = example.messages or (Message(role="user", content=example.question),)
    if messages[-1].role == "assistant":
        raise InvalidInput(
            f"{example.origin or example.example_id}: the prompt ends with a message of the assistant, and "
            "continuing an answer that is begun (prefill) isn't supported",
            field=example.field,
            cure="leave its last message out, or give the whole conversation as `messages`, whose last answer is the "
            "completion",
        )
    return messages


def _numbered(prompts: Sequence[Prompt], *, first: int = 0) -> tuple[Prompt, ...]:
    """Numbers each prompt by its position, which seeds its samples (I7)."""
    return tuple(msgspec.structs.replace(prompt, index=index) for index, prompt in enumerate(prompts, first))
