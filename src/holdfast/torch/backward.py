"""The moment between a forward and a backward pass, observed without a hook on the user's modules.

A hook on a module is part of it: whoever copies or pickles the module takes the hook along, with all that it holds.
So what is observed is the call that begins a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from holdfast.torch.patches import BACKWARD, TORCH


class BeforeBackward:
    """Calls a function before each backward pass of the thread that made this, until :meth:`remove`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._thread = get_ident()
        self._inside = False
        """A backward pass is under way: activation checkpointing begins others inside it, which have no forward pass of
        their own and run under another random state."""
        self._applied = TORCH.begin(BACKWARD, self)

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **options: Any) -> Any:
            if self._inside or get_ident() != self._thread:
                return original(*args, **options)
            self._inside = True
            try:
                self._call()
                return original(*args, **options)
            finally:
                self._inside = False

        return backward

    def remove(self) -> None:
        self._applied.undo()
