"""The state of every random generator that a training step may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch


class RandomState:
    """What Python's, numpy's and torch's generators of this process would draw next.

    numpy's where numpy is imported, a card's where torch has used it.

    Parameters
    ----------
    generators : iterable of torch.Generator
        Further ones, of a sampler for example; kept in their order.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = tuple(generators)
        self._plain = self._read()

    def restore(self) -> None:
        """Let every generator go on from where it was."""
        self.load_state_dict(self._plain)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as it was taken, as tensors, numbers, strings and lists of them."""
        return self._plain

    def refuse_another(self, plain: dict[str, Any]) -> None:
        """Raise where `load_state_dict` would.

        Raises
        ------
        ValueError
            It has another number of further generators, or of cards, than there are.
        """
        if len(plain["generators"]) != len(self._generators):
            raise ValueError(
                f"the state has {len(plain['generators'])} generators, and {len(self._generators)} "
                "were given; give those that it was taken of, in their order"
            )
        cards = torch.cuda.device_count() if plain["cuda"] else 0
        if len(plain["cuda"]) > cards:
            raise ValueError(
                f"the state is of {len(plain['cuda'])} cards, and there are {cards}; resume where "
                "as many are visible"
            )

    def load_state_dict(self, plain: dict[str, Any]) -> None:
        """Set every generator to what `state_dict` has returned, in this process or another.

        Raises
        ------
        ValueError
            As for `refuse_another`; no generator was changed.
        """
        self.refuse_another(plain)
        version, words, gauss = plain["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(plain["torch"])
        if plain["cuda"]:
            torch.cuda.set_rng_state_all(plain["cuda"])
        numpy: Any = sys.modules.get("numpy")
        if plain["numpy"] is not None and numpy is not None:
            name, words, position, has_gauss, gauss = plain["numpy"]
            numpy.random.set_state((name, numpy.array(words, "uint32"), position, has_gauss, gauss))
        for generator, state in zip(self._generators, plain["generators"], strict=True):
            generator.set_state(state)

    def _read(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        numpy: Any = sys.modules.get("numpy")
        drawn = None
        if numpy is not None:
            name, array, position, has_gauss, cached = numpy.random.get_state()
            drawn = [str(name), array.tolist(), int(position), int(has_gauss), float(cached)]
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "python": [version, list(words), gauss],
            "numpy": drawn,
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if has_cuda else [],
            "generators": [generator.get_state() for generator in self._generators],
        }
