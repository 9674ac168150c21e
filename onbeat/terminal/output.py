"""The output of a command: one JSON object on stdout, or text; errors as one line on stderr.

What is shown may come from a model, a data set or another user. A console here shows text as text: nothing in it is
markup, and no control character in it reaches the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from contracts.encoding.wire import encode_json
from contracts.errors import OnbeatError, SpecRefused
from onbeat.base.telemetry.logs import UNSHOWN, shown
from onbeat.stack.access import page_address

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


class TextConsole(Console):
    """Styles come from `rich.text.Text` alone; a `str` is what it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is printed or drawn passes here; rich's own moves of the cursor are control segments."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                lines = (shown(line) for line in segment.text.split("\n"))
                yield segment._replace(text="\n".join(lines))


def console_for(*, json_output: bool) -> Console:
    """Returns a console whose text goes to stdout; with --json to stderr, because stdout belongs to the one object."""
    return TextConsole(stderr=json_output)


def emit(value: Any) -> None:
    """Prints the one JSON object; controls that JSON leaves as they are become escapes, which mean the same."""
    text = UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", encode_json(value).decode())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def tell(value: Any, shown_as: RenderableType, *, json_output: bool) -> None:
    """Prints the one JSON object, or what a person sees of it: of a `str` each line whole."""
    if json_output:
        emit(value)
    else:
        console_for(json_output=False).print(shown_as, soft_wrap=isinstance(shown_as, str))


def tell_fetch(text: str) -> None:
    """Says on stderr how far the gateway is with a name of the hub, which it fetches before it takes a job."""
    console_for(json_output=True).print(text, soft_wrap=True)


def tell_problem(text: str) -> None:
    """Says on stderr, in one line, what a command leaves out while it goes on and ends as it would."""
    console_for(json_output=True).print(Text(text), soft_wrap=True)


def tell_page(console: Console, gateway_url: str, api_key: str, *, job_id: str = "") -> None:
    """Prints where the page is, on one line of its own so that it can be copied.

    The key stands in it for a person at a terminal alone: what goes elsewhere may be kept, and read by others.
    """
    address = page_address(gateway_url, api_key if console.file.isatty() else "", job_id=job_id)
    console.print(Text.assemble(("page  ", "dim"), (address, f"link {address}")), soft_wrap=True)


def emit_error(error: OnbeatError, *, json_output: bool, facts: Mapping[str, Any] | None = None) -> None:
    """Writes `onbeat: <field>: <problem> (<cure>)`, a line for each refusal of a spec, or `{"error": {...}}`.

    Args:
        error: The reason why the command ends.
        json_output: Writes the one JSON object to stdout, not the lines to stderr.
        facts: Further fields of that object, next to "error".
    """
    refusals = error.refusals if isinstance(error, SpecRefused) else ()
    if json_output:
        details: dict[str, Any] = {
            "type": type(error).__name__,
            "field": error.field,
            "problem": error.problem,
            "cure": error.cure,
        }
        if refusals:
            details["refusals"] = refusals
        emit({"error": details, **(facts or {})})
        return
    for line in [str(refusal.error) for refusal in refusals] or [str(error)]:
        sys.stderr.write(f"onbeat: {shown(line)}\n")
