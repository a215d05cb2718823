"""Write docs/measured.md from the filed results of cards: `python tools/measured_page.py`.

Every figure there is a row of benchmarks/results/<device>/*.json, which `make gpu-import` files. Of
each part and device the newest file counts in which the part has ended. The cells that both a card
and the simulator have go into docs/performance.md, too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_check import ENDED, ROOT, SCHEMA

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured.md"
SIMULATED_PAGE = ROOT / "docs" / "performance.md"
BESIDE = "## Measured and simulated"
TOLERANCE = 0.05  # of a prediction; where it is exceeded the page says which assumption was false
GB, GIB = 1e9, 2**30

INTRODUCTION = """# Performance, measured

What cards have measured: `make gpu-check` there, `make gpu-import` here, and
`python tools/measured_page.py` for this page. No figure on it is typed, and none is simulated
unless it says so. What the engine takes in virtual time is in [performance.md](performance.md).
"""
STEP_TEXT = """Flux at full depth with a LoRA, checkpointed, bf16. *Predicted*: the engine over the
simulated driver, with this card's own link and kernel rates and nothing else, before the step was
measured. *Least*: the fewest bytes that a step can move with this arena. *Equal*: losses that are
the resident training's to the last bit.
"""
RIVALS_TEXT = """The same LoRA step of 84 Flux-shaped blocks (11.9B parameters, bf16) below the same
cap of device memory; what each is given is in [gpu-check.md](gpu-check.md#rivals). *Busy*: the
share of a step in which a kernel ran.
"""
TESTS_TEXT = """Of each file of tests its newest run; why one failed is in that run's results.
"""
BESIDE_TEXT = f"""What cards have measured, and what the simulator had predicted of the same cells
from that card's own link and kernel rates alone, before the step was measured. Where they differ by
more than {TOLERANCE:.0%}, [measured.md](measured.md) says which assumption was false.
"""
CARD_TEXT = """What the simulator's preset for this card assumes, and what was measured. Copies are
of page-locked memory to the device. The preset stays as it is: what is simulated elsewhere is
of it. A prediction for this card, here or by `oracle-offload plan`, is of what was measured.
"""


def main() -> int:
    """Write the page, and its section of the simulator's."""
    devices = read(RESULTS)
    PAGE.write_text(page(devices), encoding="utf-8")
    text = SIMULATED_PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BESIDE)
    after = rest[rest.index("\n## ") + 1 :]
    SIMULATED_PAGE.write_text(f"{before}{beside_simulated(devices)}\n{after}", encoding="utf-8")
    return 0


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each device, newest first; no rehearsal, and no older schema."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("schema") == SCHEMA and not report["simulated"]:
            report["file"] = f"benchmarks/results/{path.relative_to(folder)}"
            found.setdefault(report["device"], []).append(report)
    return {
        device: sorted(reports, key=lambda report: str(report["date"]), reverse=True)
        for device, reports in found.items()
    }


