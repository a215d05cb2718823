"""What all reports share: the grammar of their schemas, their page, their lines."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from test_timeline import ROWS, STAYS

from oracle_offload.diagnose.doctor.finding import Finding
from oracle_offload.diagnose.doctor.report import DoctorReport
from oracle_offload.diagnose.explain import explain_oom
from oracle_offload.host.schema import schema
from oracle_offload.host.terminal import Text
from oracle_offload.observe.page import STYLE, fragment, page
from oracle_offload.observe.run_report import line_svg
from oracle_offload.observe.sections import Section, render
from oracle_offload.observe.timeline import timeline_svg

ROOT = Path(__file__).resolve().parents[2]


def test_every_schema_has_one_grammar() -> None:
    said = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.json"], cwd=ROOT, capture_output=True, text=True
    )
    names = said.stdout.split() or [p.relative_to(ROOT) for p in ROOT.rglob("*.py")]
    found = set()
    for name in names:
        text = (ROOT / name).read_text("utf-8") if (ROOT / name).is_file() else ""
        found |= set(re.findall(r"[\"'`](oracle_offload[./][\w/.-]*[/-]\d+)[\"'`]", text))
        found |= {schema(*call) for call in re.findall(r"\bschema\(\"([^\"]+)\", (\d+)\)", text)}
    assert {schema("doctor", 1), schema("oom", 1), schema("memory-summary", 1)} <= found
    for one in found:
        assert re.fullmatch(r"oracle_offload/[a-z]+(-[a-z]+)*/[1-9]\d*", one), one


def test_reports_share_the_page_and_the_style_sheet() -> None:
    doctor = DoctorReport((Finding("x", "bad", "<value>"),))
    oom = explain_oom("CUDA out of memory. Tried to allocate 2.00 GiB")
    for report in (doctor, oom):
        whole, part = report.to_html(), report._repr_html_()
        assert part in whole and whole.count(STYLE) == 1
        skeleton = page("TITLE", "BODY")
        head, _, end = skeleton.partition("BODY")
        assert whole.endswith(part + end)
        assert re.sub("<title>.*?</title>", "<title>TITLE</title>", whole).startswith(head)
    assert fragment("x", ["<p>"]).count("<style>") == 1
    assert "&lt;a&gt;" in page("<a>", "")


def test_what_a_template_shows_is_text_that_neither_steers_nor_turns_nor_is_read_as_html() -> None:
    strange = "<script>a\x1b[2J\u202eb\u2066</script>&"
    shown = "&lt;script&gt;a b &lt;/script&gt;&amp;"
    section = Section(
        strange,
        says=[("warn", strange)],
        bar=[(strange, 1)],
        pictures=[(strange, "<svg/>")],
        head=[strange],
        rows=[[strange, strange]],
        notes=[strange],
    )
    page = render("x", [section])
    assert page.count(shown) == 9 and "<script" not in page and "<svg/>" in page
    assert not re.search("[\x1b\u202e\u2066]", page)


def test_every_page_is_of_itself_alone() -> None:
    picture = timeline_svg(ROWS, "", stays=STAYS, fluid=True) + line_svg(
        "loss", [(1, 2.0), (2, 1.0)]
    )
    whole = page("x", render("x", [Section("x", bar=[("arena", 1)], pictures=[("", picture)])]))
    for word in ("<script", "src=", "href", "@import", "url(", "<link", "<iframe"):
        assert word not in whole
    assert set(re.findall(r"https?://[^\"<> ]*", whole)) == {"http://www.w3.org/2000/svg"}


def test_lines_are_wrapped_between_the_narrowest_and_the_widest() -> None:
    for asked, got in ((1, 60), (60, 60), (80, 80), (101, 100)):
        text = Text(asked)
        text.block("word " * 100, "first ", "rest  ")
        lines = str(text).splitlines()
        assert got - 5 < max(map(len, lines)) <= got
        assert lines[0].startswith("first word") and lines[1].startswith("rest  word")
    text = Text()
    text.line()
    text.block("a-long-name " * 20, style="bold")
    assert "\x1b" not in str(text) and not re.search(r"-$", str(text), re.MULTILINE)


def test_colour_surrounds_the_text_of_each_line() -> None:
    text = Text(color=True)
    text.block("word " * 30, style="red")
    assert all(re.fullmatch("\x1b\\[31m[word ]+\x1b\\[0m", line) for line in str(text).splitlines())
    text = Text(color=True)
    text.line(text.styled("x", "dim"))
    assert str(text) == "\x1b[2mx\x1b[0m\n"
