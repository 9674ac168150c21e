r"""Numbers as people and models write them: the grammar of the reward `numeric` and of its references.

    number    = [sign] [currency] value [percent]         sign: - + and the dashes, not after a word (`7-3`, `3–5`)
    value     = [whole] fraction | power | plain          `-$5`, `€ 5`, `42 %`, `42\%`, `42 percent`
    fraction  = plain/plain | \frac{plain}{plain}         `1/2`, `3 1/2`, `-\frac{1}{2}`; not a date, `7/10/2024`
    power     = [plain times] plain ^ whole number        `10^6`, `2**10`, `10^{-3}`, `10⁶`, `2.5 \times 10^6`
    plain     = digits, in groups or not, with decimals   `1,234.5`, `1{,}234`, `1\,234`, `1 234`, `1'234`, `1,00,000`,
                                                          `1.234.567,8`, `.5`, `2e-3`

A comma is a decimal comma where it can't separate thousands: 12,34 is 12.34, 0,123 is 0.123, and 1,234 is 1234. In
`1,2,3` it separates a list, as it does before a space. Other arithmetic is not computed: of `3*4` the last number is 4.
"""  # noqa: RUF002  (the dashes and signs are what it is about)

from __future__ import annotations

import re
from decimal import Context, Decimal
from typing import NamedTuple

ARITHMETIC = Context(prec=50, traps=[])
"""Decimals, since 9007199254740993 equals ...992 as floats; without traps an overflow is infinite, hence unequal."""

MAX_CHARS = 400
"""How far before the last digit a number may begin. Only so much of a text is searched, so that any text takes linear
time; a longer number is no answer."""

SIGNS = "-\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{FULLWIDTH HYPHEN-MINUS}"
SIGN = rf"[{SIGNS}+]"
CURRENCY = r"(?:(?:US)?\\?\$|[\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}\N{INDIAN RUPEE SIGN}\N{WON SIGN}])"
GAPS = "'_ \N{RIGHT SINGLE QUOTATION MARK}\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}"
SEPARATOR = rf"(?:,|\{{,\}}|\\,|[{GAPS}])"
TIMES = r"(?:[*x\N{MULTIPLICATION SIGN}\N{MIDDLE DOT}]|\\times|\\cdot)"
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
RAISED = r"\s?(?:\^|\*\*)\s?[{(]*+"
POWER = rf"{RAISED}(?P<power>{SIGN}?\d++)[)}}]?|(?P<superscript>[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]++)"
EXPONENT = rf"(?:{POWER})(?P<tower>(?>(?:{RAISED}{SIGN}?\d++)+))?"
MAX_EXPONENT_DIGITS = 6
COMMA_GROUPS = re.compile(r"[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}(?:\.\d+)?", re.ASCII)
NEW_NUMBER = r"(?<![\d.])"


def _plain(name: str) -> str:
    """Returns the pattern of a plain number under a name of its own, since NUMBER has several of them."""
    # Groups are repeated in atomic groups: CPython below 3.11.5 finds nothing where a last round of `(?:…)++` begins to
    # match and then fails.
    more = rf"(?>(?:(?P={name}_separator)\d{{3}})*)(?!,?\d)(?:\.\d++)?"
    groups = rf"[1-9]\d{{0,2}}(?P<{name}_separator>{SEPARATOR})\d{{3}}{more}"
    lakhs = r"[1-9]\d?(?>(?:,\d\d(?=,))+),\d{3}(?!,?\d)(?:\.\d++)?"
    dotted = r"[1-9]\d{0,2}(?:(?>(?:\.\d{3})+),\d++|(?>(?:\.\d{3}){2,}))(?![.,]?\d)"
    comma = r"(?<!\d,)\d++,\d++(?!,?\d)"
    exponent = r"(?:[eE][-+]?\d++)?"
    return rf"(?P<{name}>(?:{groups}|{lakhs}|{dotted}|{comma}|\d++(?:\.\d*+)?|{NEW_NUMBER}\.\d++){exponent})"


NUMBER = re.compile(
    rf"(?:(?<![\w.)\]}}%])(?P<sign>{SIGN}))?(?:{CURRENCY}\s?(?P<inner_sign>{SIGN})?)?"
    rf"(?:(?P<whole>\d++)?\s?\\[dt]?frac\s?\{{(?P<above_sign>{SIGN})?{_plain('above')}\}}\s?\{{{_plain('below')}\}}"
    rf"|(?<!\d/)(?:(?P<mixed>\d++)\x20)?{_plain('numerator')}\s?/\s?{_plain('denominator')}(?!\s?/\s?\d)"
    rf"|(?:{_plain('factor')}\s?{TIMES}\s?)?{_plain('base')}{EXPONENT}"
    rf"|{_plain('value')})"
    r"(?P<percent>\s?(?:\\?%|per\s?cent\b))?",
    re.ASCII,
)


