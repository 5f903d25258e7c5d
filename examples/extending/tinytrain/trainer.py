"""The loop of tinytrain. It knows nothing of preemption, as most frameworks do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


class Trainer:
    """Trains a model on the batches of a loader, which are pairs of inputs and targets."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any],
        loss_of: Callable[[Any, Any], Any],
    ) -> None:
        self.model, self.optimizer, self.loader, self.loss_of = model, optimizer, loader, loss_of
        self.history = {"steps": 0, "loss_sum": 0.0}

    def fit(self, epochs: int) -> dict[str, Any]:
        """Train; returns the number of steps and the sum of their losses."""
        self.model.train()
        for _ in self._epochs(epochs):
            for batch in self._batches():
                self._step(batch)
        return self.history

    def _epochs(self, total: int) -> Iterator[int]:
        yield from range(total)

    def _batches(self) -> Iterator[Any]:
        yield from self.loader

    def _step(self, batch: Any) -> None:
        inputs, targets = batch
        loss = self.loss_of(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history["steps"] += 1
        self.history["loss_sum"] += loss.item()
