"""DistributedDataParallel adds up gradients in an order that depends on its history; resume must repeat it.

DDP packs gradients into buckets: in the first iteration by the order of the parameters, from the second
on by the order in which gradients became ready in the first. The buckets decide the order in which the
ranks' numbers are added, and with three or more ranks the order decides the last bits. A process that
resumes would begin with the first kind of buckets again where the uninterrupted run has the second.

So the order of the first iteration is noted and saved, and on resume DDP is led through a backward pass
of zeros that has the same order, before training goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class GradientOrder:
    """The order in which one DDP module's gradients become ready in its first iteration."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self._parameters = [parameter for parameter in module.module.parameters() if parameter.requires_grad]
        self.order: list[int] = []
        self._hooks: list[Any] = []

    def _rebuilds(self) -> bool:
        return not self._module.find_unused_parameters or bool(self._module.static_graph)

    def watch(self) -> None:
        """Note the order of the first backward pass; costs nothing after it."""
        if not self._rebuilds():
            return
        seen: set[int] = set()

        def note(index: int) -> None:
            if index not in seen:
                seen.add(index)
                self.order.append(index)
                if len(seen) == len(self._parameters):
                    for hook in self._hooks:
                        hook.remove()
                    self._hooks.clear()

        for index, parameter in enumerate(self._parameters):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, index=index: note(index)))

    def repeat(self, order: list[int]) -> None:
        """Lead DDP through an iteration of this order. All ranks must take part."""
        self.order = list(order)
        if not self._rebuilds() or sorted(order) != list(range(len(self._parameters))):
            return
        before = [parameter.grad for parameter in self._parameters]
        reducer = self._module.reducer
        with torch.enable_grad():
            reducer.prepare_for_forward()
            # Autograd runs the nodes that were made last first: the terms are made in reverse.
            loss = torch.zeros((), device=self._parameters[0].device)
            for index in reversed(order):
                loss = loss + (self._parameters[index] * 0).sum()
            reducer.prepare_for_backward([])
            loss.backward()
        for parameter, grad in zip(self._parameters, before, strict=True):
            parameter.grad = grad
