"""Write the map of files into docs/development.md: `python tools/map_page.py`.

A file's line is the first sentence of its docstring or opening comment. A test compares, so that a
file without one, or a page that lags behind, is noticed.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "development.md"
BEGIN, END = "<!-- map: python tools/map_page.py -->\n", "<!-- end of the map -->\n"

# Highest floor first, as one reads: from what a user touches down to the driver.
FOLDERS = {
    "oracle_offload": "the package: its face, and the command line",
    "oracle_offload/model": "an attached model; training needs it, `layers`, `engine` and `host`",
    "oracle_offload/layers": "the managed layers",
    "oracle_offload/engine": "the engines of the devices, real or simulated",
    "oracle_offload/disk": "weights from files into masters",
    "oracle_offload/compress": "weights in fewer bytes, without loss",
    "oracle_offload/observe": "what people see",
    "oracle_offload/diagnose": "what went wrong, and is this machine fit; could be deleted whole",
    "oracle_offload/diagnose/explain": "out-of-memory errors explained",
    "oracle_offload/diagnose/doctor": "the machine examined",
    "oracle_offload/planning": "a training planned before it is loaded",
    "oracle_offload/train": "other parts of a training loop; could be deleted whole",
    "oracle_offload/train/micro_batches": "several micro-batches at once",
    "oracle_offload/train/survive": "what keeps a training alive and honest",
    "oracle_offload/train/recipes": "wrappers over what torch has",
    "oracle_offload/train/integrations": "numbers to loggers and from trainers",
    "oracle_offload/aitoolkit": "the drop-in for AI-Toolkit; could be deleted whole",
    "oracle_offload/host": "the host as the system shows it, and what is kept on it",
    "oracle_offload/commands": "the commands, one file each",
    "csrc/python": "the extension module `oracle_offload._core`",
    "csrc/include": "the engine's public interface",
    "csrc/core": "the engine",
    "csrc/kernels": "what runs on the GPU",
    "csrc/driver": "the table of CUDA driver calls",
    "csrc/base": "below driver and core",
    "csrc/sim": "the simulated CUDA driver, a library of its own",
    "examples": "complete trainings, to read and to change",
    "tools": "what `make` runs",
    "benchmarks": "what `make bench` and `make gpu-check` measure with",
}
SOURCES = (".py", ".c", ".h", ".cu", ".cpp")


def first_sentence(path: Path) -> str:
    """Return what a file says of itself.

    Raises
    ------
    ValueError
        It says nothing.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        opening = re.match(r"/\*\s*(?:[\w.]+ - )?(.*?)\*/|((?://[^\n]*\n)+)", text, re.DOTALL)
        said = (opening[1] or opening[2]) if opening else ""
        said = re.sub(r"^(\s*\*|//) ?", "", said, flags=re.MULTILINE)
        said = re.sub(r"^[\w.]+ - ", "", said.strip())
    paragraph = " ".join(said.split("\n\n")[0].split())
    sentence = re.match(r".+?[.!?](?= |$)|.+", paragraph)
    if sentence is None:
        raise ValueError(f"{path}: says nothing of itself in its first lines")
    said = sentence[0]
    return f"{said[0].upper()}{said[1:]}{'' if said[-1] in '.!?' else '.'}"


def render() -> str:
    """Return the map as Markdown."""
    lines = []
    for folder, what in FOLDERS.items():
        lines += [
            f"### {folder}",
            "",
            f"{what[0].upper()}{what[1:]}.",
            "",
            "| | |",
            "| --- | --- |",
        ]
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix not in SOURCES or path.name in ("__init__.py", "__main__.py"):
                continue
            name = path.name
            if path.with_suffix(".c").exists() and path.with_suffix(".h").exists():
                if path.suffix == ".c":
                    continue  # what its header says
                name = f"{path.stem}.[ch]"
            lines.append(f"| `{name}` | {first_sentence(path)} |")
        lines.append("")
    return "\n".join(lines)


def page(text: str, rendered: str) -> str:
    """Return `text` with the map replaced."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{rendered}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), render()), encoding="utf-8")
    sys.exit(0)
