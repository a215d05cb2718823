"""The report as static HTML: one self-contained page, no script, no request to anywhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from .facts import FACT_TITLES, format_size

if TYPE_CHECKING:
    from .report import OomReport

# The colour of text is inherited: a notebook has a theme of its own. Jupyter aligns the cells of
# tables to the right by a rule that only `!important` outweighs.
_STYLE = """
.oo-oom{font:14px/1.45 system-ui,sans-serif;max-width:56rem}
.oo-oom h2{font-size:1.15rem;margin:.2rem 0 .3rem}
.oo-oom h3{font-size:1rem;margin:1rem 0 .3rem}
.oo-oom p{margin:.2rem 0}
.oo-oom table{border-collapse:collapse}
.oo-oom td{padding:.1rem .9rem .1rem 0;vertical-align:top}
.oo-oom table tr td{text-align:left!important;white-space:nowrap}
.oo-oom table tr td.n{text-align:right!important;font-variant-numeric:tabular-nums}
.oo-oom table tr td.q{white-space:normal}
.oo-oom .q{font:12px/1.4 ui-monospace,monospace;opacity:.75;overflow-wrap:anywhere}
.oo-oom .bar{display:flex;height:1.3rem;border-radius:3px;overflow:hidden;margin:.6rem 0 .3rem}
.oo-oom .part{margin-right:1rem;white-space:nowrap}
.oo-oom .key{display:inline-block;width:.7rem;height:.7rem;border-radius:2px;margin-right:.3rem}
.oo-oom .mark{background:#8a4b00;color:#fff;border-radius:3px;padding:0 .4rem;font-size:12px}
.oo-oom li{margin:.3rem 0}
"""
_COLOURS = {
    "tensors": "#2f6db5",
    "cached": "#8fb8e8",
    "other processes": "#b5522f",
    "outside": "#8c8c8c",
    "free": "#4d9a5f",
}
_HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
    "<title>Out of memory</title>\n<style>body{margin:1.5rem;background:#fff;color:#1d2329}"
    "@media (prefers-color-scheme:dark){body{background:#16191d;color:#e4e8ec}}</style>\n"
    "</head>\n<body>\n"
)


def render(report: OomReport, *, page: bool) -> str:
    """Return `report` as a page, or as a fragment with its own style where `page` is False."""
    body = "\n".join([f"<style>{_STYLE}</style>", '<div class="oo-oom">', *_body(report), "</div>"])
    return f"{_HEAD}{body}\n</body>\n</html>\n" if page else body + "\n"


def _body(report: OomReport) -> list[str]:
    out = [f"<h2>{escape(report.verdict)}</h2>"]
    if not report.found:
        return out
    cause = report.cause
    out.append(f"<p>Confidence {escape(cause.confidence)}: {escape(cause.why)}.</p>")
    out += [
        f"<p>Also ({escape(other.confidence)}): {escape(other.title)}: {escape(other.why)}.</p>"
        for other in report.causes[1:3]
    ]
    out += _bar(report)
    out += _facts(report)
    if report.fixes:
        out.append("<h3>What to change first</h3>\n<ol>")
        for fix in report.fixes:
            gain = "" if fix.gain_bytes is None else f" (up to {format_size(fix.gain_bytes)})"
            mark = ' <span class="mark">changes the result of training</span>'
            out.append(
                f"<li>{escape(fix.title)}{gain}{mark if fix.changes_result else ''}"
                f"<br>{escape(fix.how)}</li>"
            )
        out.append("</ol>")
    if report.finding is not None:
        finding = report.finding
        line = f"line {finding.line}" if finding.line else "the message"
        out.append(f"<details><summary>{line}, and what it means</summary>")
        out.append(f'<p class="q">{escape(finding.quote)}</p>')
        out.append(f"<p>{escape(finding.template.says)}</p></details>")
    return out


def _bar(report: OomReport) -> list[str]:
    parts = report.bar()
    total = sum(size for _, size in parts)
    if not total:
        return []
    cells = "".join(
        f'<div style="width:{100 * size / total:.2f}%;background:{_COLOURS[name]}" '
        f'title="{escape(name)} {format_size(size)}"></div>'
        for name, size in parts
    )
    keys = "".join(
        f'<span class="part"><span class="key" style="background:{_COLOURS[name]}"></span>'
        f"{escape(name)} {format_size(size)}</span>"
        for name, size in parts
    )
    return [f'<div class="bar">{cells}</div>', f"<p>{keys}</p>"]


def _facts(report: OomReport) -> list[str]:
    rows = []
    for name, title in FACT_TITLES.items():
        fact = report.facts.get(name)
        if fact is not None:
            note = " (sum)" if fact.derived else ""
            rows.append(
                f'<tr><td>{escape(title)}</td><td class="n">{format_size(fact.value)}{note}</td>'
                f'<td class="q">{escape(fact.quote)}</td></tr>'
            )
    if not rows:
        return []
    return [
        "<details open><summary>What the text says</summary><table>",
        *rows,
        "</table></details>",
    ]
