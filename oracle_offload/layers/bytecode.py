"""What a function's code mentions, functions and comprehensions inside it included."""

from __future__ import annotations

import types
from collections.abc import Iterator


def every_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions and comprehensions written in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from every_code(constant)


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of attributes and globals that a function's code mentions."""
    return {name for part in every_code(code) for name in part.co_names}
