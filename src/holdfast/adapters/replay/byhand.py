"""Training without an optimizer, found where it happens: a tensor that a backward pass has given a gradient has moved
along that gradient by the time of the next backward pass.

Saliency maps, adversarial examples and gradients of inputs are no training. So where the script has modules, only
their parameters count; and a change that does not follow the gradient, such as another initialisation, does not.
A few elements of a few tensors are looked at, and the first backward passes of a script only.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import Node

_PASSES = 64
"""Backward passes that are looked at: more than a loop accumulates gradients over."""
_TENSORS = 4
_ELEMENTS = 8
_NODES = 10_000


class ByHand:
    """Looks at the first backward passes of a script."""

    def __init__(self) -> None:
        self.passes = 0
        self._marks: list[_Mark] = []
        self._leaves: list[weakref.ref[torch.Tensor]] = []

    @property
    def done(self) -> bool:
        return self.passes >= _PASSES

    def before(self, outputs: object, modules: Sequence[torch.nn.Module]) -> bool:
        """A backward pass from ``outputs`` begins. Returns whether a tensor was trained since the last one."""
        moves = [mark.move() for mark in self._marks]
        trained = 1 in moves and -1 not in moves
        parameters = itertools.chain.from_iterable(module.parameters() for module in modules)
        leaves = parameters if modules else _leaves(outputs)
        self._leaves = [weakref.ref(leaf) for leaf in leaves if leaf.requires_grad]
        return trained

    def after(self) -> None:
        """It has ended."""
        self.passes += 1
        leaves = (leaf for ref in self._leaves if (leaf := ref()) is not None and _is_plain(leaf.grad))
        self._marks = [_Mark(leaf) for leaf in itertools.islice(leaves, _TENSORS)]


class _Mark:
    """A few elements of a tensor, those with the largest gradients."""

    def __init__(self, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        self._leaf = weakref.ref(leaf)
        grad = leaf.grad.detach().flatten()
        self._places = grad.abs().topk(min(_ELEMENTS, grad.numel())).indices
        self._slopes: list[float] = grad[self._places].tolist()
        self._values = self._look(leaf)

    def _look(self, leaf: torch.Tensor) -> list[float]:
        values: list[float] = leaf.detach().flatten()[self._places].tolist()
        return values

    def move(self) -> int:
        """0: it is where it was; 1: it has moved up or down along its gradient; -1: it has moved otherwise."""
        leaf = self._leaf()
        if leaf is None or self._places.numel() > leaf.numel():
            return 0
        pairs = zip(self._look(leaf), self._values, self._slopes, strict=True)
        signs = {(now > before) == (slope > 0) for now, before, slope in pairs if now != before and slope}
        return 0 if not signs else 1 if len(signs) == 1 else -1


def _is_plain(grad: torch.Tensor | None) -> bool:
    return (
        isinstance(grad, torch.Tensor)
        and type(grad) is torch.Tensor
        and grad.layout == torch.strided
        and grad.is_floating_point()
        and grad.numel() > 0
        and not grad.is_meta
    )


def _leaves(outputs: object) -> Iterable[torch.Tensor]:
    """The leaves that a backward pass from ``outputs`` comes to."""
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    if not isinstance(tensors, list | tuple):
        return
    waiting: list[Node] = [one.grad_fn for one in tensors if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    visited: set[Node] = set(waiting)
    while waiting and len(visited) < _NODES:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                waiting.append(following)
