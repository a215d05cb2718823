"""The report: one verdict, one cause, the first things to change, and where each number is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...host.schema import schema
from ...host.terminal import WIDEST, Text
from ...observe.bars import html_bar, text_bar
from ...observe.page import escape, fragment
from ...observe.page import page as whole_page
from .cause import Cause, where
from .collectives import Wait, told
from .facts import FACT_TITLES, Fact, format_size
from .fixes import Fix
from .parse import Finding
from .templates import SUSPICION

SCHEMA = schema("oom", 1)
TEXT_FIXES = 3  # verdict, one cause, three fixes: the rest is in the JSON and the HTML

_NAMES = {
    "cuda": "CUDA",
    "rocm": "ROCm",
    "xpu": "Intel XPU",
    "mps": "Apple MPS",
    "cpu": "host memory",
    "host": "the host",
}


class OomReport:
    """What ran out of memory, why, and what to change first.

    Attributes
    ----------
    found : bool
        Whether the text holds an out-of-memory error (or a kill that may be one).
    suspected : bool
        True where the evidence is a kill alone, which has other explanations.
    backend, device : str or None, int or None
        What printed the error (cuda, rocm, xpu, mps, cpu, host) and the device index.
    where : str
        What gave out: device, host, limit, setting, program or unknown.
    cause : Cause
        The first cause, with confidence and reason; `causes` holds all of them.
    facts : mapping of str to Fact
        The numbers the text states, in bytes; a missing key is unknown.
    fixes : list of Fix
        What to change, best first.
    findings : list of Finding
        Every message found, in the order of the text; `finding` is the one explained.
    rank : int or None
        The rank that printed it, where its line says so.
    waiting : list of Wait
        The ranks that say they waited for another, which is no cause.
    """

    def __init__(
        self,
        finding: Finding | None = None,
        causes: Sequence[Cause] = (),
        fixes: Sequence[Fix] = (),
        findings: Sequence[Finding] = (),
        *,
        waiting: Sequence[Wait] = (),
        rank: int | None = None,
    ) -> None:
        self.finding = finding
        self.causes = list(causes)
        self.fixes = list(fixes)
        self.findings = list(findings)
        self.waiting = list(waiting)
        self.rank = rank
        self.found = finding is not None
        self.suspected = finding is not None and finding.template.strength == SUSPICION
        self.backend = finding.backend if finding is not None else None
        self.device = finding.device if finding is not None else None
        self.template = finding.template.name if finding is not None else None
        self.facts: Mapping[str, Fact] = finding.facts if finding is not None else {}
        self.cause = self.causes[0] if self.causes else Cause("unknown", "low", "nothing was found")
        self.where = where(self.cause.name, self.backend) if self.found else "unknown"

    def value(self, name: str) -> int | None:
        """Return a fact in bytes, or None where the text does not state it."""
        fact = self.facts.get(name)
        return None if fact is None else fact.value

    @property
    def collective(self) -> str:
        """What is to be said of ranks that waited for another; "" where none did."""
        return told(self.found, self.rank, self.waiting)

    @property
    def shortfall(self) -> int | None:
        """Bytes missing for the failed allocation, where both figures are stated."""
        asked, free = self.value("requested"), self.value("free")
        return None if asked is None or free is None or asked <= free else asked - free

    # -- machine-readable ------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data; every fact is present, null where unknown."""
        return {
            "schema": SCHEMA,
            "found": self.found,
            "suspected": self.suspected,
            "template": self.template,
            "backend": self.backend,
            "device": self.device,
            "where": self.where,
            "cause": self._cause(self.cause),
            "other_causes": [self._cause(cause) for cause in self.causes[1:]],
            "facts": {f"{name}_bytes": self.value(name) for name in FACT_TITLES},
            "quotes": {
                name: {"line": fact.line, "text": fact.quote, "derived": fact.derived}
                for name, fact in self.facts.items()
            },
            "message": None
            if self.finding is None
            else {
                "line": self.finding.line,
                "text": self.finding.quote,
                "says": self.finding.template.says,
            },
            "processes": [
                {"pid": process.pid, "bytes": process.nbytes, "this_process": process.is_self}
                for process in (self.finding.processes if self.finding else ())
            ],
            "fixes": [fix._asdict() for fix in self.fixes],
            "rank": self.rank,
            "waiting": [wait._asdict() for wait in self.waiting],
            "messages_found": [
                {"template": finding.template.name, "line": finding.line}
                for finding in self.findings
            ],
        }

    @staticmethod
    def _cause(cause: Cause) -> dict[str, str]:
        return {**cause._asdict(), "title": cause.title}

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict` as JSON."""
        import json

        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    # -- for people ------------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """What ran out, and where, in one line."""
        if not self.found:
            return "No out-of-memory error found"
        place = _NAMES.get(self.backend or "", "an unnamed device")
        if self.device is not None and self.backend in ("cuda", "rocm", "xpu"):
            place += f" device {self.device}"
        if self.suspected:
            return f"Killed, perhaps for memory: {self.cause.title}"
        if self.backend in ("cpu", "host"):
            return f"Out of memory: {self.cause.title}"
        return f"Out of memory on {place}: {self.cause.title}"

    def bar(self) -> list[tuple[str, int]]:
        """Return the parts of the card, (name, bytes), where the figures allow it; else nothing."""
        total, free = self.value("total"), self.value("free")
        allocated, unused = self.value("allocated"), self.value("unallocated")
        if total is None or free is None or allocated is None:
            return []
        parts = [("tensors", allocated)]
        if unused is not None:
            parts.append(("cached", unused))
        if self.value("other_processes") is not None:
            parts.append(("other processes", self.value("other_processes") or 0))
        rest = total - free - sum(size for _, size in parts)
        if rest < -total // 100:
            return []
        parts.append(("outside", max(rest, 0)))
        parts.append(("free", free))
        return parts

    def to_text(self, *, width: int = WIDEST, color: bool = False, all_fixes: bool = False) -> str:
        """Return the report for a terminal, at most `width` (60 to 100) columns wide.

        Parameters
        ----------
        width : int
            Columns; clamped to 60..100.
        color : bool
            Use ANSI colours. See `views.terminal.wants_color`.
        all_fixes : bool
            List every fix instead of the first three.
        """
        out = Text(width, color=color)
        out.block(self.verdict, style="bold")
        if not self.found:
            if self.collective:
                out.block(self.collective, "  ", "  ")
            return str(out)
        out.block(f"confidence {self.cause.confidence}: {self.cause.why}", "  ", "  ")
        for cause in self.causes[1:3]:
            out.block(f"also ({cause.confidence}): {cause.title}: {cause.why}", "  ", "  ")
        if self.collective:
            out.block(self.collective, "  ", "  ")
        parts = self.bar()
        if parts:
            out.line()
            for line in text_bar(parts, out.width, format_size):
                out.line(line)
        if self.facts:
            out.line()
            for name, title in FACT_TITLES.items():
                fact = self.facts.get(name)
                if fact is not None:
                    note = "  (sum)" if fact.derived else ""
                    out.line(f"  {title:<37}{format_size(fact.value):>14}{note}")
            if self.shortfall is not None:
                out.line(f"  {'missing':<37}{format_size(self.shortfall):>14}")
        shown = self.fixes if all_fixes else self.fixes[:TEXT_FIXES]
        if shown:
            out.line()
            out.line(out.styled("What to change first", "bold"))
        for number, fix in enumerate(shown, 1):
            mark = " [changes the result of training]" if fix.changes_result else ""
            gain = "" if fix.gain_bytes is None else f" (up to {format_size(fix.gain_bytes)})"
            out.block(f"{number}. {fix.title}{gain}{mark}", "  ", "     ")
            out.block(fix.how, "     ", "     ")
        if len(shown) < len(self.fixes):
            more = f"{len(self.fixes) - len(shown)} more with --all or --json"
            out.line("  " + out.styled(more, "dim"))
        if self.finding is not None:
            line = f"line {self.finding.line}" if self.finding.line else "read from"
            out.line()
            out.line(out.styled(f"{line}:", "dim"))
            out.block(self.finding.quote, "  ", "  ")
            if self.finding.template.says != self.cause.why:
                out.block(self.finding.template.says, "  ", "  ")
        if len(self.findings) > 1:
            out.line(f"  {len(self.findings)} memory messages in this text; the last is explained")
        return str(out)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"OomReport({self.verdict!r}, confidence={self.cause.confidence!r})"

    def to_html(self, *, page: bool = True) -> str:
        """Return the report as HTML without scripts: a whole page, or a fragment for a notebook."""
        body = fragment("explain", _body(self))
        return whole_page("Out of memory", body) if page else body

    def _repr_html_(self) -> str:
        return self.to_html(page=False)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # IPython on a terminal: the whole report, not the one-line repr.
        printer.text(repr(self) if cycle else self.to_text())


# ---- HTML ----


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
