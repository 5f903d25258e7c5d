"""Answers of modules that compute nothing, and the gradients of a backward pass over them.

An answer leads backward to the arguments it was made of, as far as the real computation did, and so to the modules
that answered those. The parameters that a backward pass comes to get gradients of zero, which cost nothing; hooks that
the script has set on them run, in the order of the real pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, saved_tensors_hooks

from holdfast.adapters.replay.nested import mapped

_SMALL = 1 << 20
_RECOMPUTES = "CheckpointFunctionBackward"
"""A node that finds its parameters in the backward pass only."""
_NOT_THE_SCRIPTS = ("torch.nn.parallel", "torch.distributed")
"""Hooks of these take part in collectives, which a replay leaves out."""


class Gradients:
    """Gives parameters their gradients of zero at the end of a backward pass."""

    def __init__(self) -> None:
        self._zeros: dict[tuple[Any, Any], torch.Tensor] = {}
        self._reached: list[Part] = []

    def reach(self, part: Part) -> None:
        """A backward pass has come to ``part``."""
        self._reached.append(part)
        # At the end, since a parameter that several answers lead to gets one gradient. Each time, since a pass that
        # ends with an error never comes there.
        Variable._execution_engine.queue_callback(self._give)

    def _give(self) -> None:
        reached, self._reached = self._reached, []
        given: set[int] = set()
        for part in reached:
            if part.zeros is None:
                part.zeros = [(parameter, self._zero(parameter)) for parameter in part.parameters]
            for parameter, zeros in part.zeros:
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    if id(parameter) not in given:
                        _run_hooks(parameter)
                elif parameter.grad is None:
                    parameter.grad = zeros
                given.add(id(parameter))

    def _zero(self, parameter: torch.Tensor) -> torch.Tensor:
        """Zeros of this shape; all share one piece of memory."""
        if type(parameter) not in (torch.Tensor, torch.nn.Parameter):
            return torch.zeros_like(parameter)
        key = (parameter.device, parameter.dtype)
        flat = self._zeros.get(key)
        if flat is None or flat.numel() < parameter.numel():
            flat = self._zeros[key] = torch.zeros(parameter.numel(), device=parameter.device, dtype=parameter.dtype)
        return flat[: parameter.numel()].view(parameter.shape)


class Part:
    """One tensor of an answer that leads backward."""

    def __init__(
        self, base: torch.Tensor, sources: list[int], parameters: list[torch.Tensor], gradients: Gradients
    ) -> None:
        self.base = base
        self.sources = sources
        """Which of the tensors in the arguments it follows from,"""
        self.parameters = parameters
        """and which parameters, in the order in which a backward pass comes to them."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Where a backward pass arrives: once, however often the module has answered."""
        self.zeros: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        """Each parameter with its gradient, once a backward pass has come here."""
        self._gradients = gradients
        self.anchor.register_post_accumulate_grad_hook(self._reached)

    def _reached(self, anchor: torch.Tensor) -> None:
        anchor.grad = None
        self._gradients.reach(self)


class Answer:
    """What a module answers, again and again."""

    def __init__(self, output: Any, sources: Sequence[torch.Tensor], module: torch.nn.Module, gradients: Gradients):
        """``output``: of the real computation, with its graph. ``sources``: tensors among its arguments."""
        self._module = module  # kept alive: its identity is what the answer is found by
        self._parts: dict[int, Part] = {}
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            base = tensor.detach()
            if tensor.requires_grad:
                used, parameters = _ancestors(tensor, sources, trained)
                order = _in_order(tensor, parameters, [sources[index] for index in used])
                self._parts[id(base)] = Part(base, used, order, gradients)
            return base

        self._output = mapped(output, keep)

    def again(self, sources: Sequence[torch.Tensor]) -> Any:
        def fresh(base: torch.Tensor) -> torch.Tensor:
            part = self._parts.get(id(base))
            if part is None:
                return _fresh(base)
            answered: torch.Tensor = _Link.apply(part, part.anchor, *(sources[index] for index in part.sources))
            return answered

        return mapped(self._output, fresh)