def page(devices: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the page for all devices."""
    if not devices:
        return INTRODUCTION + "\nNo card has been measured yet.\n"
    return "\n".join([INTRODUCTION, *(section(name, found) for name, found in devices.items())])


def section(device: str, reports: Sequence[dict[str, Any]]) -> str:
    """Return what is known of one device."""
    newest = reports[0]
    lines = [f"## {device}", ""]
    lines += [
        f"Driver {newest['driver']}, torch {newest['torch']}, {newest['system']}, "
        f"{newest['cpus_count']} processors. Files: "
        + ", ".join(f"[{r['date'][:10]}, {r['commit']}](../{r['file']})" for r in reports)
        + ".",
        "",
    ]
    for title, part, text, make in PARTS:
        table = list(make(reports))
        if table:
            used = report_of(reports, part)
            of = f"Measured at {used['commit']}.\n" if used else ""
            lines += [f"### {title}", "", *filter(None, (text, of)), *table, ""]
    return "\n".join(lines)


def report_of(reports: Sequence[dict[str, Any]], part: str) -> dict[str, Any] | None:
    """Return the newest file in which a part has ended, or has any row."""
    for wanted in (ENDED, None):
        for report in reports:
            entry = report.get(part, {})
            if entry.get("rows") and (wanted is None or entry["state"] in wanted):
                return report
    return None


def rows_of(reports: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    """Return the rows of that file; none where there is no such file."""
    report = report_of(reports, part)
    return [row for row in report[part]["rows"] if isinstance(row, dict)] if report else []


def table(columns: Mapping[str, Callable[[Any], str]], rows: Iterable[Any]) -> Iterator[str]:
    """Yield the lines of a table; no line where there is no row."""
    lines = [f"| {' | '.join(make(row) for make in columns.values())} |" for row in rows]
    if lines:
        yield f"| {' | '.join(columns)} |"
        yield "| --- " * len(columns) + "|"
        yield from lines


def figure(key: str, form: str, scale: float = 1.0) -> Callable[[Any], str]:
    """Return a column: a row's figure in another unit, empty where the row has none."""

    def cell(row: Any) -> str:
        value = row.get(key)
        return "" if value is None else format(value / scale if scale != 1.0 else value, form)

    return cell


def beside_simulated(devices: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the section of docs/performance.md: cells that were measured, and predictions."""
    rows = [
        {"card": device, **row}
        for device, reports in devices.items()
        for row in steps_of(reports)
        if "offload" in row and "predicted_step_s" in row
    ]
    columns = {
        "card": figure("card", "s"),
        "cell": lambda row: f"{shape_of(row)}, {row['offload']:.0%} offloaded, train",
        "simulated s": figure("predicted_step_s", ".3f"),
        "measured s": figure("step_s", ".3f"),
        "/ simulated": figure("over_predicted_ratio", ".3f"),
        "simulated GB": figure("predicted_h2d_bytes", ".1f", GB),
        "measured GB": figure("h2d_bytes", ".1f", GB),
    }
    lines = list(table(columns, rows)) or ["No card has been measured yet."]
    return "\n".join([BESIDE, "", BESIDE_TEXT, *lines, ""])


def steps_of(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of training steps that were timed."""
    rows = rows_of(reports, "step") + rows_of(reports, "unet")
    return [row for row in rows if "step_s" in row]


def steps(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of training steps, and what was predicted wrongly."""
    rows = steps_of(reports)
    resident = {
        row["name"].removesuffix(", resident"): row
        for row in rows
        if row["name"].endswith(", resident")
    }
    measured = [row for row in rows if "offload" in row]

    def of_resident(row: Any) -> str:
        return figure("step_s", ".3f")(resident.get(shape_of(row), {}))

    yield from table(
        {
            "model": shape_of,
            "offloaded": figure("offload", ".0%"),
            "resident s": of_resident,
            "s": figure("step_s", ".3f"),
            "/ resident": figure("over_resident_ratio", ".3f"),
            "predicted s": figure("predicted_step_s", ".3f"),
            "/ predicted": figure("over_predicted_ratio", ".3f"),
            "GB a step": figure("h2d_bytes", ".1f", GB),
            "/ least": figure("over_x_min_ratio", ".3f"),
            "GB/s": figure("rate_gbps", ".1f"),
            "stalls s": figure("stall_s", ".3f"),
            "attach s": figure("attach_s", ".1f"),
            "equal": lambda row: f"{row['equal_losses_count']} of {row['compared_steps_count']}",
        },
        measured,
    )
    wrong = [said for row in measured if (said := false_assumptions(row, resident, reports))]
    if wrong:
        yield ""
        yield f"Predictions that are off by more than {TOLERANCE:.0%}, and why:"
        yield ""
        yield from wrong


def shape_of(row: Any) -> str:
    """Return the model that a row is of."""
    return str(row["name"]).partition(", ")[0]


def false_assumptions(
    row: dict[str, Any], resident: Mapping[str, Any], reports: Sequence[dict[str, Any]]
) -> str:
    """Say which assumption of a prediction does not hold, where it is off; else an empty string."""
    if abs(row.get("over_predicted_ratio", 1.0) - 1) <= TOLERANCE:
        return ""
    found = []
    compared = {
        "the kernels (the resident step)": (
            resident.get(shape_of(row), {}).get("step_s"),
            row.get("predicted_kernels_s"),
            "s",
            1.0,
        ),
        "the bytes": (row.get("h2d_bytes"), row.get("predicted_h2d_bytes"), "GB", GB),
        "the link": (row.get("rate_gbps"), link_gbps(reports), "GB/s", 1.0),
    }
    for what, (real, assumed, unit, scale) in compared.items():
        if real and assumed and abs(real / assumed - 1) > TOLERANCE:
            found.append(f"{what} {real / scale:.3g} {unit} instead of {assumed / scale:.3g}")
    why = "; ".join(found) or "none of kernels, bytes and link alone: how they overlap"
    return f"- {row['name']}: {row['over_predicted_ratio']:.2f} of the prediction: {why}."


def link_gbps(reports: Sequence[dict[str, Any]]) -> float | None:
    """Return the fastest copy of large pieces to the device."""
    rates = [
        row["rate_gbps"]
        for row in rows_of(reports, "link")
        if re.match(r"registered_\w+_h2d_", row["name"]) and row["copy_bytes"] >= 2**24
    ]
    return max(rates, default=None)


def rivals(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of contenders at equal memory."""
    rows, joules = list[dict[str, Any]](), dict[str, float]()
    for part in ("rivals", "rivals_more"):
        used = report_of(reports, part)
        rows += rows_of(reports, part)
        for row in used["power"]["rows"] if used else ():  # of that run, by its own sampler
            if "joules_per_step" in row:
                joules[row["name"].partition(": ")[2]] = row["joules_per_step"]

    def what(row: Any) -> str:
        return str(row["name"]).partition(", ")[2]

    def outcome(row: Any) -> str:
        said = row.get("error") or row.get("skipped") or row.get("setting", "")
        return re.sub(r"\s+", " ", str(said)).replace("|", "/")[:160]

    order = sorted(
        rows, key=lambda row: (-float(what(row).split()[0]), row.get("step_s", float("inf")))
    )
    yield from table(
        {
            "cap, tokens": what,
            "contender": lambda row: row["contender"] + version(row),
            "s": figure("step_s", ".3f"),
            "GB a step": figure("h2d_bytes", ".1f", GB),
            "peak GiB": figure("peak_reserved_bytes", ".1f", GIB),
            "locked GiB": figure("locked_bytes", ".1f", GIB),
            "host peak GiB": figure("rss_peak_bytes", ".1f", GIB),
            "busy": figure("busy_ratio", ".0%"),
            "J a step": lambda row: figure("joules", ".0f")({"joules": joules.get(row["name"])}),
            "attach s": figure("attach_s", ".1f"),
            "as": outcome,
        },
        order,
    )


def version(row: Mapping[str, Any]) -> str:
    """Return the version of a rival, short."""
    return f" {str(row['version'])[:8]}" if row.get("version") else ""


def card(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what the simulator assumes of the card, and what was measured."""
    assumed = preset_of(reports[0]["device"])
    found: dict[str, Any] = {"link_gbps": link_gbps(reports)}
    for row in rows_of(reports, "rates"):
        found |= {key: row[key] for key in ("tflops", "memory_gbps", "launch_s") if key in row}
    units = {
        "link_gbps": ("copies to the device", "GB/s", 1.0, ".1f"),
        "tflops": ("matrix products, bf16", "TFLOP/s", 1.0, ".0f"),
        "memory_gbps": ("memory of the device", "GB/s", 1.0, ".0f"),
        "launch_s": ("from kernel to kernel", "us", 1e-6, ".2f"),
    }

    def of(source: Mapping[str, Any] | None, key: str) -> str:
        _, _, scale, form = units[key]
        return format(source[key] / scale, form) if source else ""

    yield from table(
        {
            "rate": lambda key: units[key][0],
            "unit": lambda key: units[key][1],
            "assumed": lambda key: of(assumed, key),
            "measured": lambda key: of(found, key),
        },
        (key for key in units if found.get(key) is not None),
    )
    false = [
        f"{units[key][0]} ({found[key] / assumed[key]:.2f} of it)"
        for key in units
        if assumed and found.get(key) and abs(found[key] / assumed[key] - 1) > TOLERANCE
    ]
    if false:
        yield ""
        yield f"Assumptions that are off by more than 5%: {', '.join(false)}."


def preset_of(device: str) -> dict[str, float] | None:
    """Return the rates of the simulator's preset for a card."""
    source = (ROOT / "csrc" / "sim" / "control.c").read_text(encoding="utf-8")
    number = r"([\d.e-]+)"
    for name, link, tflops, memory, launch in re.findall(
        rf'\{{"(\w+)",\s*\{{"[^"]+", {number}, [^,]+, [^,]+, {number}, {number}, {number}', source
    ):
        if name in device.lower().replace(" ", ""):
            return {
                "link_gbps": float(link),
                "tflops": float(tflops),
                "memory_gbps": float(memory),
                "launch_s": float(launch),
            }
    return None


def locking(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of page-locking."""
    yield from table(
        {
            "memory": figure("name", "s"),
            "attach s/GiB": figure("attach_per_gib_s", ".3f"),
            "fill s/GiB": figure("fill_per_gib_s", ".3f"),
            "lock s/GiB": figure("register_per_gib_s", ".3f"),
            "unlock s/GiB": figure("unregister_per_gib_s", ".3f"),
            "fork s": figure("fork_s", ".4f"),
            "exit s": figure("exit_s", ".2f"),
        },
        (row for row in rows_of(reports, "lock") if "skipped" not in row and "error" not in row),
    )


def host(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what a call costs the host."""
    yield from table(
        {
            "call": lambda row: str(row["name"]).replace("_", " "),
            "plain us": figure("linear_s", ".1f", 1e-6),
            "empty function us": figure("empty_s", ".1f", 1e-6),
            "managed us": figure("managed_s", ".1f", 1e-6),
            "/ empty function": figure("over_empty_function_ratio", ".2f"),
        },
        (row for row in rows_of(reports, "layers") if "managed_s" in row),
    )


def bits(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what is equal to the last bit: without any determinism flag where none is named."""
    yield from table(
        {
            "what": figure("name", "s"),
            "equal losses": lambda row: f"{row['equal_losses_count']} of {row['steps_count']}",
            "equal weights": lambda row: f"{row['equal_weights_count']} of {row['weights_count']}",
            "largest difference of a loss": figure("largest_loss_difference", ".3g"),
        },
        (row for row in rows_of(reports, "bits") if "equal_losses_count" in row),
    )


def tests(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the counts of the tests that ran on the card, each file's newest."""
    newest: dict[str, dict[str, Any]] = {}
    for report in reports:
        for row in report.get("tests", {}).get("rows", []):
            if row["state"] in ENDED:
                newest.setdefault(row["name"], row)
    yield from table(
        {
            "tests": figure("name", "s"),
            "passed": figure("passed_count", "d"),
            "failed": figure("failed_count", "d"),
            "skipped": figure("skipped_count", "d"),
        },
        newest.values(),
    )


Make = Callable[[Sequence[dict[str, Any]]], Iterator[str]]
# Title, the part of the check that it is of, what it says first, its table.
PARTS: tuple[tuple[str, str, str, Make], ...] = (
    ("A training step", "step", STEP_TEXT, steps),
    ("Compared with others", "rivals", RIVALS_TEXT, rivals),
    ("The card", "rates", CARD_TEXT, card),
    ("Host time of a layer's call", "layers", "", host),
    ("Attach and page-locking", "lock", "", locking),
    ("Bits, with determinism flags and without", "bits", "", bits),
    ("Tests on the card", "", TESTS_TEXT, tests),
)


if __name__ == "__main__":
    sys.exit(main())
