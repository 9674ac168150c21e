"""The scorers that look at a completion's text, or at its length, and at nothing else."""

from __future__ import annotations

from contracts import rewards
from contracts.encoding.numbers import Number, last_number, read_number
from contracts.errors import InvalidInput
from onbeat.scoring.patterns import matcher
from reward_service.scorers.last_tag import last_answer


class BadReference(InvalidInput):
    """The reference or task entry cannot be compared with anything."""


class TooComplex(Exception):
    """Comparing the completion would take longer, or more memory, than any item has."""


def exact(component: rewards.ExactReward, item: rewards.RewardItem) -> float:
    """Returns 1.0 if both texts are equal without the white space around them; `ignore_case` folds case by Unicode."""
    completion, reference = item.completion.strip(), item.reference.strip()
    if component.ignore_case:
        completion, reference = completion.casefold(), reference.casefold()
    return float(completion == reference)


def numeric(component: rewards.NumericReward, item: rewards.RewardItem) -> float:
    """Returns 1.0 if |last number - reference| ≤ tolerance, by the grammar of contracts/encoding/numbers.py.

    A completion without a number has 0.0. Raises BadReference.
    """
    reference = _reference(item)
    number = last_number(item.completion)
    return float(number is not None and number.is_near(reference, tolerance=component.tolerance))


def _reference(item: rewards.RewardItem) -> Number:
    """Raises BadReference for one that is no number."""
    reference = read_number(item.reference)
    if reference is None:
        raise BadReference("the reference is not a number", field="reference", cure="write it as 42, -1,234 or 2.5e-3")
    return reference


def regex(component: rewards.RegexReward, item: rewards.RewardItem) -> float:
    """Returns 1.0 if the pattern is found, else 0.0.

    With a group `answer` the last match's group must equal the reference, as text or as the number that all of it is.

    The last match is a model's final answer; any match would reward listing candidates. What only Python's `re` takes
    may backtrack without end: it runs in the pool. Raises BadPattern.
    """
    pattern = matcher(component.pattern)
    if not pattern.has_group("answer"):
        return float(pattern.is_found(item.completion))
    answer = last_answer(component.pattern, item.completion)
    if component.compare == "number":
        reference = _reference(item)
        number = read_number(answer) if answer is not None else None
        return float(number is not None and number.is_near(reference, tolerance=rewards.NumericReward().tolerance))
    # No answer is a wrong one, and not an error: 0.0.
    return float(answer is not None and answer.strip() == item.reference.strip())


def whole_format(component: rewards.FormatReward, item: rewards.RewardItem) -> float:
    """Returns 1.0 if the whole completion matches; `.` matches line breaks. It runs in the pool, as `regex`."""
    return float(matcher(component.pattern, over_lines=True).is_whole(item.completion))


def length(component: rewards.LengthReward, item: rewards.RewardItem) -> float:
    """Returns 1.0 up to `target_chars` characters (Unicode code points), then linear down to 0.0 at `max_chars`."""
    # 1.0 at target_chars, 0.0 at max_chars, in code points; max_chars is above target_chars, so nothing is divided by
    # 0.
    left = (component.max_chars - len(item.completion)) / (component.max_chars - component.target_chars)
    return min(1.0, max(0.0, left))


def overlong(component: rewards.OverlongReward, item: rewards.RewardItem) -> float:
    """Returns a score in [-1.0, 0.0] by sampled tokens (arXiv 2503.14476, equation 13).

    Raises BadReference without their number.
    """
    if item.num_tokens == 0:
        raise BadReference("the completion's number of tokens is not given", field="num_tokens", cure="send it")
    excess = item.num_tokens - component.free_tokens
    # The sign: a punishment, from 0.0 down to -1.0. buffer_tokens is 1 at least.
    return -min(1.0, max(0, excess) / component.buffer_tokens)
