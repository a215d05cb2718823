"""The pages about memory errors: complete, current, and with examples that run."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oracle_offload.cli import build_parser
from oracle_offload.diagnose.explain import explain_oom
from oracle_offload.diagnose.explain.cause import TITLES
from oracle_offload.diagnose.explain.facts import FACT_TITLES
from oracle_offload.diagnose.explain.fixes import CATALOGUE
from oracle_offload.diagnose.explain.templates import TEMPLATES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ("out-of-memory.md", "killed-without-a-message.md", "it-worked-yesterday.md", "messages.md")
ERROR = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB of "
    "which 512.00 MiB is free. Of the allocated memory 6.00 GiB is allocated by PyTorch, and "
    "128.00 MiB is reserved by PyTorch but unallocated."
)


def read(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), flags=re.M | re.S)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messages_page", ROOT / "tools/messages_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRINTED = generator().printed()  # on the site alone


def test_the_causes_and_fixes_are_what_their_tool_writes() -> None:
    text = read("messages.md")
    assert text == generator().page(text), "run: python tools/messages_page.py"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_every_message_is_listed_with_its_explanation_and_an_example(template: Any) -> None:
    page = f"\n{PRINTED}"
    start = page.index(f"\n### {template.name}\n")
    section = " ".join(re.split(r"\n##", page[start + 2 :])[0].split())
    assert template.says in section
    assert "```text" in section
    assert "Seen in: " in section


def test_every_cause_and_every_fix_is_listed() -> None:
    page = read("messages.md")
    for name in TITLES:
        assert f"| `{name}` |" in page
    for key in CATALOGUE:
        assert f"| `{key}`" in page


@pytest.mark.parametrize("page", PAGES[:3])
def test_a_golden_report_that_is_named_is_shown_as_it_is(page: str) -> None:
    text = read(page)
    names = re.findall(r"`tests/data/oom/golden/([\w.-]+\.txt)`", text)
    assert names
    for name in names:
        golden = (ROOT / "tests/data/oom/golden" / name).read_text("utf-8")
        assert f"```text\n{golden}```" in text


@pytest.mark.parametrize("page", PAGES)
def test_every_command_shown_is_one_that_exists(page: str) -> None:
    commands = re.findall(r"python -m oracle_offload ((?:explain|doctor)[^`\n|&)]*)", read(page))
    assert commands
    for command in commands:
        words = shlex.split(command)
        if words == ["explain"]:
            continue  # the command by its name alone
        build_parser().parse_args(words)


@pytest.mark.parametrize("page", PAGES)
def test_lines_but_those_of_tables_keep_to_100_columns(page: str) -> None:
    lines = read(page).splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]*)(?:#[\w-]+)?\)", read(page)):
        assert not target or (DOCS / target).exists(), target


def test_the_keys_of_the_json_are_those_documented() -> None:
    text = read("out-of-memory.md")
    table = text[text.index("## The JSON") :]
    documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert documented == set(explain_oom(ERROR).to_dict())


def test_the_causes_named_in_the_pages_exist() -> None:
    text = read("it-worked-yesterday.md")
    table = text[: text.index("## What may have changed")]
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`(?: \||, )", table)) - {"map_location"}
    assert named
    assert named - {"inference_mode"} <= set(TITLES)


def _train() -> None:
    raise RuntimeError(ERROR)


@pytest.mark.parametrize("index", range(3))
def test_the_examples_for_programs_run(
    index: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import threading

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    code = blocks("out-of-memory.md", "python")
    assert len(code) == 3
    if index == 0:
        with pytest.raises(RuntimeError) as caught:
            exec(code[index], {"train": _train})
        assert "What to change first" in "".join(caught.value.__notes__)
    elif index == 1:
        from oracle_offload.diagnose.explain import hooks

        exec(code[index], {})
        assert sys.excepthook is hooks._excepthook
        hooks.uninstall()
    else:
        exec(code[index], {"train": _train})
        assert capsys.readouterr().out == "too_big 1073741824\n"


def test_the_example_for_a_parent_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    (code,) = blocks("killed-without-a-message.md", "python")
    exec(code, {})
    assert capsys.readouterr().out.startswith("Killed, perhaps for memory")


def test_the_example_that_keeps_a_history_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the example records torch's memory")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("it-worked-yesterday.md", "python")
    space: dict[str, Any] = {}
    exec(code, space)
    for step, length in enumerate((512, 480, 500, 2048)):
        space["record"](step, "forward", length)
    space["history"].close()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["length"] == 2048
    assert explain_oom(ERROR, history=tmp_path / "steps.jsonl").cause.name == "longest_batch"


def test_the_facts_have_titles_for_people() -> None:
    page = PRINTED
    stated = {name for template in TEMPLATES for name, _ in template.fields}
    assert stated <= set(FACT_TITLES)
    assert all(FACT_TITLES[name] in " ".join(page.split()) for name in stated)
