"""Whose failure it is that ends the training function: its own exception, or a worker that died.

After an exception of its own, a function that reports checkpoints restores itself from the newest of them, exactly as
without holdfast: nothing is saved, and the next attempt begins there. Everything else is a rescue: the workers that
are left save what is complete.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from holdfast.engine.engine import Engine
from holdfast.errors import HoldfastError

_BURIAL_S = 0.1
"""From the end of a process's connections, which its peers see, to the end of the process."""

_OF_COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")
"""Parts of what torch.distributed says of a peer that is gone."""


def is_own(error: BaseException, engines: Sequence[Engine]) -> bool:
    """Whether the training function has raised ``error`` by itself, with all workers alive as far as one can see."""
    if isinstance(error, HoldfastError) or not isinstance(error, Exception):
        return False
    if _is_of_a_collective(error) or any(engine.board_lost for engine in engines):
        return False
    time.sleep(_BURIAL_S)
    return not any(engine.saver.dead_peers() for engine in engines if engine.saver is not None)


def _is_of_a_collective(error: BaseException) -> bool:
    distributed = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "DistError", None)
    text = str(error).lower()
    return (kind is not None and isinstance(error, kind)) or any(part in text for part in _OF_COLLECTIVES)
