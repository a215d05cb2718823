"""Take the pictures of docs/images that a browser takes: pages, notebooks, a terminal, timelines.

    python tools/screenshots.py [docs/images]

Needs in this Python what tools/requirements-screenshots.txt lists; the browser is Chromium, as
QtWebEngine's wheel holds it. It runs no script and reaches no network. What the pictures show is
really executed, on the simulated device; the error in the notebook is one of the CPU allocator, so
no GPU is needed.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 1000
CASE = "cuda-2.8-ranks-share-card"
TIMEOUT_S = 120
SETTLE_MS = 100
LEAST = 100  # as high as this is a page that is not laid out yet

CELLS = (
    "%load_ext oracle_offload.diagnose.explain",
    "import torch\n\nweights = torch.empty(1 << 45)",
    "from oracle_offload import explain_oom\n\nexplain_oom(open('train.log').read())",
)
TERMINAL = (
    "<!DOCTYPE html><body style='margin:0;background:#16191d'><pre style='margin:0;padding:16px;"
    'color:#e4e8ec;font:13px/1.35 "DejaVu Sans Mono",monospace\'>{}</pre></body>'
)


class Browser:
    """Chromium without a window, a network, or scripts."""

    def __init__(self) -> None:
        os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
        flags = "--no-sandbox --disable-gpu --force-color-profile=srgb"
        os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = (
            f"{flags} --host-resolver-rules='MAP * ~NOTFOUND'"
        )
        try:
            self._core, self._gui, widgets, engine, settings = map(
                import_module,
                (
                    "PyQt6.QtCore",
                    "PyQt6.QtGui",
                    "PyQt6.QtWidgets",
                    "PyQt6.QtWebEngineWidgets",
                    "PyQt6.QtWebEngineCore",
                ),
            )
        except ImportError as error:
            raise SystemExit(
                f"{error}: pip install -r tools/requirements-screenshots.txt"
            ) from error
        self._application = widgets.QApplication(["screenshots"])
        self._view = engine.QWebEngineView()
        attributes = settings.QWebEngineSettings.WebAttribute
        for attribute in (attributes.JavascriptEnabled, attributes.ShowScrollBars):
            self._view.settings().setAttribute(attribute, False)
        self._view.show()

    def shoot(self, page: str, picture: Path) -> None:
        """Write a picture of a page, as high as the page is."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "page.html"
            file.write_text(page, encoding="utf-8")
            self._view.resize(WIDTH, LEAST)
            loop = self._core.QEventLoop()
            self._view.loadFinished.connect(loop.quit)
            self._core.QTimer.singleShot(TIMEOUT_S * 1000, loop.quit)
            self._view.load(self._core.QUrl.fromLocalFile(str(file)))
            loop.exec()
            self._view.loadFinished.disconnect(loop.quit)
            shown, height = LEAST, self._settled_height()
            while height > shown:  # what arrived after the first frame is known at the next one
                self._view.resize(WIDTH, height)
                shown, height = height, self._settled_height()
            if height <= LEAST:
                raise SystemExit(f"{picture.name} was not drawn: it is {height} high")
        image = self._view.grab().toImage()
        formats, flags = self._gui.QImage.Format, self._core.Qt.ImageConversionFlag
        image = image.convertToFormat(formats.Format_RGB32)
        pixels = memoryview(image.constBits().asarray(image.sizeInBytes())).cast("B").cast("I")
        palette = [colour for colour, _ in Counter(pixels).most_common(256)]  # a third of the size
        image = image.convertToFormat(
            formats.Format_Indexed8, palette, flags.ThresholdDither | flags.AvoidDither
        )
        if not image.save(str(picture)):
            raise SystemExit(f"{picture} could not be written")
        print(f"{picture}: {WIDTH} x {height}, {picture.stat().st_size / 1024:.0f} KiB")

    def _settled_height(self) -> int:
        """Wait until the page is laid out, and as high as two seconds ago; return how high."""
        told, same = 0, 0
        for _ in range(TIMEOUT_S * 1000 // SETTLE_MS):
            self._wait()
            height = int(self._view.page().contentsSize().height())
            told, same = height, same + 1 if height == told else 0
            if same >= 2000 // SETTLE_MS and height > LEAST:
                break
        return told

    def _wait(self) -> None:
        loop = self._core.QEventLoop()
        self._core.QTimer.singleShot(SETTLE_MS, loop.quit)
        loop.exec()


def message() -> str:
    """Return the text of the case shown, from the corpus."""
    with open(ROOT / "tests/data/oom/corpus.jsonl", encoding="utf-8") as corpus:
        texts = {case["id"]: case["text"] for case in map(json.loads, corpus)}
    return str(texts[CASE])


def notebook() -> str:
    """Execute a notebook whose second cell runs out of memory; return it as HTML."""
    try:
        nbclient, nbformat = map(import_module, ("nbclient", "nbformat"))
        import_module("ipykernel"), import_module("nbconvert")
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
    return as_html(book)


def as_html(book: Any) -> str:
    """Return a notebook as a page."""
    exporter = import_module("nbconvert").HTMLExporter(template_name="lab")
    # The page is a picture's source: nothing in it needs what these would load.
    exporter.require_js_url = exporter.mathjax_url = exporter.jquery_url = ""
    return str(exporter.from_notebook_node(book)[0])


def example() -> str:
    """Return the notebook of examples/ as it was executed last."""
    book = import_module("nbformat").read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    return as_html(book)


def terminal() -> str:
    """Return what `oracle-offload watch` shows of a training, as a page that looks like one."""
    from rich.console import Console
    from rich.terminal_theme import SVG_EXPORT_THEME
    from rich.text import Text
    from summary_page import trained

    from oracle_offload.observe import Meter
    from oracle_offload.observe.heartbeat import pulse
    from oracle_offload.observe.live import Live
    from oracle_offload.observe.screen import Screen

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    os.environ.update(TERM="xterm-256color", COLUMNS="100")
    meter, stream = Meter(), Terminal()
    with Screen(stream) as screen, trained("link", lambda: screen.show(Live(pulse(meter)))):
        pass
    last = stream.getvalue().rpartition("\x1b[?1049l")[2].replace(str(os.getpid()), "4711", 1)
    page = Console(record=True, width=100, file=io.StringIO())
    page.print(Text.from_ansi(f"$ oracle-offload watch\n{last}"))
    return TERMINAL.format(
        page.export_html(theme=SVG_EXPORT_THEME, inline_styles=True, code_format="{code}")
    )


def summary() -> str:
    """Return the page of `memory_summary` of a training."""
    from dataclasses import replace

    from summary_page import trained

    from oracle_offload.observe.summary import MemoryReport

    with trained("link") as manager:
        report: MemoryReport = manager.memory_summary()
    return replace(report, memory=report.memory[:1]).to_html()


def timelines(*names: str) -> list[str]:
    """Return the timelines of trainings of known bounds, without the words that name them."""
    from summary_page import trained

    import oracle_offload

    recordings = []
    for name in names:
        with oracle_offload.record() as recorder, trained(name):
            recordings.append(recorder.recording())
    timed = (step for recording in recordings for step in recording.steps() if step["timed"])
    span_s = max(step["seconds"] for step in timed)
    return [unlabelled(recording.pictures(span_s)[0][1]) for recording in recordings]


def unlabelled(picture: str) -> str:
    """Return a timeline without its title and its sentence: the words before the first group."""
    head, inks, rest = picture.partition('<g class="oo-ink"')
    begin, wide, lanes = rest.partition('<g class="oo-wide">')
    return head + inks + re.sub(r"<text .*?</text>\n", "", begin) + wide + lanes


def main(arguments: list[str]) -> int:
    """Write the pictures into a folder."""
    folder = (Path(arguments[0]) if arguments else ROOT / "docs" / "images").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT))
    from oracle_offload.diagnose.explain import explain_oom

    browser = Browser()
    flux = [ROOT / "docs/images" / f"demo-timeline{part}.svg" for part in ("", "-part")]
    # In an order that shows nothing: docs/recording.md has what a reader made of them.
    step_a, step_b, step_c = timelines("host", "link", "compute")
    pages = {
        "explain-page": explain_oom(message()).to_html(),
        "explain-notebook": notebook(),
        "summary-page": summary(),
        "notebook": example(),
        "watch-terminal": terminal(),
        "flux-timeline": "".join(f"<div>{picture.read_text('utf-8')}</div>" for picture in flux),
        "timeline-a": step_a,
        "timeline-b": step_b,
        "timeline-c": step_c,
    }
    for name, page in pages.items():
        browser.shoot(page, folder / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
