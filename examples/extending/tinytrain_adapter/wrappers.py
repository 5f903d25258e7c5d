"""What stands in for tinytrain's own methods; :mod:`.patches` says which, and what each is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import holdfast
from holdfast.base.patching import PatchSet
from holdfast.runtime.ownership import claim
from holdfast.runtime.protection import unprotected


class Wrappers:
    """For the life of the process. Each method takes one of tinytrain's functions and returns its replacement."""

    def __init__(self, table: PatchSet) -> None:
        self._table = table
        self._fits = 0

    def fit(self, original: Any) -> Any:
        def fit(trainer: Any, epochs: int) -> Any:
            with claim("tinytrain") as in_charge:
                if not in_charge:  # the script has a holdfast.Run around it
                    return original(trainer, epochs)
                self._fits += 1
                if self._fits > 1:  # it would resume from the end of the first
                    unprotected("holdfast protects the first fit of a process only; this one is not protected")
                    return original(trainer, epochs)
                state = {"model": trainer.model, "optimizer": trainer.optimizer, "history": trainer.history}
                with holdfast.Run(**state) as run, self._table.applied("fit", Fit(run, trainer), to=trainer):
                    return original(trainer, epochs)

        return fit


class Fit:
    """For one fit. The originals are bound to its trainer."""

    def __init__(self, run: holdfast.Run, trainer: Any) -> None:
        self._run, self._trainer = run, trainer

    def epochs(self, original: Any) -> Any:
        def epochs(total: int) -> Iterator[int]:
            yield from self._run.epochs(total)

        return epochs

    def batches(self, original: Any) -> Any:
        def batches() -> Iterator[Any]:
            yield from self._run.batches(self._trainer.loader)

        return batches

    def step(self, original: Any) -> Any:
        def step(batch: Any) -> None:
            original(batch)
            self._run.step()

        return step
