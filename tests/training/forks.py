"""Processes of their own for tests, forked from one that has imported torch and done nothing else.

An import of torch takes two seconds. What is asked of import itself, of an exit, of signals or of
how a driver is loaded has an interpreter of its own.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LIMIT_S = 600  # that a program may take before it is ended
spent_s = 0.0  # of processors, by programs of servers that still run: tools/bill.py


class Forks:
    """The process that forks; what it forks has no model, no thread and no operator behind it."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._server = subprocess.Popen(
            [sys.executable, str(HERE)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `code` as a program, and return how it ended and what it said."""
        global spent_s
        assert self._server.stdin is not None and self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            request = {"code": code, "folder": folder, "environment": environment}
            self._server.stdin.write(json.dumps({**request, "path": sys.path}) + "\n")
            self._server.stdin.flush()
            status, seconds = json.loads(self._server.stdout.readline())
            self._spent_s += seconds
            spent_s += seconds
            said = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess([code], status, *said)

    def print(self, code: str, **environment: str) -> str:
        """Run `code` as a program that does not fail, and return what it printed."""
        done = self.run(code, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        """End it."""
        global spent_s
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)
        spent_s -= self._spent_s  # the system has added them to those of this process now
        self._server.stdout.close()


def _become(request: dict[str, Any]) -> None:
    """Run what was asked for in this process, a child, and end it."""
    folder = Path(request["folder"])
    for file, name in ((0, None), (1, "stdout"), (2, "stderr")):
        path = os.devnull if name is None else folder / name
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, file)
        os.close(opened)
    os.environ.update(request["environment"])
    sys.path[:], sys.argv[:] = request["path"], ["-c"]
    signal.alarm(LIMIT_S)
    status = 0
    try:
        exec(compile(request["code"], "<test>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve() -> None:
    import torch  # noqa: F401

    gc.collect()
    gc.freeze()  # collections of a program look at what is its own, and not at all of torch
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status, used = os.wait4(child, 0)
        answer = [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
