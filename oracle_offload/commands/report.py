"""The command `report`: what a run has left, as a page; or two, before and after."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ..host.terminal import FileError, naming, put, show
from .exits import Exit

if TYPE_CHECKING:
    from ..diagnose.explain import OomReport
    from ..observe.memory_holders import SnapshotReport
    from ..observe.run_report import Comparison, RunReport

_MOST_FIRST_LINE = 1 << 20
_WANTED = (
    "Wanted is a recording in .jsonl (recorder.export('run.jsonl')), a metrics file, torch's "
    "memory snapshot, or the log of a training that ran out of memory."
)
_FOR_OTHERS = (  # how a file begins that a user may take for one of these
    (b"<!doctype html", "a page, which a browser shows"),
    (b"<html", "a page, which a browser shows"),
    (b"<svg", "a picture, which a browser shows"),
    (b'{"traceevents"', "a trace, which ui.perfetto.dev shows"),
    (b"event,", "a table, which any spreadsheet shows"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `report` takes."""
    parser.add_argument(
        "file", metavar="FILE", help="a recording, a metrics file, a memory snapshot, or a log"
    )
    parser.add_argument("after", metavar="AFTER", nargs="?", help="another, to compare with")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="PAGE", help="write the page to PAGE as well")


def run(args: argparse.Namespace) -> Exit:
    """Run the command."""
    try:
        report = _read(args.file) if args.after is None else _compared(args.file, args.after)
        if args.html:
            with naming("write", args.html), open(args.html, "w", encoding="utf-8") as page:
                page.write(report.to_html())
        with naming("write", "standard output"):
            if args.json:
                put(sys.stdout, report.to_json().rstrip("\n") + "\n")
                sys.stdout.flush()
            else:
                show(sys.stdout, lambda width, color: report.to_text(width=width, color=color))
        return Exit.OK
    except FileError as problem:
        print(problem, file=sys.stderr)
        return Exit.ERROR


def _compared(before: str, after: str) -> Comparison:
    from ..observe.run_report import Comparison, RunReport

    reports: list[RunReport] = []
    for path in (before, after):
        report = _read(path)
        if not isinstance(report, RunReport):
            raise FileError(f"{path} is neither a recording nor a metrics file: nothing to compare")
        reports.append(report)
    return Comparison(*reports)


def _read(path: str) -> RunReport | OomReport | SnapshotReport:
    """Return the report of a file, by its first byte or by what is in its first line."""
    from ..diagnose.explain.pipeline import explain
    from ..diagnose.explain.reading import read_excerpt
    from ..observe.memory_holders import SnapshotReport
    from ..observe.metrics import SCHEMA as METRICS
    from ..observe.metrics import read_metrics
    from ..observe.recording import SCHEMA as RECORDING
    from ..observe.recording import read_recording
    from ..observe.run_report import of_metrics, of_recording
    from ..observe.snapshot_file import FIRST_BYTE, held, read_snapshot

    with naming("read", path):
        with open(path, "rb") as file:
            first = file.readline(_MOST_FIRST_LINE)
            file.seek(0)
            begin = file.read(4096)
        if first.startswith(FIRST_BYTE):
            return SnapshotReport(path, held(read_snapshot(path)))
        found = _schema(first)
        if found == RECORDING:
            recording = read_recording(path)
            errors = "\n".join(str(error["what"]) for error in recording.of("error"))
            why = explain(errors, recording, None)
            return replace(of_recording(path, recording), explained=why if why.found else None)
        if found == METRICS:
            return of_metrics(path, read_metrics(path))
        what = f"it is of {found}" if found else _of_others(begin)
        if not what:
            with open(path, "rb") as log:
                report = explain(read_excerpt(log).text, None, None)
            if report.found:
                return report
            what = "as a log, it tells of no memory that ran out"
        raise ValueError(f"report does not show this file: {what}. {_WANTED}")


def _of_others(begin: bytes) -> str:
    """Return what a file is by its first bytes, "" where it may be a log."""
    text = begin.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, told in _FOR_OTHERS:
        if text.startswith(beginning):
            return f"it is {told}"
    return "it is no text" if b"\0" in begin else ""


def _schema(line: bytes) -> str | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    found = document.get("schema") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None
