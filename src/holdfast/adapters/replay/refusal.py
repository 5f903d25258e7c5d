"""Refusal of optimizer steps in a process whose loops cannot be followed."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.errors import UnprotectedError
from holdfast.runtime.ownership import claimed_by


def refuse_steps(error: UnprotectedError) -> None:
    """Raise ``error`` before every optimizer step from here on, except where somebody protects the loop."""

    def refuse(*_: Any) -> None:
        if claimed_by() is None:
            raise error

    register_optimizer_step_pre_hook(refuse)
