"""What every report line goes through: cleaned text, glyphs the stream can carry, numbers with units."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from nest_megatron import units

BAR_WIDTH = 20


def escaped(text: str) -> str:
    """Return ``text`` with every character escaped that is not printable.

    Content of a configuration must not move the cursor, colour the terminal or reverse the reading direction.
    """
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)


class Page:
    """A console for plain strings: no markup, no control characters, no glyph that it cannot encode."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.ascii_only = console.options.ascii_only
        self.dots = "..." if self.ascii_only else "…"
        self.mark = "*" if self.ascii_only else "●"
        self._bar = "#" if self.ascii_only else "█"

    def clean(self, value: object) -> str:
        """Return ``value`` as one line whose unsafe or unencodable characters are written as escapes."""
        text = escaped(str(value).replace("\n", " "))
        return text.encode("ascii", "backslashreplace").decode() if self.ascii_only else text

    def text(self, value: object, style: str = "") -> Text:
        """Return cleaned text that rich never parses as markup."""
        return Text(self.clean(value), style=style)

    def show(self, renderable: RenderableType) -> None:
        """Print a prepared renderable."""
        self.console.print(renderable)

    def line(self, value: object = "", style: str = "") -> None:
        """Print one paragraph."""
        self.console.print(self.text(value, style))

    def verbatim(self, value: object, style: str = "") -> None:
        """Print one line that is never wrapped: a verdict that others cut out, a setting to be copied."""
        self.console.print(self.text(value, style), soft_wrap=True)

    def section(self, title: str) -> None:
        """Print a blank line and a heading."""
        self.console.print()
        self.line(title, "bold")

    def bullets(self, items: Sequence[object], style: str = "") -> None:
        """Print one item per line, continuation lines indented."""
        for item in items:
            body = self.text(item, style)
            for number, wrapped in enumerate(body.wrap(self.console, max(20, self.console.width - 4))):
                wrapped.rstrip()
                self.console.print(Text("  - " if number == 0 else "    ").append_text(wrapped))

    def bar(self, share: float) -> str:
        """Return a bar of ``share`` in 0..1 of the full width; a visible share never rounds to nothing."""
        cells = round(min(max(share, 0.0), 1.0) * BAR_WIDTH)
        return self._bar * max(cells, 1 if share > 0 else 0)


def gib(num_bytes: float) -> str:
    """Return GiB with one decimal, the resolution of the memory model."""
    return f"{units.gib(num_bytes):.1f}"


def duration(seconds: float) -> str:
    """Return three significant digits in s, or in ms below one second."""
    if seconds >= 1:
        return f"{_significant(seconds)} s"
    return f"{_significant(units.milliseconds(seconds))} ms"


def duration_band(low_s: float, high_s: float) -> str:
    """Return ``low - high`` in the unit of the larger end."""
    if high_s >= 1:
        return f"{_significant(low_s)} - {_significant(high_s)} s"
    return f"{_significant(units.milliseconds(low_s))} - {_significant(units.milliseconds(high_s))} ms"


def milliseconds(seconds: float) -> str:
    """Return ms, with decimals only where they can matter."""
    return _significant(units.milliseconds(seconds))


def percent(share: float) -> str:
    """Return a share of one as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def count(number: float) -> str:
    """Return a whole number with thousands separated."""
    return f"{number:,.0f}"


def _significant(number: float) -> str:
    """Return three significant digits without an exponent."""
    for limit, decimals in ((100, 0), (10, 1), (1, 2)):
        if abs(number) >= limit:
            return f"{number:,.{decimals}f}"
    return f"{number:.3f}"
