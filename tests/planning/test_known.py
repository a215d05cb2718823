"""Models that are known by name: what their classes make of their configs; and the hub."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import oracle_offload
from oracle_offload import cli
from oracle_offload.host.patience import Patience, quiet_libraries
from oracle_offload.planning.known import FILE, every, known, similar
from oracle_offload.planning.source import source_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plan.md").read_text("utf-8")


@pytest.mark.ci
@pytest.mark.parametrize("name", every())
def test_a_class_makes_as_many_parameters_of_a_config_as_the_list_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model, built = every()[name], source_of(name, dtype=torch.bfloat16).module
    assert built is not None and type(built).__name__ == model.kind
    assert sum(tensor.numel() for tensor in built.parameters()) == model.parameters
    assert all(tensor.is_meta for tensor in [*built.parameters(), *built.buffers()])


def test_each_model_has_a_repository_a_source_and_a_place_on_the_page() -> None:
    assert len(every()) > 50
    for name, model in every().items():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.repository) and model.source
        assert f"`{name}`" in PAGE, f"docs/plan.md does not list {name}"
        assert known(model.repository) is model, "no two models have one repository"
    said = json.loads(FILE.read_text("utf-8"))
    assert said["schema"] == "oracle_offload/models/1"


@pytest.mark.parametrize(
    "said", ["FLUX.1-dev", "flux1-dev", "Flux.1 dev", "black-forest-labs/FLUX.1-dev"]
)
def test_a_model_is_known_however_its_name_is_written(said: str) -> None:
    model = known(said)
    assert model is not None and model.name == "FLUX.1-dev"
    assert known("FLUX.1") is None and "FLUX.1-dev" in similar("FLUX.1")


def test_a_name_is_planned_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code = cli.main(["plan", "gpt2", "--card", "rtx 4090", "--ram", "64GB", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert code == 0 and said["model"] == "gpt2" and said["card"] == "RTX 4090"
    assert said["parameters"] == every()["gpt2"].parameters and said["units"] > 12
    assert said["activations_bytes"] > 0 and said["verdict"] == "fits resident"
    with pytest.raises(
        ValueError, match=r"'FLUX\.1' is no file.*known by name are .*'FLUX\.1-dev'"
    ):
        oracle_offload.plan("FLUX.1")
    with pytest.raises(ValueError, match=r"--fetch.*; known by name are .*FLUX"):
        oracle_offload.plan("someone/FLUX.1-de")


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    config = {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4}
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    found = oracle_offload.plan("gpt2", card=24, ram="64GB", measure=False)
    assert found.storage.parameters < every()["gpt2"].parameters / 10


def test_without_its_library_a_model_is_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    found = oracle_offload.plan("FLUX.1-dev", card="4090", ram="64GB")
    assert found.storage.parameters == 11_901_408_320 and not found.storage.units
    assert found.verdict == "weights fit streamed; activations and the LoRA unknown"
    assert any("which is not installed: units" in said for said in found.assumptions)


# ---- the hub ----

_CONFIG = {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4}


class Hub(http.server.BaseHTTPRequestHandler):
    """What the hub answers of two repositories, on the loopback device."""

    files: ClassVar[dict[str, dict[str, str]]] = {
        "owner/text": {"config.json": json.dumps(_CONFIG)},
        "owner/image": {
            "model_index.json": "{}",
            "unet/config.json": json.dumps({"_class_name": "UNet2DConditionModel"}),
        },
        "owner/nothing": {},
    }
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, whole: bool) -> None:
        self.asked.append(self.path)
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/(.*)", self.path)
        text = self.files.get(found[1], {}).get(found[2]) if found else None
        self.send_response(200 if text is not None else 404)
        if text is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", "0" * 40)
        etag = hashlib.sha1(self.path.encode()).hexdigest()
        self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(text or "")))
        self.end_headers()
        if whole and text is not None:
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def hub() -> Iterator[tuple[str, list[str]]]:
    """Yield the hub's address, and the list of what it has been asked for."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked.clear()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", Hub.asked
    finally:
        server.shutdown()
        server.server_close()


