"""The page of every report: one skeleton, one style sheet, no script, no request to anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape as _escape

from ..host.terminal import printable
from .palette import PAGE, themed

# Scoped to our own class, as a notebook holds other tables; the colour of text is inherited, as a
# notebook has a theme of its own. Jupyter aligns the cells of tables to the right by a rule that
# only `!important` outweighs.
STYLE = (
    f"\n{themed(['.oo'], PAGE)}"
    + """\
.oo{font:14px/1.45 system-ui,sans-serif;max-width:60rem}
.oo h2{font-size:1.15rem;margin:.2rem 0 .3rem}
.oo h3{font-size:1rem;margin:1rem 0 .3rem}
.oo p{margin:.2rem 0}
.oo li{margin:.3rem 0}
.oo table{border-collapse:collapse;margin:.3rem 0;display:block;overflow-x:auto}
.oo table tr :is(td,th){text-align:left!important;vertical-align:top;padding:.1rem .9rem .1rem 0}
.oo table td{white-space:pre-wrap}
.oo table tr td.n{text-align:right!important;font-variant-numeric:tabular-nums}
.oo .q{font:12px/1.4 ui-monospace,monospace;opacity:.75;overflow-wrap:anywhere}
.oo svg{display:block;width:100%}
.oo .bar{display:flex;gap:2px;height:1.3rem;padding:2px;margin:.6rem 0 .3rem}
.oo .bar,.oo .key{border:1px solid var(--oo-faint);border-radius:3px}
.oo .bar div{min-width:1px}
.oo .part{display:inline-block;margin-right:1rem}
.oo .key{display:inline-block;width:.7rem;height:.7rem;margin-right:.3rem}
.oo .mark{background:#8a4b00;color:#fff;border-radius:3px;padding:0 .4rem;font-size:12px}
.oo .oo-verdict{font-weight:600}
.oo .oo-bad{color:var(--oo-bad)}
.oo .oo-warn{color:var(--oo-warn)}
.oo .oo-ok{color:var(--oo-ok)}
.oo .oo-unknown{color:var(--oo-unknown)}
.oo .oo-why{opacity:.75}
.oo-explain table tr td{white-space:nowrap}
.oo-explain table tr td.q{white-space:normal}
.oo-doctor table tr :is(td,th){padding:.3rem .7rem;border-top:1px solid #8884}
"""
)


def escape(text: str) -> str:
    """Return `text` escaped for HTML, without characters that would change how it is shown."""
    return _escape("\n".join(map(printable, text.split("\n"))))


def fragment(kind: str, body: Iterable[str]) -> str:
    """Return lines of HTML with their style, as a notebook shows them; `kind` is the report's."""
    return "\n".join(
        [f"<style>{STYLE}</style>", f'<div class="oo oo-{kind}">', *body, "</div>", ""]
    )


def page(title: str, body: str) -> str:
    """Return a whole page, light or dark as the reader has it, around a `fragment`."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{themed(['body'], ['ground', 'ink'])}"
        "body{margin:1.5rem;background:var(--oo-ground);color:var(--oo-ink)}</style>\n"
        f"</head>\n<body>\n{body}</body>\n</html>\n"
    )
