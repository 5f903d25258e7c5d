"""DistributedDataParallel adds up gradients in an order that depends on its history; resume must repeat it.

DDP packs gradients into buckets: in the first iteration by the order of the parameters, from the second
on by the order in which gradients became ready in the first. The buckets decide the order in which the
ranks' numbers are added, and with three or more ranks the order decides the last bits. A process that
resumes would begin with the first kind of buckets again where the uninterrupted run has the second.

So the order of the first iteration is noted and saved, and on resume DDP is led through a backward pass
of zeros that has the same order, before training goes on.

With a static graph there are two such iterations: in the first, DDP counts how often each gradient becomes ready and
adds them up at the end; the second one decides the buckets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel


class GradientOrder:
    """The order in which one DDP module's gradients become ready in the iterations that decide its buckets."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self._parameters = [parameter for parameter in module.module.parameters() if parameter.requires_grad]
        self.order: list[int] = []
        """One iteration after the other."""
        self._pass: list[int] = []
        """Of the backward pass that runs now."""
        self._hooks: list[Any] = []

    def _rebuilds(self) -> bool:
        return not self._module.find_unused_parameters or bool(self._module.static_graph)

    def _iterations(self) -> int:
        return 2 if self._module.static_graph else 1

    def watch(self) -> None:
        """Note the order of the first backward passes; costs nothing after them."""
        if not self._rebuilds():
            return
        for index, parameter in enumerate(self._parameters):
            self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._note(index)))

    def _note(self, index: int) -> None:
        if not self._module.require_backward_grad_sync:
            return  # gradients are accumulated; DDP does not look at them yet
        if not self._pass:
            Variable._execution_engine.queue_callback(self._end_pass)
        self._pass.append(index)

    def _end_pass(self) -> None:
        this, self._pass = self._pass, []
        if not self._hooks:
            return
        regular = self._is_regular(this, set(this))
        self.order = [*self.order, *this] if regular else []
        if not regular or len(self.order) == self._iterations() * len(this):
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _is_regular(self, order: list[int], ready: set[int]) -> bool:
        """Whether a pass of zeros can repeat an iteration: a static graph counts how often a gradient becomes ready."""
        every = self._module.static_graph or len(ready) == len(self._parameters)
        return every and len(order) == len(ready) and set(order) == ready

    def hook_state(self) -> str:
        """What DDP's communication hook keeps from step to step, by its type; empty: nothing. It is not saved."""
        states = [state for _, state in getattr(self._module, "_comm_hooks", ())]
        return ", ".join(
            type(one).__qualname__ for one in states if one is not None and type(one).__name__ != "ProcessGroup"
        )

    def repeat(self, order: list[int]) -> None:
        """Lead DDP through iterations of this order. All ranks must take part."""
        self.order = list(order)
        if not self._rebuilds() or not order:
            return
        ready = set(order)
        iterations = [order[start : start + len(ready)] for start in range(0, len(order), len(ready))]
        if all(self._is_regular(one, ready) for one in iterations):
            for number, one in enumerate(iterations):
                self._iterate(one, first=number == 0)

    def _iterate(self, order: list[int], *, first: bool) -> None:
        before = [parameter.grad for parameter in self._parameters]
        ddp, reducer = self._module, self._module.reducer
        with torch.enable_grad():
            reducer.prepare_for_forward()
            # Autograd runs the nodes that were made last first: the terms are made in reverse.
            loss = torch.zeros((), device=self._parameters[0].device)
            for index in reversed(order):
                loss = loss + (self._parameters[index] * 0).sum()
            reducer.prepare_for_backward([])
            if first and ddp.static_graph:
                loss.register_hook(self._end_first_of_static_graph)
            loss.backward()
        for parameter, grad in zip(self._parameters, before, strict=True):
            parameter.grad = grad

    def _end_first_of_static_graph(self, _: torch.Tensor) -> None:
        """As DDP does by the function that its outputs go through."""
        Variable._execution_engine.queue_callback(self._module.reducer._delay_all_reduce)
        self._module._static_graph_delay_allreduce_enqueued = True
