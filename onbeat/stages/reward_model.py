"""A reward model: a transformers sequence classifier with one output, which reads a prompt and its completion as text.

    with a chat template of its own    [{user: prompt}, {assistant: completion}], by that template
    without                            the tokenizer's pair of texts, with the separators that it puts between them

A row goes through by itself, so that its score depends on nothing beside it: no padding, no company. Texts are data:
what spells a special token of the model's tokenizer is broken up by a space, so that no completion can end its own turn
and write the next one. A text that is longer than the model's context is cut where the stage's `truncate` says so, and
else can't be judged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from broker.stage_side import ClaimedItem
from consumer.gradient.assembly import device_of, set_up_torch
from contracts.errors import CompletionUnjudged, InvalidInput, first_line
from contracts.experience.columns import ColumnValues
from contracts.rewards import StageReason
from contracts.settings import StackSettings
from contracts.spec.stages import RewardModelStage
from onbeat.data.named_files import reading_model
from onbeat.data.rendering.chat_template import COSTS_CURE, ChatTemplate, TemplateEnded, TemplateRefuses
from onbeat.stages.served_stages import ServedStage, field_of, file_digests_of, model_folders, renamed
from onbeat.weights.base_model.text_model import MAKES_A_MODEL
from onbeat.weights.model_folder import LOADING_ERRORS, context_tokens, load_tokenizer


class RewardModel:
    """A StageModel of a sequence classifier."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, settings: StackSettings, stage: ServedStage
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._settings = settings
        self._spec = stage.spec
        self._column = stage.node.outputs[0].name
        self._field = field_of(stage, "model")
        self._truncate = stage.stage.truncate if isinstance(stage.stage, RewardModelStage) else "never"
        self._context_tokens = context_tokens(model.config.get_text_config())
        self._vocabulary_size = model.get_input_embeddings().num_embeddings
        self._special = special_tokens_pattern(tokenizer)

    def values(self, item: ClaimedItem) -> ColumnValues:
        set_up_torch(self._settings, self._spec)
        pairs = zip(item.inputs["prompt"], item.inputs["text"], strict=True)
        scores = [self._score(prompt.decode(), completion.decode()) for prompt, completion in pairs]
        return {self._column: [np.array([score], dtype="<f4").tobytes() for score in scores]}

    def _score(self, prompt: str, completion: str) -> float:
        token_ids = self._within_context(prompt, completion)
        if not token_ids:
            raise self._unjudged("no_answer", "prompt and completion are no token at all to its tokenizer")
        if max(token_ids) >= self._vocabulary_size:
            raise InvalidInput(f"its tokenizer has ids above its {self._vocabulary_size} embeddings", field=self._field)
        tokens = torch.tensor([token_ids], device=self._model.device)
        with torch.no_grad():
            score = self._model(input_ids=tokens).logits[0, 0].float().item()
        if not np.isfinite(score):
            raise self._unjudged("not_finite", f"its score is {score}")
        return score

    def _within_context(self, prompt: str, completion: str) -> list[int]:
        """Returns the tokens of a row, cut where the stage says so. Raises CompletionUnjudged where they don't fit."""
        token_ids = self.token_ids(prompt, completion)
        if len(token_ids) <= self._context_tokens:
            return token_ids
        fits = self._longest_that_fits(prompt, completion)
        if fits is None:
            raise self._unjudged(
                "too_long",
                f"prompt and completion are {len(token_ids)} tokens, its context is {self._context_tokens}",
                cure="lower rollout.sampling.max_new_tokens, set truncate or on_failure of the stage, or name a model "
                "with a longer context",
            )
        return fits

    def _longest_that_fits(self, prompt: str, completion: str) -> list[int] | None:
        """Cuts by characters, so that special tokens and templates stay whole, and by bisection: the same each time.

        Answers None where nothing of what may be cut would be left.
        """
        if self._truncate == "never":
            return None

        def read(num_characters: int) -> list[int]:
            if self._truncate == "completion_end":
                return self.token_ids(prompt, completion[:num_characters])
            return self.token_ids(prompt[len(prompt) - num_characters :], completion)

        fits = None
        # So many characters fit (or none does), and `too_many` don't.
        num_kept = 0
        too_many = len(completion if self._truncate == "completion_end" else prompt)
        while too_many - num_kept > 1:
            middle = (num_kept + too_many) // 2
            token_ids = read(middle)
            if len(token_ids) <= self._context_tokens:
                fits = token_ids
                num_kept = middle
            else:
                too_many = middle
        return fits

    def _unjudged(self, reason: StageReason, problem: str, *, cure: str | None = None) -> CompletionUnjudged:
        """Returns the error of a row that gets no score; it lasts, for the score is a function of the row."""
        return CompletionUnjudged(problem, reason=reason, lasts=True, field=self._field, cure=cure)

    def token_ids(self, prompt: str, completion: str) -> list[int]:
        """Returns the tokens that the model reads of a row.

        Raises:
            CompletionUnjudged: The model's chat template refuses the texts.
            InvalidInput: The template goes beyond a bound; the error names the model.
        """
        prompt, completion = (self._special.sub(r"\1 ", text) for text in (prompt, completion))
        if not self._tokenizer.chat_template:
            return self._tokenizer(prompt, completion)["input_ids"]
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        try:
            rendered = self._template.write(messages, opens_turn=False)
        except TemplateRefuses as error:
            raise self._unjudged("refused", f"its chat template refuses the texts: {error}") from error
        except TemplateEnded as error:  # the machine has a part in that, and so it is no score of the row
            problem = f"its chat template was stopped: {error}"
            raise InvalidInput(problem, field=self._field, cure=COSTS_CURE) from error
        # The template writes the special tokens itself.
        return self._tokenizer(rendered, add_special_tokens=False)["input_ids"]


