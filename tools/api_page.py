"""Write docs/api.md from the docstrings: `python tools/api_page.py`; needs torch.

Every public name with its signature. A test compares the page with what this prints.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, wrap

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "api.md"
# Title, and names: those of the package itself, and what the pages tell users to import.
GROUPS = (
    ("Training", "attach MemoryManager memory_summary MemoryReport build_info"),
    ("Micro-batches", "accumulate integrations.accumulate_in"),
    ("Weights from files", "from_pretrained empty_weights save_weights"),
    ("Before it is loaded", "plan Plan"),
    (
        "AI-Toolkit",
        "aitoolkit.install aitoolkit.uninstall aitoolkit.MemoryManager "
        "aitoolkit.sync_grad_transfers",
    ),
    ("Numbers while it trains", "Meter MetricsFile read_metrics MetricsRun"),
    ("Loggers", "integrations.tensorboard integrations.wandb integrations.postfix"),
    ("Recording", "record Recorder phase Recording read_recording"),
    (
        "Batches that fit",
        "find_batch_size BatchResult AdaptiveBatch emergency_minimal_operations "
        "get_detailed_memory_info set_memory_fraction",
    ),
    (
        "Guards",
        "Checkpoint PressureMonitor cleanup Cleanup track_copies CopyCounter ThermalPause "
        "VramManager worker_budgets WorkerBudget",
    ),
    ("Training that does nothing", "IdleAlarm Idle first_step_proof FirstStepProof"),
    ("Errors", "OffloadError DriverError NoRoomError StaleWeightsError"),
    (
        "Out of memory",
        "explain_oom explained_oom is_oom OomReport explain.install explain.uninstall",
    ),
    ("The machine", "configure_allocator doctor.examine"),
)
HEAD = """\
# API

Every public name, from its docstring; this page is printed by `python tools/api_page.py`. Types are
those of the annotations. What the errors mean: [errors.md](errors.md); the words used:
[how it works](how-it-works.md#words); the simulated device: [simulator.md](simulator.md).
"""
SECTION = re.compile(r"^(Parameters|Returns|Raises|Attributes|Yields|Examples|Notes)\n-+\n", re.M)


def signature(name: str, value: object) -> str:
    """Return `name` with its parameters, annotations as they are written."""
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    out: list[str] = []
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(p.startswith("*") for p in out):
            out.append("*")
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        out.append(text)
    result = found.return_annotation
    returns = "" if result is found.empty or inspect.isclass(value) else f" -> {result}"
    line = f"{name}({', '.join(out)}){returns}"
    if len(line) <= 96:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in out) + f"){returns}"


def prose(text: str) -> list[str]:
    """Return docstring text as Markdown; literal blocks after `::` become code."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith(("    ", ">>> ")):
            out += ["```python", *dedent(block).splitlines(), "```", ""]
        else:
            shown = re.sub(r"``(.+?)``", r"`\1`", " ".join(block.split()))
            shown = re.sub(r"::$", ":", shown)
            out += [*wrap(shown, 100, break_on_hyphens=False, break_long_words=False), ""]
    return out


def items(text: str) -> list[str]:
    """Return the entries of a section, `name : type` with an indented description, as a list."""
    out = []
    for entry in re.split(r"\n(?=\S)", text.strip("\n")):
        head, _, body = entry.partition("\n")
        said = re.sub(r"``(.+?)``", r"`\1`", " ".join(body.split()))
        shown = f"- `{head.strip()}`" + (f": {said}" if said else "")
        out += wrap(
            shown, 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
    return [*out, ""]


def documentation(value: object) -> list[str]:
    """Return a docstring as Markdown."""
    text = inspect.cleandoc(value.__doc__ or "")
    first, *rest = SECTION.split(text)
    out = prose(first)
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        out += [f"**{title}**", ""]
        out += prose(body) if title in ("Examples", "Notes") else items(body)
    return out


def members(owner: type) -> Iterator[tuple[str, object]]:
    """Yield the documented public methods and properties, as the class lists them."""
    for name, raw in vars(owner).items():
        value = raw.fget if isinstance(raw, property) else getattr(owner, name, None)
        if not name.startswith("_") and getattr(value, "__doc__", None) and not is_data(raw):
            yield name, raw


def is_data(raw: object) -> bool:
    """Whether a class attribute is a plain value, whose docstring is that of its type."""
    return not (callable(raw) or isinstance(raw, property | classmethod | staticmethod)) and not (
        hasattr(type(raw), "__get__")
    )


def entry(path: str) -> list[str]:
    """Return the entry of one public name, such as `doctor.examine`."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(f"oracle_offload.{module}".rstrip(".")), name)
    full = f"oracle_offload.{path}"
    out = [f"### {path}", "", "```python", signature(full, value), "```", ""]
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        if bases and issubclass(value, BaseException):
            out[3] = f"class {full}({', '.join(bases)})"
    out += documentation(value)
    if inspect.isclass(value):
        for method, raw in members(value):
            getter = raw.fget if isinstance(raw, property) else None
            bound = getter or getattr(value, method)
            shown = f"{name}.{method}"
            line = shown if getter else signature(shown, bound)
            out += [f"#### {shown}", "", "```python", line, "```", "", *documentation(bound)]
    return out


def page() -> str:
    """Return the whole page."""
    out = [HEAD]
    for title, names in GROUPS:
        out += [f"## {title}", ""]
        for path in names.split():
            out += entry(path)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