class _Link(torch.autograd.Function):  # type: ignore[misc]
    """Leads from a tensor of an answer to what it was made of. All gradients are zero."""

    @staticmethod
    def forward(ctx: Any, part: Part, _: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.part = part
        ctx.save_for_backward(*sources)
        ctx.kinds = [(source.shape, source.dtype, source.device) for source in sources]
        return _fresh(part.base)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return (None,) * (2 + len(ctx.kinds))
        if torch.is_grad_enabled():  # of a gradient that is differentiated itself
            found = [_Zero.apply(kind, ctx.part.anchor, grad, *ctx.saved_tensors) for kind in ctx.kinds]
        else:
            found = [_zeros(*kind) for kind in ctx.kinds]
        return (None, torch.zeros(()), *found)


class _Zero(torch.autograd.Function):  # type: ignore[misc]
    """A gradient that leads on backward."""

    @staticmethod
    def forward(ctx: Any, kind: Any, *leads: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(lead.shape, lead.dtype, lead.device) for lead in leads]
        return _zeros(*kind)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return (None, *(_zeros(*kind) for kind in ctx.kinds))


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if shape.numel() * dtype.itemsize <= _SMALL:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _fresh(base: torch.Tensor) -> torch.Tensor:
    """A tensor that the script may change in place, if that costs little."""
    return base.clone() if base.nbytes <= _SMALL else base.data


# ---------------------------------------------------------------------- the graph of a real computation


def alone() -> contextlib.AbstractContextManager[Any]:
    """Around a real computation: what it saves for its backward pass is not for checkpointing around it."""
    hooks: contextlib.AbstractContextManager[Any] = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    return hooks


def _ancestors(
    output: torch.Tensor, sources: Sequence[torch.Tensor], trained: list[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """Which of ``sources`` (their numbers) and of ``trained`` a backward pass from ``output`` comes to."""
    ends = {source.grad_fn: index for index, source in enumerate(sources) if source.grad_fn is not None}
    leaves = {id(source): index for index, source in enumerate(sources) if source.grad_fn is None}
    if output.grad_fn is None:  # the module answers with one of them
        return [leaves[id(output)]] if id(output) in leaves else [], [p for p in trained if p is output]
    found: set[int] = set()
    reached: set[int] = set()
    visited: set[Node] = set()
    waiting: list[Node] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        if node in ends:
            found.add(ends[node])
            continue
        if node.name().endswith(_RECOMPUTES):
            reached.update(map(id, trained))
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            reached.add(id(leaf))
            if id(leaf) in leaves:
                found.add(leaves[id(leaf)])
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return sorted(found), [p for p in trained if id(p) in reached and id(p) not in leaves]


def _in_order(output: torch.Tensor, parameters: list[torch.Tensor], sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """``parameters`` in the order of a real backward pass, which is made where hooks of the script depend on it.

    It leads to ``sources`` too: what waits in the queue of a pass decides in which order equals leave it.
    """
    if output.grad_fn is None or not any(any(_hooks(parameter)) for parameter in parameters):
        return parameters
    order: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        for parameter in parameters:
            stack.enter_context(_sole_hook(parameter, functools.partial(_note, order, parameter)))
        with contextlib.suppress(RuntimeError):  # the older kind of checkpointing
            wanted = [*parameters, *sources]
            torch.autograd.grad(output, wanted, torch.zeros_like(output), allow_unused=True, retain_graph=True)
    return list(_unique([*order, *reversed(parameters)]))


def _note(order: list[torch.Tensor], parameter: torch.Tensor, _: torch.Tensor) -> None:
    order.append(parameter)


@contextlib.contextmanager
def _sole_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    hooks: OrderedDict[int, Any] = parameter._backward_hooks or OrderedDict()
    before = dict(hooks)
    hooks.clear()
    handle = parameter.register_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        hooks.update(before)


def _hooks(parameter: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks that the script has set on a parameter: before its gradient is there, and after."""
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    before, after = ([hook for hook in (hooks or {}).values() if _is_the_scripts(hook)] for hooks in both)
    return before, after


def _run_hooks(parameter: torch.Tensor) -> None:
    before, after = _hooks(parameter)
    grad = torch.zeros_like(parameter)
    for hook in before:
        hook(grad)
    if parameter.grad is None:
        parameter.grad = grad
    for hook in after:
        hook(parameter)


def _is_the_scripts(hook: Any) -> bool:
    return not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_NOT_THE_SCRIPTS)


def _unique(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return iter({id(tensor): tensor for tensor in tensors}.values())
