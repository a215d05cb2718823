"""How Sphinx makes a site of these pages: `make site` writes out/site.

The pages are plain Markdown. What is only on the site is put in while Sphinx reads them: the order
of the pages, from the lists of index.md and decisions/index.md; entries from docstrings, for the
names that api.md lists; and what is printed by a tool, in the place of a comment
`<!-- printed by tools/NAME.py -->`.
"""

from __future__ import annotations

import importlib
import re
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT)]
sys.path.append(str(ROOT / "tools"))  # behind others: a tool may be named as a library is

project = "oracle_offload"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
]
html_theme = "furo"
html_title = project
html_copy_source = False
highlight_language = "text"  # of code that names none: commands, mostly
maximum_signature_line_length = 88
exclude_patterns = ["conf.py", "inventory"]
myst_heading_anchors = 4
nitpicky = True
# As Sphinx has them of imports that are for type checkers alone.
nitpick_ignore = [
    ("py:class", name)
    for name in ("DoctorReport", "Fit", "Numbers", "PathLike", "Question", "Rung", "Shard", "Speed",
                 "Step", "Storage", "System", "list[dict[str", "transformers.trainer.Trainer")
]  # fmt: skip
autodoc_member_order = "bysource"
# A word in backticks is code; types are those of the annotations, docstrings say them in words.
default_role = "code"
napoleon_google_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]


def inventory(name: str) -> str:
    """Return a file in Sphinx's format of the places in another project's pages that we link to.

    The lists in docs/inventory are the part of those projects' `objects.inv` that types of ours
    name, in plain text, so that nothing has to be fetched.
    """
    listed = (DOCS / "inventory" / f"{name}.txt").read_bytes()
    packed = ROOT / "out" / "inventory" / f"{name}.inv"
    packed.parent.mkdir(parents=True, exist_ok=True)
    head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    packed.write_bytes(head.encode() + zlib.compress(listed))
    return str(packed)


intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", inventory("python")),
    "torch": ("https://docs.pytorch.org/docs/stable/", inventory("torch")),
}

# A page's part from one heading of the second level to the next.
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n)*)", re.M)
LISTED = re.compile(r"^- \[[^]]+\]\(([\w/-]+)\.md\)", re.M)
NAMED = re.compile(r"^- `([\w.]+)`", re.M)
PAGE = re.compile(r"`{0,2}\bdocs/([\w/-]+)\.md`{0,2}")
PRINTED = re.compile(r"^<!-- printed by tools/(\w+)\.py -->$", re.M)


def tree(section: re.Match[str]) -> str:
    """Return a section of an index.md with the order of the pages that it lists."""
    order = "\n".join(LISTED.findall(section[2]))
    return f"{section[0]}\n```{{toctree}}\n:hidden:\n:caption: {section[1]}\n\n{order}\n```\n\n"


def entries(section: re.Match[str]) -> str:
    """Return a section of api.md with the entry of each name that it lists."""
    names = NAMED.findall(section[2])
    listed = NAMED.sub(r"- {py:obj}`\1 <oracle_offload.\1>`", section[0])
    return listed + "".join(f"\n```{{eval-rst}}\n{directive(name)}\n```\n" for name in names) + "\n"


def directive(path: str) -> str:
    """Return what makes autodoc document a public name, such as `doctor.examine`."""
    name = path.rpartition(".")[2]
    if name.endswith("Error"):
        return f".. autoexception:: oracle_offload.{path}\n   :members:\n   :show-inheritance:"
    if name[0].isupper():
        return f".. autoclass:: oracle_offload.{path}\n   :members:\n   :inherited-members: tuple"
    return f".. autofunction:: oracle_offload.{path}"


def internal(_: Sphinx, env: object, node: Any, shown: Any) -> Any:
    """Show a type that is there, but not public, by its name: it has no entry to lead to."""
    module, _, name = node.get("reftarget", "").rpartition(".")
    known = module.startswith("oracle_offload.") and hasattr(sys.modules.get(module), name)
    return shown if known else None


def link(_: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Let a page that a docstring names be a link."""
    lines[:] = [PAGE.sub(r":doc:`/\1`", line) for line in lines]


def fill(_: Sphinx, page: str, content: list[str]) -> None:
    """Put into a page what is on the site alone."""
    text = PRINTED.sub(lambda mark: importlib.import_module(mark[1]).printed(), content[0])
    change = {"index": tree, "decisions/index": tree, "api": entries}.get(page)
    content[0] = SECTION.sub(change, text) if change else text


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx what happens when it reads a page."""
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", link)
    app.connect("missing-reference", internal)
    return {"parallel_read_safe": True}
