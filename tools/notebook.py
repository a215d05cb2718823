"""Execute examples/notebook.ipynb and write its outputs again: `python tools/notebook.py`.

A test executes it too, and compares what each cell shows with what is committed: the kinds of
outputs, not their figures.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELL_S = 60  # a cell that takes longer has hung


def executed() -> Any:
    """Return the notebook, executed in an empty folder by a kernel of this Python.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        A cell failed that was not to.
    """
    nbclient, nbformat = map(import_module, ("nbclient", "nbformat"))
    book = nbformat.read(NOTEBOOK, as_version=4)
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            book, timeout=CELL_S, resources={"metadata": {"path": folder}}, record_timing=False
        )
        client.execute(env=environment)
    for cell in book.cells:
        if cell.cell_type == "code":  # torch's profiler says on standard error that it ran
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return book


def shown(book: Any) -> list[list[str]]:
    """Return the kinds of outputs of each code cell."""
    return [
        [output.output_type for output in cell.outputs]
        for cell in book.cells
        if cell.cell_type == "code"
    ]


if __name__ == "__main__":
    os.environ.setdefault("ORACLE_OFFLOAD_HEARTBEAT", "0")
    import_module("nbformat").write(executed(), NOTEBOOK)
    sys.exit(0)
