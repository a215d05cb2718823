"""The report as HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..views.bars import html_bar
from ..views.page import escape, fragment
from ..views.page import page as whole_page
from .facts import FACT_TITLES, format_size

if TYPE_CHECKING:
    from .report import OomReport


def render(report: OomReport, *, page: bool) -> str:
    """Return `report` as a page, or as a fragment with its own style where `page` is False."""
    body = fragment("explain", _body(report))
    return whole_page("Out of memory", body) if page else body


def _body(report: OomReport) -> list[str]:
    out = [f"<h2>{escape(report.verdict)}</h2>"]
    if not report.found:
        return out + ([f"<p>{escape(report.collective)}</p>"] if report.collective else [])
    cause = report.cause
    out.append(f"<p>Confidence {escape(cause.confidence)}: {escape(cause.why)}.</p>")
    out += [
        f"<p>Also ({escape(other.confidence)}): {escape(other.title)}: {escape(other.why)}.</p>"
        for other in report.causes[1:3]
    ]
    if report.collective:
        out.append(f"<p>{escape(report.collective)}</p>")
    out += html_bar(report.bar(), format_size)
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
