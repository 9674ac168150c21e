"""Texts whose cost isn't their length: a few thousand characters that a careless reader takes minutes or gigabytes for.

Each kind is a fault that was met, or one that is known of a library: a pattern whose compilation is slow, a pattern
that backtracks, a template that squares a number, a text that is multiplied, a format with a large width.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

MAX_CHARS = 4096
"""The longest pattern that a spec may have."""
WIDE_CLASSES = ("[\\u0100-\\uffff]", "[^\\x00]", "\\w", "\\W", "[\\d\\w]", "[a-z\\u1e00-\\u1eff]")


def slow_to_compile(draw: random.Random) -> str:
    """Wide classes without case, many times: what took a gateway 144 s."""
    part = "".join(draw.choice(WIDE_CLASSES) for _ in range(draw.randint(1, 4)))
    return f"(?i){part * (MAX_CHARS // len(part))}"[:MAX_CHARS].rstrip("\\[")


def counted(draw: random.Random) -> str:
    """Counted repetitions inside of each other, which some engines write out."""
    inner = draw.choice(("a", "[ab]", "(?:a|b)", "\\w"))
    for _ in range(draw.randint(2, 6)):
        inner = f"(?:{inner}){{{draw.randint(1, 20)},{draw.randint(20, 1000)}}}"
    return inner


def backtracking(draw: random.Random) -> str:
    """Quantifiers inside of quantifiers, before something that never comes."""
    inner = draw.choice(("a", "a|a", "a|aa", "\\w", "."))
    for _ in range(draw.randint(2, 8)):
        inner = f"({inner})" + draw.choice(("*", "+", "{1,}"))
    return f"^{inner}$" + draw.choice(("", "(?=b)", "\\1"))


def nested(draw: random.Random) -> str:
    """Groups inside of groups, as deep as the length allows."""
    depth = draw.randint(10, MAX_CHARS // 2 - 1)
    return "(" * depth + "a" + ")" * depth


def alternatives(draw: random.Random) -> str:
    """Many alternatives with a common beginning."""
    return "|".join(f"{'a' * draw.randint(0, 8)}{number}" for number in range(MAX_CHARS // 12))


def no_pattern(draw: random.Random) -> str:
    """Characters of a pattern's grammar in no order."""
    return "".join(draw.choice("()[]{}*+?|^$\\.-,0a1bé (?i)(?P<a>") for _ in range(draw.randint(1, 400)))


PATTERNS: Mapping[str, Callable[[random.Random], str]] = {
    "slow to compile": slow_to_compile,
    "counted": counted,
    "backtracking": backtracking,
    "nested": nested,
    "alternatives": alternatives,
    "no pattern": no_pattern,
}
"""Kind → its generator."""


def squares(draw: random.Random) -> str:
    """A number that is squared again and again: twenty times held a trainer for 50 s."""
    return "{% set n = namespace(v=3) %}" + "{% set n.v = n.v * n.v %}" * draw.randint(20, 40) + "{{ n.v }}"


def copies(draw: random.Random) -> str:
    """A text times a large number: 4 GiB."""
    return "{{ 'a' * " + str(draw.randint(10**9, 10**12)) + " }}"


def endless(draw: random.Random) -> str:
    """Loops inside of loops."""
    depth = draw.randint(3, 8)
    begin = "".join(f"{{% for i{level} in range(99999) %}}" for level in range(depth))
    return begin + "a" + "{% endfor %}" * depth


def powers(draw: random.Random) -> str:
    """A power that has millions of digits."""
    return f"{{{{ {draw.randint(7, 99)} ** {draw.randint(10**7, 10**9)} }}}}"


def padded(draw: random.Random) -> str:
    """A format that asks for a large width."""
    return "{{ '%0" + str(draw.randint(10**9, 10**10)) + "d' % 1 }}"


TEMPLATES: Mapping[str, Callable[[random.Random], str]] = {
    "squares": squares,
    "copies": copies,
    "endless": endless,
    "powers": powers,
    "padded": padded,
}
"""Kind → its generator."""


def drawn(kinds: Mapping[str, Callable[[random.Random], str]], number: int, *, seed: int) -> Iterator[tuple[str, str]]:
    """Yields (kind, text), the kinds in turns."""
    draw = random.Random(seed)
    names = list(kinds)
    for place in range(number):
        kind = names[place % len(names)]
        yield kind, kinds[kind](draw)
