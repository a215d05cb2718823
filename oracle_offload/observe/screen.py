"""What `watch` shows in a terminal where rich is there: colours, what was lately, any width.

The words and figures are those of `oracle_offload.observe.live`; colours are the terminal's own, so
they suit its background. Each part of a bar has its letter as well.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live as Renewed
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..host.terminal import NARROWEST, WIDEST, printable, wants_color
from .bars import text_bar
from .live import Live, show_rate, show_seconds
from .memory import show_size

_COLOURS = {
    "#": "blue",
    "g": "magenta",
    "o": "yellow",
    "a": "cyan",
    "t": "cyan",
    "?": "white",
    "A": "green",
    "L": "green",
    "P": "blue",
    "+": "bright_cyan",
    "@": "red",
    "=": "white",
}
_LATELY = (("time per step", "step_s", show_seconds), ("to the device", "h2d_gbps", show_rate))
_MOST_LOOKS = 240
_LABELS = 25  # columns of the longest label, with the space around it
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.-=+*#"  # where the encoding has no others


class Screen:
    """A terminal that is drawn again with each look; the last one stays when it is left.

    Parameters
    ----------
    stream : text stream
        The terminal.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream, no_color=not wants_color(stream), highlight=False)
        self._renewed = Renewed(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._looks: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MOST_LOOKS)
        self._last: Live | None = None

    def __enter__(self) -> Screen:
        self._renewed.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._renewed.stop()
        if self._last is not None:
            self._console.print(self._drawn(self._last))

    def show(self, look: Live) -> None:
        """Draw a look; its figures are what the next ones show as lately."""
        when = look.document["time_s"]
        if not self._looks or self._looks[-1][0] != when:  # no step has ended since, otherwise
            self._looks.append((when, look.numbers))
        self._last = look
        self._renewed.update(self._drawn(look), refresh=True)

    def _drawn(self, look: Live) -> RenderableType:
        width = min(self._console.width, WIDEST)
        parts: list[RenderableType] = [Text(printable(look.heading()), style="bold")]
        parts += [Text(printable(sentence)) for sentence in look.sentences()]
        parts += [Text(printable(note), style="yellow") for note in look.notes()]
        # Figures first: where a pane is short, the bars are what it cannot show.
        parts.append(Text(""))
        table = Table.grid(padding=(0, 2))
        for label, shown in self._rows(look, width):
            if width >= NARROWEST:
                table.add_row(Text(f"  {label}"), shown)
            else:
                parts += [Text(label), Padding(shown, (0, 0, 0, 2))]
        parts.append(table)
        for memory in look.bars():
            title = printable(f"{memory['title']}: {show_size(memory['total_bytes'])}")
            parts += [Text(""), Text(title)]
            bar, *keys = text_bar(list(memory["parts"].items()), width, show_size)
            parts += [_coloured_bar(bar), *map(_coloured_keys, keys)]
        return Padding(Group(*parts), (0, max(0, self._console.width - width), 0, 0))

    def _rows(self, look: Live, width: int) -> Iterator[tuple[str, Text]]:
        lately = {label: (key, show) for label, key, show in _LATELY}
        for label, shown in look.rows():
            yield label, Text(printable(shown))
            key, show = lately.get(label, ("", show_seconds))
            values = [numbers[key] for _, numbers in self._looks if numbers.get(key) is not None]
            if len(values) > 1:
                low, high = show(min(values)), show(max(values))
                told = f"{low} all along" if low == high else f" {low} to {high}"
                room = width - len(told) - (_LABELS if width >= NARROWEST else 2)
                line = "" if low == high else self._line(values[-max(4, min(40, room)) :])
                yield "  lately", Text.assemble((line, "cyan"), told)

    def _line(self, values: Sequence[float]) -> str:
        """Return numbers as marks of different heights, the least to the largest."""
        is_plain = not str(self._console.encoding).lower().startswith("utf")
        levels = _PLAIN_LEVELS if is_plain else _LEVELS
        low, spread = min(values), max(values) - min(values)
        share = (len(levels) - 1) / spread if spread > 0 else 0.0
        return "".join(levels[round((value - low) * share)] for value in values)


def _coloured_bar(line: str) -> Text:
    """Return a line of `text_bar` with each part in its colour; what is free has none."""
    text = Text(line, no_wrap=True)
    for found in re.finditer(r"([^\s.\[\]])\1*", line):
        text.stylize(f"{_COLOURS.get(found[1], 'white')} reverse", *found.span())
    return text


def _coloured_keys(line: str) -> Text:
    text = Text(line)
    for found in re.finditer(r"(?<=  )\S(?= )", line):
        text.stylize(f"bold {_COLOURS.get(found[0], 'white')}", *found.span())
    return text