def special_tokens_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the first character of each special token in a text, also where two of them overlap."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    longer = {token for token in (*added, *tokenizer.all_special_tokens) if len(token) > 1}
    alternatives = "|".join(re.escape(token) for token in sorted(longer)) or r"(?!)"
    return re.compile(rf"(?=(?:{alternatives}))(.)", re.DOTALL)


def load_reward_model(settings: StackSettings, stage: ServedStage) -> RewardModel:
    """Raises InvalidInput that names the model's key in the spec."""
    ((field, folder),) = model_folders(settings, stage).items()
    transformers_logging.disable_progress_bar()
    set_up_torch(settings, stage.spec)
    (path,) = stage.stage.files().values()
    with reading_model(folder, path, file_digests_of(stage), field=field, weights=True):
        try:
            tokenizer = load_tokenizer(folder, needs_end=False)
        except InvalidInput as error:
            raise renamed(error, field) from error
        model = _load_classifier(folder, field)
    model.to(device_of(settings))
    return RewardModel(model, tokenizer, settings=settings, stage=stage)


def _load_classifier(folder: Path, field: str) -> Any:
    """The model in the dtype in which it was saved."""
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if config.num_labels != 1:
            raise InvalidInput(
                f"`{folder}` has {config.num_labels} outputs, a reward model has 1",
                field=field,
                cure="name a sequence classifier with num_labels = 1",
            )
        with MAKES_A_MODEL:
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=config,
                dtype="auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except LOADING_ERRORS as error:
        raise InvalidInput(
            f"`{folder}` does not load as a sequence classifier: {first_line(error)}",
            field=field,
            cure="it needs config.json of a sequence classifier and safetensors",
        ) from error
    # A causal LM has no score head: transformers would make a random one, and only log it.
    if absent := sorted([*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])]):
        raise InvalidInput(
            f"the safetensors of `{folder}` lack {len(absent)} tensors of a sequence classifier, e.g. {absent[0]}",
            field=field,
            cure="name a model that was trained as one",
        )
    model.requires_grad_(False)
    return model.eval()
