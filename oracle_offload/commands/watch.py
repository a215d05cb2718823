"""The command `watch`: a running training, by its heartbeat file, in a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..host.cache import folder
from ..host.sensors import Sensors
from ..host.terminal import FileError, columns, naming, obeys, put, show, wants_color
from ..observe.live import Live, heartbeats, path_of, ranks_beside, read
from .exits import Exit

EVERY_S = 1.0
_HOME, _CLEAR_BELOW = "\x1b[H", "\x1b[J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `watch` takes."""
    parser.add_argument("pid", nargs="?", type=int, help="the process; by default the latest")
    parser.add_argument("--once", action="store_true", help="show one look and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one line per look")


def run(args: argparse.Namespace) -> Exit:
    """Run the command."""
    # Off a terminal there is nothing to draw over: one look, or a line of JSON per look.
    once = args.once or not (obeys(sys.stdout) or args.json)
    try:
        path = _chosen(args.pid)
        with naming("write", "standard output"), _viewer(args.json, once) as show_look:
            _watch(path, once, show_look)
        if not once:
            print(
                "the training has ended, or cannot write its heartbeat any more "
                f"({path.name} is gone)",
                file=sys.stderr,
            )
        return Exit.OK
    except FileError as problem:
        print(problem, file=sys.stderr)
        return Exit.ERROR
    except KeyboardInterrupt:  # how one who watches leaves
        if once:
            raise
        return Exit.OK


def _watch(path: Path, once: bool, show_look: Callable[[Live], None]) -> None:
    """Look again and again, until the heartbeat has gone."""
    sensors: dict[str, Sensors] = {}
    refused = False
    while True:
        try:
            with naming("read", str(path)):
                live = _with_card(read(path), sensors)
        except FileError as problem:
            # Windows refuses to open a file while it is replaced.
            if isinstance(problem.__cause__, PermissionError) and not refused:
                refused = True
                time.sleep(EVERY_S)
                continue
            if once or path.exists():
                raise
            return
        refused = False
        show_look(live)
        if once:
            return
        time.sleep(EVERY_S)


@contextmanager
def _viewer(as_json: bool, once: bool) -> Iterator[Callable[[Live], None]]:
    """Give what shows a look: a line of JSON, text, or a view that is drawn over."""
    if as_json:
        yield _show_json
        return
    if once:
        yield lambda live: show(
            sys.stdout, lambda width, color: live.to_text(width=width, color=color)
        )
        return
    try:
        from ..observe.screen import Screen
    except ImportError:  # rich is not there
        yield _show_over
        return
    with Screen(sys.stdout) as screen:
        yield screen.show


def _show_json(live: Live) -> None:
    put(sys.stdout, live.to_json())
    sys.stdout.flush()


def _show_over(live: Live) -> None:
    text = live.to_text(width=columns(sys.stdout), color=wants_color(sys.stdout))
    put(sys.stdout, f"{_HOME}{_CLEAR_BELOW}{text}")
    sys.stdout.flush()


def _chosen(pid: int | None) -> Path:
    if pid is not None:
        own = path_of(pid)
        if own.exists():
            return own
        elsewhere = (path for path in heartbeats() if path.stem.endswith(f"-{pid}"))
        return next(elsewhere, own)
    for path in heartbeats():
        return path
    raise FileError(
        f"no training has a heartbeat in {folder()}: it begins with the first optimizer step "
        "after attach(), where ORACLE_OFFLOAD_HEARTBEAT is not 0"
    )


def _with_card(live: Live, sensors: dict[str, Sensors]) -> Live:
    """Ask the card here, which costs the training nothing."""
    others = ranks_beside(live)
    for device in live.document["devices"]:
        uuid = device["uuid"]
        if uuid is not None:
            if uuid not in sensors:
                sensors[uuid] = Sensors(uuid)
            return Live(live.document, sensors[uuid].read(), others)
    return Live(live.document, others=others)
