"""What a command says while it works: nothing for two seconds, then what it is doing."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from .terminal import obeys, printable, put

DELAY_S = 2.0
# Notices of other libraries at import, which are no part of what a command says.
_CHATTY = (
    "bitsandbytes",
    "diffusers",
    "huggingface_hub",
    "peft",
    "torch.utils._pytree",
    "torchao",
    "transformers",
)


class Patience(logging.Handler):
    """Shows the latest message of a logger on a stream, once work has taken `delay_s`.

    A terminal has one line, which is gone in the end; elsewhere each message is a line.

    Parameters
    ----------
    name : str
        Of the command, before each message.
    logger : str
        Whose messages say what is being done.
    delay_s : float
    """

    def __init__(self, name: str, logger: str, delay_s: float = DELAY_S) -> None:
        super().__init__(logging.INFO)
        self._name, self._logger = name, logging.getLogger(logger)
        self._stream: IO[str] = sys.stderr
        self._begun = time.monotonic()
        self._due, self._said, self._shown = self._begun + delay_s, "", 0
        self._level = self._logger.level
        self._timer = threading.Timer(delay_s, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Patience:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)
        self._timer.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._timer.cancel()
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)
        with self.lock or threading.RLock():
            self._said = ""
            if self._shown and obeys(self._stream):
                put(self._stream, f"\r{' ' * self._shown}\r")
                self._stream.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message: it is shown at once where it is late already."""
        self._said = printable(record.getMessage())
        if time.monotonic() >= self._due:
            self._show()

    def _show(self) -> None:
        with self.lock or threading.RLock():
            if not self._said:
                return
            line = f"{self._name}: {self._said} ..."
            if obeys(self._stream):
                put(self._stream, f"\r{line:<{self._shown}}")
                self._shown = max(self._shown, len(line))
            else:
                put(self._stream, f"{line}\n")
            self._stream.flush()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep what other libraries say when they are imported out of what a command says."""
    import warnings

    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