# Runs one command after the other, and prints the code, the output and the errors of each. Where
# the hub is and where its files go is read when its library is imported.
COMMANDS = """
import contextlib, io, json, sys
from oracle_offload import cli

results = []
for command in json.loads(sys.argv[1]):
    said, problem = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(problem):
        code = cli.main(["plan", *command, "--ram", "64GB", "--no-measure", "--json"])
    results.append((code, said.getvalue(), problem.getvalue()))
print("\\n" + json.dumps(results))
"""


def fetched(folder: Path, endpoint: str, *commands: list[str]) -> list[tuple[int, str, str]]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_CACHE": str(folder),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "1",
    }
    program = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    ended = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    results: list[tuple[int, str, str]] = json.loads(ended.stdout.splitlines()[-1])
    return results


@pytest.mark.ci
def test_fetch_asks_the_hub_for_a_config_and_for_nothing_else(tmp_path: Path) -> None:
    with hub() as (endpoint, asked):
        unasked, text, image, nothing, again = fetched(
            tmp_path,
            endpoint,
            ["owner/text"],
            ["owner/text", "--fetch"],
            ["owner/image", "--fetch"],
            ["owner/nothing", "--fetch"],
            ["owner/text"],
        )
        # But what the hub's library asks for itself.
        requests = [path.partition("/resolve/main/") for path in asked if path[:5] != "/api/"]
    assert unasked[0] == 2 and "--fetch" in unasked[2]
    assert text[0] == 0, text[2]
    assert json.loads(text[1])["model"] == "GPT2LMHeadModel"
    assert image[0] == 0, image[2]
    assert json.loads(image[1])["model"] == "UNet2DConditionModel"
    assert nothing[0] == 1 and "has none of config.json on the hub" in nothing[2]
    assert again[:2] == text[:2], "what was fetched is there"
    assert requests[0][0] == "/owner/text" and requests[-1][0] == "/owner/nothing"
    assert {name.rpartition("/")[2] for *_, name in requests} == {"config.json", "model_index.json"}
    assert {path.name for path in tmp_path.rglob("snapshots/*/**/*") if path.is_file()} == {
        "config.json",
        "model_index.json",
    }


def test_without_a_network_fetch_says_so(tmp_path: Path) -> None:
    ((code, said, problem),) = fetched(tmp_path, "http://127.0.0.1:9", ["owner/text", "--fetch"])
    assert code == 1 and said == "" and "Traceback" not in problem
    assert "the hub has not given the config of owner/text" in problem
    assert "Without a network give a folder" in " ".join(problem.split())


def test_fetch_takes_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "12B", "--fetch"]) == 2
    assert "takes the name of a repository" in capsys.readouterr().err


# ---- while it works ----


def test_a_command_says_what_it_does_once_it_takes_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("oracle_offload.planning")
    level = logger.level
    with Patience("plan", logger.name, 0.0):
        logger.info("measuring %s", "a \x1b[31mstep")
        time.sleep(0.05)
    assert capsys.readouterr().err == "plan: measuring a step ...\n"
    with Patience("plan", logger.name, 60.0):
        logger.info("measuring")
    assert capsys.readouterr().err == ""
    assert logger.level == level and not logger.handlers


def test_what_is_under_way_is_said_while_it_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("oracle_offload.planning")
    said = threading.Event()
    with Patience("plan", logger.name, 0.01) as patience:
        show = patience._show
        patience._timer.function = lambda: (show(), said.set())
        logger.info("importing torch")
        assert said.wait(20), "nothing more is logged, and it is said all the same"
    assert capsys.readouterr().err == "plan: importing torch ...\n"


def test_other_libraries_are_quiet_meanwhile() -> None:
    loggers = [logging.getLogger(name) for name in ("torchao", "diffusers", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    with quiet_libraries():
        assert not any(logger.isEnabledFor(logging.WARNING) for logger in loggers)
    assert [logger.level for logger in loggers] == before


def test_the_planner_is_imported_where_it_is_asked_for() -> None:
    code = "import sys, oracle_offload.planning.known as k; k.known('gpt2');"
    code += "print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.stdout.strip() == "False", ended.stderr
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = importlib.import_module("oracle_offload.planning").plans
