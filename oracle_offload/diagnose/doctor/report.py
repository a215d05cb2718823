"""A doctor's report as text, JSON and HTML."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ...host.schema import schema
from ...host.terminal import WIDEST, Text
from ...observe.page import escape, fragment, page
from .finding import VERDICTS, Finding, worst

SCHEMA = schema("doctor", 1)
_COUNTED = {"bad": "bad", "warn": "to improve", "ok": "ok", "unknown": "not visible"}
_STYLES = {"bad": "red", "warn": "yellow", "ok": "green", "unknown": "dim"}


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

    def to_text(self, *, width: int = WIDEST, colour: bool = False) -> str:
        """Return the report for a terminal, the worst first.

        Parameters
        ----------
        width : int
            Columns; at most 100 and at least 60 are used.
        colour : bool
            Whether to mark verdicts with ANSI colours.
        """
        out = Text(width, color=colour)
        names = max((len(finding.name) for finding in self.findings), default=0)
        indent = " " * (8 + names + 2)
        out.line(f"doctor: {self.summary()}")
        out.line()
        findings = self._sorted()
        for finding, following in zip(findings, [*findings[1:], None], strict=True):
            verdict = out.styled(f"{finding.verdict:<8}", _STYLES[finding.verdict])
            first, *rest = out.wrapped(finding.value, indent) or [""]
            out.line(f"{verdict}{finding.name:<{names}}  {first}".rstrip())
            for line in rest:
                out.line(indent + line)
            # Neighbours with one reason in common (no driver, no /proc) share its line.
            if following is not None and _reason(following) == _reason(finding):
                continue
            for label, text in (("why: ", finding.why), ("fix: ", finding.fix)):
                out.block(text, indent + label, indent + " " * len(label))
        return str(out)

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
        rows = []
        for finding in self._sorted():
            detail = "".join(
                f'<div class="oo-{label}">{label}: {escape(text)}</div>'
                for label, text in (("why", finding.why), ("fix", finding.fix))
                if text
            )
            rows.append(
                f'<tr><td class="oo-verdict oo-{finding.verdict}">{finding.verdict}</td>'
                f"<th>{escape(finding.name)}</th>"
                f"<td>{escape(finding.value)}{detail}</td></tr>"
            )
        head = f"<p><b>doctor</b>: {escape(self.summary())}</p>"
        return fragment("doctor", [head, "<table>", *rows, "</table>"])

    def to_html(self) -> str:
        """Return the report as one self-contained page without scripts."""
        return page(f"doctor: {self.summary()}", self._repr_html_())


def _reason(finding: Finding) -> tuple[str, str, str]:
    return finding.verdict, finding.why, finding.fix