class Number(NamedTuple):
    """A number that was read in a text."""

    value: Decimal
    """Not finite for a division by zero, a power of a power, and what is too large for any answer."""
    is_percent: bool
    """True where a percent sign followed it; `value` is what stands before the sign."""

    def is_near(self, other: Number, *, tolerance: float) -> bool:
        """Returns True where both are equal within the tolerance.

        42 % is 42 %, 0.42, and, as the answer to `how many percent`, 42.
        """
        if self._distance(self.value, other.value, tolerance):
            return True
        if self.is_percent == other.is_percent:
            return False
        percent = self.value
        share = other.value
        if other.is_percent:
            percent = other.value
            share = self.value
        return self._distance(ARITHMETIC.divide(percent, Decimal(100)), share, tolerance)

    @staticmethod
    def _distance(first: Decimal, second: Decimal, tolerance: float) -> bool:
        distance = ARITHMETIC.abs(ARITHMETIC.subtract(first, second))
        return distance.is_finite() and distance <= Decimal(tolerance)


def last_number(text: str) -> Number | None:
    """Finds the number of a text's last digit; None without one, or where it is longer than MAX_CHARS."""
    last_digit = max(text.rfind(digit) for digit in "0123456789")
    start = max(0, last_digit - MAX_CHARS)
    if start:  # what begins before is cut off: from the next white space on every number is whole
        start = next((place for place in range(start, last_digit) if text[place].isspace()), last_digit + 1)
    matches = list(NUMBER.finditer(text, start, last_digit + MAX_CHARS))
    return _value(matches[-1]) if matches else None


def read_number(text: str) -> Number | None:
    """Reads the number that the whole text is; None where it is something else, or not finite."""
    if len(text) > MAX_CHARS:
        return None
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    number = _value(match)
    return number if number.value.is_finite() else None


def _value(match: re.Match[str]) -> Number:
    """Returns the number of a match of NUMBER."""
    if match["above"] is not None:
        value = _fraction(match["whole"], match["above"], match["below"])
    elif match["numerator"] is not None:
        value = _fraction(match["mixed"], match["numerator"], match["denominator"])
    elif match["base"] is not None:
        value = _power(match)
    else:
        value = _decimal(match["value"])
    # A sign may stand before the currency, behind it and above a fraction: two minuses make a plus.
    num_minuses = sum(match[name] is not None and match[name] != "+" for name in ("sign", "inner_sign", "above_sign"))
    if num_minuses % 2:
        value = ARITHMETIC.minus(value)
    return Number(value, match["percent"] is not None)


def _fraction(whole: str | None, above: str, below: str) -> Decimal:
    value = ARITHMETIC.divide(_decimal(above), _decimal(below))
    if whole is not None:
        value = ARITHMETIC.add(Decimal(whole), value)
    return value


def _power(match: re.Match[str]) -> Decimal:
    written = match["power"] or match["superscript"].translate(SUPERSCRIPTS)
    # A power of a power may be beyond any memory.
    if match["tower"] is not None or len(written) > MAX_EXPONENT_DIGITS:
        return Decimal("NaN")
    exponent = int(re.sub(f"[{SIGNS}]", "-", written))
    value = ARITHMETIC.power(_decimal(match["base"]), Decimal(exponent))
    if match["factor"] is not None:
        value = ARITHMETIC.multiply(_decimal(match["factor"]), value)
    return value


def _decimal(text: str) -> Decimal:
    """Reads a plain number: its last mark is the decimal one, unless it separates thousands."""
    mantissa, exponent_mark, exponent = text.lower().partition("e")
    if len(exponent) > MAX_EXPONENT_DIGITS:
        return Decimal("NaN")
    bare = re.sub(rf"\{{,\}}|\\,|[{GAPS}]", "", mantissa)
    if COMMA_GROUPS.fullmatch(bare):
        bare = bare.replace(",", "")
    elif "," in bare or bare.count(".") > 1:
        bare = bare.replace(".", "").replace(",", ".")
    return Decimal(f"{bare}{exponent_mark}{exponent}")
