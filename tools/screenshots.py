"""Take the pictures of docs/images: the report as a page, and under the traceback of a notebook.

    python tools/screenshots.py [docs/images]

Needs Chromium (on Debian: `apt-get install chromium`; elsewhere name it in $BROWSER), and in this
Python what tools/requirements-screenshots.txt lists. The notebook is really executed; its error is
one of the CPU allocator, so no GPU is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH = 1000
CASE = "cuda-2.8-ranks-share-card"
TIMEOUT_S = 120

CELLS = (
    "%load_ext oracle_offload.explain",
    "import torch\n\nweights = torch.empty(1 << 45)",
    "from oracle_offload import explain_oom\n\nexplain_oom(open('train.log').read())",
)
MEASURE = (
    "<script>document.documentElement.dataset.height ="
    " Math.ceil(document.body.getBoundingClientRect().bottom)</script>"
)


def browser() -> str:
    """Return the browser to use, or end with what to install."""
    for name in filter(None, (os.environ.get("BROWSER"), *NAMES)):
        path = shutil.which(name)
        if path is not None:
            return path
    raise SystemExit("no Chromium found: `apt-get install chromium`, or its path in $BROWSER")


def chromium(*arguments: str) -> str:
    """Run the browser without a window and without a network; return what it prints."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}", *arguments,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def shoot(html: str, picture: Path) -> None:
    """Write a picture of a page, as high as the page is."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(html.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
        dom = chromium(f"--window-size={WIDTH},200", "--dump-dom", page.as_uri())
        measured = re.search(r'data-height="(\d+)"', dom)
        if measured is None:
            raise SystemExit(f"the height of {picture.name} could not be measured")
        height = int(measured[1]) + 24
        page.write_text(html, encoding="utf-8")
        chromium(f"--window-size={WIDTH},{height}", f"--screenshot={picture}", page.as_uri())
    print(f"{picture}: {WIDTH} x {height}, {picture.stat().st_size / 1024:.0f} KiB")


def message() -> str:
    """Return the text of the case shown, from the corpus."""
    with open(ROOT / "tests/data/oom/corpus.jsonl", encoding="utf-8") as corpus:
        texts = {case["id"]: case["text"] for case in map(json.loads, corpus)}
    return str(texts[CASE])


def notebook() -> str:
    """Execute a notebook whose second cell runs out of memory; return it as HTML."""
    try:
        nbclient, nbconvert, nbformat = map(import_module, ("nbclient", "nbconvert", "nbformat"))
        import_module("ipykernel")
    except ImportError as error:
        raise SystemExit(f"{error}: pip install -r tools/requirements-screenshots.txt") from error
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.log").write_text(message(), encoding="utf-8")
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        client = nbclient.NotebookClient(
            book, timeout=TIMEOUT_S, allow_errors=True, resources={"metadata": {"path": folder}}
        )
        client.execute()
    shown = [output.output_type for cell in book.cells for output in cell.outputs]
    if shown != ["error", "display_data", "execute_result"]:
        raise SystemExit(f"the notebook shows {shown}, not an error and two reports")
    exporter = nbconvert.HTMLExporter(template_name="lab")
    # The page is a picture's source: nothing in it needs what these would load.
    exporter.require_js_url = exporter.mathjax_url = exporter.jquery_url = ""
    return str(exporter.from_notebook_node(book)[0])


def main(arguments: list[str]) -> int:
    """Write both pictures into a folder."""
    folder = Path(arguments[0]) if arguments else ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT))
    from oracle_offload.explain import explain_oom

    shoot(explain_oom(message()).to_html(), folder.resolve() / "explain-page.png")
    shoot(notebook(), folder.resolve() / "explain-notebook.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
