"""A client's regular expressions: read without being compiled, and matched by RE2 where it means what `re` means.

    pattern ─ translate ─┬─ in RE2's grammar ─▶ RE2: linear in the text, bounded in memory
                         └─ look-around, back-references, … ─▶ Python's `re`, in a caged process under its deadline

A pattern of a few kilobytes may take Python's `re` minutes to compile, and without end to match. So a process that
others wait for compiles a pattern by RE2 (`takes_re2`) or not at all. Both engines take the leftmost match and prefer
the first alternative. Where they differ in a construct, the translation spells out what `re` means by it; where they
may differ in a text, `Translation.suits` says so, and `re` matches that text:

    \\w \\d \\s \\b (?i)   their tables of Unicode are of different versions: RE2 takes ASCII texts alone
    $                  `re` matches it before a last line break, too: RE2 takes texts that don't end with one
    empty matches      `re` looks for another one at the same place: a search that meets one begins anew with `re`
"""

from __future__ import annotations

import functools
import re
import string
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import re2

from contracts.errors import InvalidInput

MAX_MEMORY_BYTES = 8 * 2**20
"""Memory of a pattern that RE2 compiled, and of what RE2 remembers of the texts that it has met."""
MAX_REPEATS = 1000
"""More are refused by RE2."""
MAX_DEPTH = 100
"""Groups in groups."""
LARGEST_CHARACTER = 0x10FFFF
LARGEST_OF_ASCII = 0x7F
IN_WORDS = frozenset(string.ascii_letters + string.digits)
WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
DIGITS = ((0x30, 0x39),)
SPACES = ((0x09, 0x0D), (0x1C, 0x20))
"""`re` takes the four separators of ASCII for white space, as `str.isspace` does; RE2 doesn't."""
KINDS = {"w": WORD, "d": DIGITS, "s": SPACES}
CONTROLS = {"a": 0x07, "f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B, "\\": 0x5C}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
FLAGS = re.compile(r"\(\?([imsu]+)\)")
GROUP = re.compile(r"\(\?P<([A-Za-z_][A-Za-z0-9_]{0,63})>")
REPEAT = re.compile(r"\{(?:([0-9]{1,9})(,)?([0-9]{1,9})?|(,)([0-9]{1,9})?)\}")

Ranges = tuple[tuple[int, int], ...]
"""First and last code points."""


class BadPattern(InvalidInput):
    """Says that a pattern is no regular expression."""


class Match(Protocol):
    """A match of either engine."""

    def __getitem__(self, group: str, /) -> Any: ...
    def start(self) -> int: ...
    def end(self) -> int: ...


class _OnlyPython(Exception):
    """Says that the pattern has a construct that RE2 lacks, or that has another meaning there."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A pattern in RE2's grammar. `translate` creates it; Matcher reads it."""

    text: str
    is_for_ascii: bool
    """It depends on tables of Unicode."""
    is_for_no_last_break: bool
    """It has `$` without (?m)."""
    repeats_nothing: bool
    """It repeats what may be empty: then the engines may differ in what a group holds."""
    groups: frozenset[str]
    """Names of its groups."""

    def suits(self, text: str) -> bool:
        """Returns True where RE2 says of this text what `re` says."""
        if self.is_for_no_last_break and text.endswith("\n"):
            return False
        return not self.is_for_ascii or text.isascii()


@dataclass(frozen=True, kw_only=True)
class Matcher:
    """A compiled pattern. Its methods may take long: they are for caged processes."""

    pattern: str
    over_lines: bool
    """True where `.` matches line breaks without (?s), too."""
    translation: Translation | None

    @functools.cached_property
    def _linear(self) -> Any:
        """RE2's compiled pattern; None where RE2 can't take it."""
        if self.translation is not None:
            return _compiled_by_re2(self.translation)
        return None

    @functools.cached_property
    def _python(self) -> re.Pattern[str]:
        """Raises BadPattern."""
        try:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # `[[a]`: a client's text is no news
                return re.compile(self.pattern, re.DOTALL if self.over_lines else re.NOFLAG)
        except (re.error, OverflowError, RecursionError) as error:  # `a{9999999999}`, and thousands of nested groups
            raise BadPattern(f"`{self.pattern[:200]}` is not a regular expression: {error}", field="pattern") from error

    def has_group(self, name: str) -> bool:
        """Returns True if a group has this name. Raises BadPattern."""
        if self._linear is None or self.translation is None:
            return name in self._python.groupindex
        return name in self.translation.groups

    def is_found(self, text: str) -> bool:
        """Returns True if the pattern is found anywhere. Raises BadPattern."""
        return self._engine(text).search(text) is not None

    def is_whole(self, text: str) -> bool:
        """Returns True if the pattern matches the whole text. Raises BadPattern."""
        return self._engine(text).fullmatch(text) is not None

    def last_group(self, group: str, text: str) -> str | None:
        """Returns the group of the last match; None without a match, or where the group took no part in it.

        Raises BadPattern, and IndexError for a group that the pattern doesn't have.
        """
        if self.translation is None or self.translation.repeats_nothing:
            return _last_group(self._python.finditer(text), group)
        engine = self._engine(text)
        if engine is not self._linear:
            return _last_group(engine.finditer(text), group)
        try:
            return _last_group(_none_empty(engine.finditer(text)), group)
        except _OnlyPython:
            return _last_group(self._python.finditer(text), group)

    def _engine(self, text: str) -> Any:
        if self._linear is None or self.translation is None or not self.translation.suits(text):
            return self._python
        return self._linear


@functools.lru_cache(maxsize=64)
def matcher(pattern: str, *, over_lines: bool = False) -> Matcher:
    """Returns the pattern's matcher, which compiles it when it is first used."""
    return Matcher(pattern=pattern, over_lines=over_lines, translation=translate(pattern, over_lines=over_lines))


def takes_re2(pattern: str) -> bool:
    """Returns True for a pattern that is surely a regular expression: RE2 compiles it, in bounded time and memory.

    Any other one has to be compiled by `re`, which only a caged process may do.
    """
    translation = translate(pattern)
    if translation is None:
        return False
    is_compiled = _compiled_by_re2(translation) is not None
    re2.purge()  # the library would keep a hundred of them
    return is_compiled


@functools.lru_cache(maxsize=64)
def translate(pattern: str, *, over_lines: bool = False) -> Translation | None:
    """Translates a pattern to RE2's grammar.

    Args:
        pattern: The pattern, in the grammar of Python's `re`.
        over_lines: True has `.` match line breaks without (?s), too.

    Returns:
        The translation; None where the pattern needs Python's `re`, or is no regular expression.
    """
    try:
        return _Reader(pattern, over_lines=over_lines).translation()
    except _OnlyPython:
        return None


def _compiled_by_re2(translation: Translation) -> Any:
    options = re2.Options()
    options.max_mem = MAX_MEMORY_BYTES
    options.log_errors = False
    try:
        return re2.compile(translation.text, options)
    except re2.error:
        return None


def _last_group(matches: Iterator[Match], group: str) -> str | None:
    text: str | None = None
    for match in matches:
        text = match[group]
    return text


def _none_empty(matches: Iterator[Match]) -> Iterator[Match]:
    for match in matches:
        if match.start() == match.end():
            raise _OnlyPython
        yield match


class _Reader:
    """Reads a pattern from left to right, once; each method returns a part in RE2's grammar. Raises _OnlyPython."""

    def __init__(self, pattern: str, *, over_lines: bool) -> None:
        flags = FLAGS.match(pattern)
        letters = flags[1] if flags else ""
        self._text = pattern
        self._at = flags.end() if flags else 0
        self._folds_case = "i" in letters
        self._by_line = "m" in letters
        self._over_lines = over_lines or "s" in letters
        self._is_for_ascii = self._folds_case
        self._is_for_no_last_break = False
        self._repeats_nothing = False
        self._groups: set[str] = set()

    def translation(self) -> Translation:
        text, _ = self._alternatives(0)
        if self._at < len(self._text):  # a bracket that nothing opens
            raise _OnlyPython
        letters = f"{'i' if self._folds_case else ''}{'s' if self._over_lines else ''}"
        return Translation(
            text=f"(?{letters}){text}" if letters else text,
            is_for_ascii=self._is_for_ascii,
            is_for_no_last_break=self._is_for_no_last_break,
            repeats_nothing=self._repeats_nothing,
            groups=frozenset(self._groups),
        )

    def _alternatives(self, depth: int) -> tuple[str, bool]:
        """Returns the text, and whether it may match nothing."""
        branches = [self._branch(depth)]
        while self._takes("|"):
            branches.append(self._branch(depth))
        return "|".join(text for text, _ in branches), any(is_empty for _, is_empty in branches)

    def _branch(self, depth: int) -> tuple[str, bool]:
        parts: list[str] = []
        may_be_empty = True
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part, is_empty, repeats = self._part(depth)
            repeated = self._repeat()
            if repeated is not None:
                if not repeats:
                    raise _OnlyPython
                operator, least = repeated
                self._repeats_nothing = self._repeats_nothing or is_empty
                part = f"{part}{operator}"
                is_empty = is_empty or least == 0
            parts.append(part)
            may_be_empty = may_be_empty and is_empty
        return "".join(parts), may_be_empty

    def _part(self, depth: int) -> tuple[str, bool, bool]:
        """Returns the text, whether it may match nothing, and whether it may be repeated."""
        character = self._text[self._at]
        if character == "(":
            text, is_empty = self._group(depth)
            return text, is_empty, True
        if character == "[":
            return self._class(), False, True
        if character == "\\":
            return self._escape()
        if character in "*+?" or (character == "{" and REPEAT.match(self._text, self._at)):
            raise _OnlyPython
        self._at += 1
        if character == ".":
            return ".", False, True
        if character == "^":
            return ("(?m:^)" if self._by_line else r"\A"), True, False
        if character == "$":
            self._is_for_no_last_break = self._is_for_no_last_break or not self._by_line
            return ("(?m:$)" if self._by_line else r"\z"), True, False
        return self._literal(ord(character)), False, True

    def _group(self, depth: int) -> tuple[str, bool]:
        if depth >= MAX_DEPTH:
            raise _OnlyPython
        named = GROUP.match(self._text, self._at)
        if named:
            prefix = named[0]
            if named[1] in self._groups:  # an error of `re`
                raise _OnlyPython
            self._groups.add(named[1])
        elif self._text.startswith("(?:", self._at):
            prefix = "(?:"
        elif self._text.startswith("(?", self._at):
            raise _OnlyPython
        else:
            prefix = "("
        self._at += len(prefix)
        text, is_empty = self._alternatives(depth + 1)
        if not self._takes(")"):
            raise _OnlyPython
        return f"{prefix}{text})", is_empty

    def _repeat(self) -> tuple[str, int] | None:
        """Returns the operator, and how often it repeats at least; None where nothing is repeated here."""
        character = self._text[self._at : self._at + 1]
        if character and character in "*+?":
            self._at += 1
            operator = character
            least = int(character == "+")
        else:
            bounds = REPEAT.match(self._text, self._at)
            if bounds is None:
                return None
            self._at = bounds.end()
            least = int(bounds[1] or 0)
            most = None
            if bounds[3] or bounds[5]:
                most = int(bounds[3] or bounds[5] or 0)
            has_comma = bool(bounds[2] or bounds[4])
            if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
                raise _OnlyPython
            if not has_comma:
                operator = f"{{{least}}}"
            elif most is None:
                operator = f"{{{least},}}"
            else:
                operator = f"{{{least},{most}}}"
        if self._takes("?"):
            operator += "?"
        following = self._text[self._at : self._at + 1]
        # `a*+` is possessive, `a**` is an error of `re` and none of RE2's.
        if following and (following in "*+?" or REPEAT.match(self._text, self._at)):
            raise _OnlyPython
        return operator, least

    def _escape(self) -> tuple[str, bool, bool]:
        character = self._text[self._at + 1 : self._at + 2]
        if character in ("A", "Z"):
            self._at += 2
            return (r"\A" if character == "A" else r"\z"), True, False
        if character == "b":
            self._at += 2
            self._is_for_ascii = True
            return r"\b", True, False
        ranges = self._kind()
        if ranges is not None:
            return self._class_of(ranges), False, True
        return self._literal(self._escaped_character()), False, True

    def _kind(self) -> Ranges | None:
        r"""Reads `\w` and the like, of ASCII; None where another escape stands here."""
        letter = self._text[self._at + 1 : self._at + 2]
        ranges = KINDS.get(letter.lower())
        if ranges is None:
            return None
        self._at += 2
        self._is_for_ascii = True
        return ranges if letter.islower() else _complement(ranges)

    def _escaped_character(self) -> int:
        letter = self._text[self._at + 1 : self._at + 2]
        if letter in CONTROLS:
            self._at += 2
            return CONTROLS[letter]
        if letter in HEX_DIGITS:
            end = self._at + 2 + HEX_DIGITS[letter]
            digits = self._text[self._at + 2 : end]
            if len(digits) < HEX_DIGITS[letter] or not set(digits) <= set(string.hexdigits):
                raise _OnlyPython
            self._at = end
            return int(digits, 16)
        if not letter or (letter.isascii() and letter.isalnum()):  # octal numbers, back-references, errors
            raise _OnlyPython
        self._at += 2
        return ord(letter)

    def _class(self) -> str:
        self._at += 1
        is_negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        is_first = True
        while is_first or not self._text.startswith("]", self._at):
            is_first = False
            members = self._member()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                members = (_between(members, self._member()),)
            ranges.extend(members)
        self._at += 1
        return self._class_of(tuple(ranges), is_negated=is_negated)

    def _member(self) -> Ranges:
        """Reads one member of a class: a character, or a kind of characters."""
        if self._at >= len(self._text):
            raise _OnlyPython
        if self._text[self._at] != "\\":
            character = ord(self._text[self._at])
            self._at += 1
            return ((character, character),)
        if self._text.startswith("b", self._at + 1):
            self._at += 2
            return ((0x08, 0x08),)
        kind = self._kind()
        if kind is not None:
            return kind
        character = self._escaped_character()
        return ((character, character),)

    def _class_of(self, ranges: Ranges, *, is_negated: bool = False) -> str:
        parts: list[str] = ["^"] if is_negated else []
        for first, last in ranges:
            if first == last:
                parts.append(self._literal(first))
            else:
                parts.append(self._range(first, last))
        return f"[{''.join(parts)}]"

    def _range(self, first: int, last: int) -> str:
        if self._folds_case and last > LARGEST_OF_ASCII:
            raise _OnlyPython
        return rf"\x{{{first:x}}}-\x{{{last:x}}}"

    def _literal(self, character: int) -> str:
        if character > LARGEST_OF_ASCII and self._folds_case:
            raise _OnlyPython
        if 0xD800 <= character <= 0xDFFF or character > LARGEST_CHARACTER:
            raise _OnlyPython
        if chr(character) in IN_WORDS:
            return chr(character)
        return rf"\x{{{character:x}}}"

    def _takes(self, character: str) -> bool:
        is_there = self._text.startswith(character, self._at)
        self._at += is_there
        return is_there


def _between(first: Ranges, last: Ranges) -> tuple[int, int]:
    """Returns the range from one character to another. Raises _OnlyPython for a kind, and for a range without any."""
    if len(first) != 1 or len(last) != 1:
        raise _OnlyPython
    start, start_end = first[0]
    end, end_end = last[0]
    if start != start_end or end != end_end or end < start:
        raise _OnlyPython
    return start, end


def _complement(ranges: Ranges) -> Ranges:
    """Returns what is not in the ranges, of ASCII: under (?i) RE2 would find `s` in a range with U+017F."""
    first = 0
    gaps: list[tuple[int, int]] = []
    for start, end in ranges:
        if first < start:
            gaps.append((first, start - 1))
        first = end + 1
    return (*gaps, (first, LARGEST_OF_ASCII))
