"""torchrun's own limits, for the two that start ranks through it: the launcher, and the adapter for plain torchrun."""

from __future__ import annotations

import functools
from typing import Any


def be_patient(wait_s: float) -> None:
    """Let no rank be killed before its time: after one has ended, torchrun gives the others 30 s whatever is set."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    @functools.wraps(close)
    def patient(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
        close(self, death_sig, max(timeout, round(wait_s)))

    PContext.close = patient
