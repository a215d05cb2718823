"""A doctor's report as text, JSON and HTML."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TextIO

from ..views.terminal import put, wants_color
from .finding import VERDICTS, Finding, worst

SCHEMA = "oracle_offload/doctor/1"
_WIDTH = 100
_COUNTED = {"bad": "bad", "warn": "to improve", "ok": "ok", "unknown": "not visible"}
_COLOURS = {"bad": "31", "warn": "33", "ok": "32", "unknown": "2"}


@dataclass(frozen=True)
class DoctorReport:
    """The findings of one examination.

    `str()` gives the text, `_repr_html_` the table a notebook shows.
    """

    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        """The most serious verdict."""
        return worst(*(finding.verdict for finding in self.findings))

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of the check `name`; KeyError when there is none."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def __str__(self) -> str:
        return self.to_text()

    def summary(self) -> str:
        """Return the counts in one line."""
        counts = {
            verdict: sum(finding.verdict == verdict for finding in self.findings)
            for verdict in VERDICTS
        }
        return ", ".join(f"{counts[v]} {_COUNTED[v]}" for v in VERDICTS if counts[v])

    def _sorted(self) -> list[Finding]:
        return sorted(self.findings, key=lambda finding: VERDICTS.index(finding.verdict))

    def to_text(self, *, width: int = _WIDTH, colour: bool = False) -> str:
        """Return the report for a terminal, the worst first.

        Parameters
        ----------
        width : int
            Columns; at most 100 and at least 60 are used.
        colour : bool
            Whether to mark verdicts with ANSI colours.
        """
        width = max(60, min(_WIDTH, width))
        names = max((len(finding.name) for finding in self.findings), default=0)
        indent = " " * (8 + names + 2)
        lines = [f"doctor: {self.summary()}", ""]
        findings = self._sorted()
        for finding, following in zip(findings, [*findings[1:], None], strict=True):
            verdict = f"{finding.verdict:<8}"
            head = f"{finding.name:<{names}}  "
            first, *rest = _wrap(finding.value, width - len(indent)) or [""]
            if colour:
                verdict = f"\033[{_COLOURS[finding.verdict]}m{verdict}\033[0m"
            lines.append(f"{verdict}{head}{first}".rstrip())
            lines += [indent + line for line in rest]
            # Neighbours with one reason in common (no driver, no /proc) share its line.
            if following is not None and _reason(following) == _reason(finding):
                continue
            for label, text in (("why: ", finding.why), ("fix: ", finding.fix)):
                for number, line in enumerate(_wrap(text, width - len(indent) - len(label))):
                    lines.append(indent + (label if number == 0 else " " * len(label)) + line)
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data; `facts` hold sizes in bytes."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "findings": [{**asdict(f), "facts": dict(f.facts)} for f in self.findings],
        }

    def to_json(self) -> str:
        """Return the report as JSON text."""
        import json

        return json.dumps(self.to_dict(), indent=2, default=str) + "\n"

    def _repr_html_(self) -> str:
        import html

        rows = []
        for finding in self._sorted():
            detail = "".join(
                f'<div class="oo-{label}">{label}: {html.escape(text)}</div>'
                for label, text in (("why", finding.why), ("fix", finding.fix))
                if text
            )
            rows.append(
                f'<tr><td class="oo-verdict oo-{finding.verdict}">{finding.verdict}</td>'
                f"<th>{html.escape(finding.name)}</th>"
                f"<td>{html.escape(finding.value)}{detail}</td></tr>"
            )
        return (
            f'<div class="oo-doctor"><style>{_STYLE}</style>'
            f"<p><b>doctor</b>: {html.escape(self.summary())}</p>\n"
            "<table>\n" + "\n".join(rows) + "\n</table></div>\n"
        )

    def to_html(self) -> str:
        """Return the report as one self-contained page without scripts."""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>doctor: {self.summary()}</title></head>\n"
            f"<body>{self._repr_html_()}</body></html>\n"
        )


# Scoped to the report's own class: a notebook page holds other tables.
_STYLE = (
    ".oo-doctor{font:14px/1.45 system-ui,sans-serif;max-width:60em}"
    ".oo-doctor table{border-collapse:collapse}"
    ".oo-doctor td,.oo-doctor th{padding:.3em .7em;text-align:left;vertical-align:top;"
    "border-top:1px solid #8884}"
    ".oo-doctor .oo-verdict{font-weight:600}"
    ".oo-doctor .oo-bad{color:#c62828}.oo-doctor .oo-warn{color:#b26a00}"
    ".oo-doctor .oo-ok{color:#2e7d32}.oo-doctor .oo-unknown{color:#777}"
    ".oo-doctor .oo-why{opacity:.75}"
)


def _reason(finding: Finding) -> tuple[str, str, str]:
    return finding.verdict, finding.why, finding.fix


def _wrap(text: str, width: int) -> list[str]:
    import textwrap

    # Paths and package names hold hyphens, and are copied from here.
    return textwrap.wrap(text, width, break_on_hyphens=False)


def write_text(report: DoctorReport, stream: TextIO) -> None:
    """Write the text to `stream`, in colour only to a terminal that wants it."""
    import shutil

    width = shutil.get_terminal_size((_WIDTH, 24)).columns if stream.isatty() else _WIDTH
    put(stream, report.to_text(width=width, colour=wants_color(stream)))
    stream.flush()
