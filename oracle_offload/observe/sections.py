"""A report as HTML: its sections, by the one template that all of them share.

It needs jinja2, which torch requires. What has to work where nothing is installed, as `explain`
does, writes its few lines itself, with `oracle_offload.observe.page`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..host.terminal import printable
from .bars import Part, html_bar
from .memory import show_size
from .page import STYLE

if TYPE_CHECKING:
    from jinja2 import Template


class Section(NamedTuple):
    """A part of a report. All but pictures is text: it is made printable, and escaped.

    Attributes
    ----------
    title : str
        Its heading; "" has none.
    says : sequence of (str, str)
        Sentences, each with its look: ``"verdict"``, ``"warn"``, ``"why"``.
    bar : sequence of Part
        Who holds memory.
    pictures : sequence of (str, str)
        SVG, each with the words that it is folded under; "" is open.
    head : sequence of str
        Of a table, the names of its columns.
    rows : sequence of sequence of str
        Its cells.
    numbers : bool
        Whether all of its columns but the first are numbers.
    notes : sequence of str
        What is said last.
    """

    title: str = ""
    says: Sequence[tuple[str, str]] = ()
    bar: Sequence[Part] = ()
    pictures: Sequence[tuple[str, str]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numbers: bool = False
    notes: Sequence[str] = ()


def render(kind: str, sections: Iterable[Section]) -> str:
    """Return sections with their style, as a notebook shows them; `kind` is the report's."""
    from markupsafe import Markup

    def drawn(section: Section) -> Section:
        pictures = [(words, Markup(svg)) for words, svg in section.pictures]
        return section._replace(pictures=pictures)

    return _template().render(
        style=Markup(STYLE),
        kind=kind,
        sections=map(drawn, sections),
        bar=lambda parts: Markup("\n".join(html_bar(parts, show_size))),
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("oracle_offload.observe"),
        autoescape=True,
        finalize=_printable,
        keep_trailing_newline=True,
    )
    return environment.get_template("base.html")


def _printable(value: Any) -> Any:
    """Return text without what would steer or turn what is shown; what is HTML stays."""
    return value if hasattr(value, "__html__") else printable(str(value))
