"""Write the causes and fixes into docs/messages.md: `python tools/messages_page.py`.

Every message the parser knows, with lines in that format, the versions it was seen in, and what it
means, is on the site alone: `make site` puts it into that page, and `--print` prints it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from oracle_offload.diagnose.explain.cause import TITLES, where  # noqa: E402
from oracle_offload.diagnose.explain.facts import FACT_TITLES, compiled  # noqa: E402
from oracle_offload.diagnose.explain.fixes import CATALOGUE, PLANS  # noqa: E402
from oracle_offload.diagnose.explain.parse import Finding, find, unwrap  # noqa: E402
from oracle_offload.diagnose.explain.templates import (  # noqa: E402
    DEVICE_BACKENDS,
    PROOF,
    SUSPICION,
    TEMPLATES,
    Template,
)

DATA = ROOT / "tests" / "data" / "oom"
NO_BREAK = "\N{NO-BREAK SPACE}"
NUMBER = re.compile(r"(\d+)")
PAGE = ROOT / "docs" / "messages.md"

BLOCK = re.compile(
    r"(<!-- causes: python tools/messages_page.py -->\n).*?(<!-- end of causes -->\n)", re.S
)

GROUPS = (
    ("On the card, with figures", "Complete in themselves: cause and fixes follow from the sizes."),
    (
        "On the card, without figures",
        "These say that something ran out and not how much; a message with figures elsewhere in "
        "the same log is preferred.",
    ),
    ("Host memory, refused", "The card is not involved, whatever the traceback looks like."),
    ("Shared memory and locked memory", "Two limits of their own, small by default in containers."),
    (
        "Killed: the words of kernel, container and scheduler",
        "Read from `dmesg`, `journalctl`, `kubectl describe` or the job's output.",
    ),
    (
        "Killed: a suspicion",
        "SIGKILL says nothing about memory. The report says `suspected` and how to get the proof; "
        "see [killed without a message](killed-without-a-message.md).",
    ),
    ("The class alone", "The last resort, when no other row matches."),
)


def group(template: Template) -> int:
    """Return the index into `GROUPS` of a template."""
    if template.name == "out-of-memory-class":
        return 6
    if template.strength == SUSPICION:
        return 5
    if template.cause in ("shared_memory", "locked_memory"):
        return 3
    if template.backend == "host":
        return 4
    if template.backend == "cpu":
        return 2
    return 0 if template.strength == PROOF else 1


def message(text: str, finding: Finding) -> str:
    """Return the line a message begins on, and the further lines that hold its figures."""
    start = text.rfind("\n", 0, finding.position + 1) + 1
    region = text[start : finding.position + finding.template.after].replace("\n", " ")
    ends = [
        match.end()
        for _, pattern in finding.template.fields
        for match in [compiled(pattern).search(region)]
        if match
    ]
    end = text.find("\n", start + max(ends, default=0))
    return unwrap(text[start : end if end >= 0 else len(text)]).strip("`'\"")


def layout(finding: Finding, line: str) -> str:
    """Return what two messages of one layout share: its words without figures and places."""
    if not finding.template.fields:
        return finding.template.name
    stated = [str(bool(compiled(pattern).search(line))) for _, pattern in finding.template.fields]
    return " ".join([str(finding.backend), str("Process" in line), *stated])


def examples() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return, by template and layout, the shortest line and the versions that print it."""
    found: dict[str, dict[str, tuple[str, list[str]]]] = defaultdict(dict)
    with open(DATA / "corpus.jsonl", encoding="utf-8") as corpus:
        for case in map(json.loads, corpus):
            for finding in find(case["text"]):
                line = message(case["text"], finding)
                layouts = found[finding.template.name]
                key = layout(finding, line)
                best, versions = layouts.get(key, (line, []))
                if case["version"] not in versions:
                    versions.append(case["version"])
                layouts[key] = (min(best, line, key=len), versions)
    for name, text in json.loads((DATA / "unmet.json").read_text("utf-8")).items():
        found[name][name] = (text.strip(), [])
    return found


def by_number(version: str) -> list[tuple[int, str]]:
    """Return a sort key that puts 2.9 before 2.10."""
    return [
        (int(part or 0), "") if part.isdigit() else (-1, part) for part in NUMBER.split(version)
    ]


def section(template: Template, layouts: dict[str, tuple[str, list[str]]]) -> list[str]:
    """Return the entry of one template."""
    settles = states = ""
    if template.cause is not None:
        settles = f" Cause: *{TITLES[template.cause].lower()}* (confidence {template.confidence})."
    fields = list(dict.fromkeys(name for name, _ in template.fields))
    if fields:
        states = f" May state: {', '.join(FACT_TITLES[name] for name in fields)}."
    text = f"{template.says}{settles}{states}"
    out = [f"### {template.name}", "", *wrap(text, 100, break_on_hyphens=False), ""]
    ordered = sorted(layouts.values(), key=lambda item: min(map(by_number, item[1]), default=[]))
    for line, versions in ordered:
        seen = ", ".join(sorted(versions, key=by_number)) or "no public log yet"
        shown = wrap(line[:700], 96, subsequent_indent="    ", break_on_hyphens=False)
        listed = wrap(f"Seen in: {seen.replace(' ', NO_BREAK).replace(f',{NO_BREAK}', ', ')}.", 100)
        out += ["```text", *shown, "```", "", *(row.replace(NO_BREAK, " ") for row in listed), ""]
    return out


def causes() -> list[str]:
    """Return the table of causes: what gave out, and what to change."""
    out = [
        "",
        "## The causes",
        "",
        "What a report can name as cause, where memory gave out, and its fixes in their order.",
        "A fix marked * changes the result of training; what cannot help on the backend at hand is",
        "left out of a report.",
        "",
        "| cause | in words | where | fixes |",
        "|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        fixes = sorted(PLANS[name], key=lambda key: CATALOGUE[key][2])
        keys = ", ".join(f"{key}*" if CATALOGUE[key][2] else key for key in fixes)
        place = where(name, sorted(DEVICE_BACKENDS)[0]) if name != "unknown" else "unknown"
        out.append(f"| `{name}` | {title} | {place} | {keys} |")
    out += ["", "## The fixes", "", "| fix | what to change | how |", "|---|---|---|"]
    for key, (title, how, changes) in CATALOGUE.items():
        mark = "*" if changes else ""
        out.append(f"| `{key}`{mark} | {title} | {how.replace('|', chr(92) + '|')} |")
    return [*out, ""]


def printed() -> str:
    """Return every message, by what ran out."""
    found = examples()
    out = []
    for index, (title, lead) in enumerate(GROUPS):
        out += [f"## {title}", "", *wrap(lead, 100, break_on_hyphens=False), ""]
        for template in TEMPLATES:
            if group(template) == index:
                out += section(template, found[template.name])
    return "\n".join(out).rstrip() + "\n"


def page(text: str) -> str:
    """Return the page with its causes and fixes written again."""
    return BLOCK.sub(lambda block: block[1] + "\n".join(causes()) + block[2], text)


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(printed(), end="")
    else:
        PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")
