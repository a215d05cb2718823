"""Loss and memory of every step in a file: one JSON object a line, appended as training goes.

Each line is one write to a file that is open for appending, so a process that is killed loses at
most the line it was writing; what came before is in the system's hands. A line that was torn is
passed over by `read_metrics`, and what is written next begins a line of its own.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..host.json_lines import records_in
from ..host.schema import schema

if TYPE_CHECKING:
    from .meter import Numbers

SCHEMA = schema("metrics", 1)


class MetricsFile:
    """A file of numbers that grows by a line per step; a run that is resumed appends to it.

    Parameters
    ----------
    path : str or path
        The file; made if it is not there. In several processes each needs one of its own.
    device : torch.device or str, optional
        As for `Meter`.
    sensors : bool
        As for `Meter`.

    Raises
    ------
    OSError
        The file cannot be written.

    Examples
    --------
    In a loop of one's own::

        with oracle_offload.observe.MetricsFile("metrics.jsonl") as metrics:
            for step, batch in enumerate(loader):
                ...
                optimizer.step()
                metrics.log(step, loss=loss)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, device: Any = None, sensors: bool = False
    ) -> None:
        from .meter import Meter  # and with it torch, which `read_metrics` does without

        self._meter = Meter(device, sensors=sensors)
        self.path = os.fspath(path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._file = os.open(self.path, flags, 0o644)
        try:
            self._torn = not _ends_whole(self._file)
            self._write({"schema": SCHEMA, "started_s": time.time(), "pid": os.getpid()})
        except BaseException:
            self.close()
            raise

    def log(self, /, step: int, loss: Any = None, **known: Any) -> Numbers:
        """Append a line: the numbers of `Meter.read` since the last one.

        Parameters
        ----------
        step : int
            The step that has ended.
        loss : float or Tensor of one element, optional
            Its loss; a tensor on a GPU is waited for.
        **known : int, float, Tensor of one element, or None
            More numbers: ``lr``, ``length`` (tokens or pixels of the batch).

        Returns
        -------
        dict of str to int, float or None
            What was written.

        Raises
        ------
        OSError
            The file cannot be written.
        TypeError
            Something known is no number.
        """
        numbers = self._meter.read(step=step, loss=loss, **known)
        self.append(numbers)
        return numbers

    def append(self, numbers: Mapping[str, Any]) -> None:
        """Append a line of numbers that were read elsewhere.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        self._write({"time_s": time.time(), **numbers})

    def _write(self, record: Mapping[str, Any]) -> None:
        finite = {name: _spelled(value) for name, value in record.items()}
        before = "\n" if self._torn else ""  # else this line would be lost with the torn one
        line = f"{before}{json.dumps(finite, allow_nan=False)}\n".encode("ascii")
        self._torn = True  # until all of it is written
        written = os.write(self._file, line)
        if written < len(line):  # a full disk; the next write says so, if it still is
            written += os.write(self._file, line[written:])
        self._torn = written < len(line)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


@dataclass(frozen=True)
class MetricsRun:
    """What one run wrote.

    Attributes
    ----------
    started_s : float or None
        When it began, in seconds since 1970; None where the line that says so is lost.
    pid : int or None
        Its process.
    records : list of dict
        Its lines, in the order of writing. A loss that is no number is a float too: ``nan``.
    """

    started_s: float | None = None
    pid: int | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, number) of the lines that have both."""
        return [
            (record["step"], record[name])
            for record in self.records
            if isinstance(record.get("step"), int) and isinstance(record.get(name), int | float)
        ]


def read_metrics(path: str | os.PathLike[str]) -> list[MetricsRun]:
    """Return the runs of a metrics file, the first one first; lines that are torn are passed over.

    Parameters
    ----------
    path : str or path
        What `MetricsFile` wrote.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    runs: list[MetricsRun] = []
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for record in records_in(file):
            if record.get("schema") == SCHEMA:
                runs.append(MetricsRun(record.get("started_s"), record.get("pid")))
                continue
            if not runs:
                runs.append(MetricsRun())
            runs[-1].records.append({name: _read(value) for name, value in record.items()})
    return runs


def _ends_whole(file: int) -> bool:
    size = os.lseek(file, 0, os.SEEK_END)
    if not size:
        return True
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) == b"\n"


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no such numbers


def _spelled(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
