"""The state of generators of random numbers that a script holds: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def is_generator(value: Any) -> bool:
    return isinstance(value, kinds())


def kinds() -> tuple[type, ...]:
    """Their classes; those of NumPy once it is imported."""
    numpy = sys.modules.get("numpy")
    more = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return (torch.Generator, random.Random, *more)


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def restore(generator: Any, state: Any) -> None:
    """Let it continue from ``state``, which :func:`state_of` returned for one of the same kind."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
