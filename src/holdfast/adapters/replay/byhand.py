"""Training without an optimizer, found where it happens: a tensor that a backward pass has given a gradient has moved
along that gradient by the time of the next backward pass. After ``torch.autograd.grad`` it may also be a new tensor
that stands in its place.

Saliency maps, adversarial examples and gradients of inputs are no training. So where the script has modules, only
their parameters count, or tensors of the same shapes as all of a module's parameters; and a change that does not follow
the gradient, such as another initialisation, does not. A few elements of a few tensors are looked at, and the first
backward passes of a script only.
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

    def before(
        self, outputs: object, modules: Sequence[torch.nn.Module], inputs: Sequence[torch.Tensor] | None = None
    ) -> tuple[bool, bool]:
        """A backward pass from ``outputs`` begins, or one to ``inputs`` alone.

        Returns whether a tensor was trained since the last one, and whether to look at what this one leaves.
        """
        if inputs is None:
            parameters = itertools.chain.from_iterable(module.parameters() for module in modules)
            leaves = [leaf for leaf in (parameters if modules else _leaves(outputs)) if leaf.requires_grad]
        elif not modules or _stand_for(inputs, modules):
            leaves = [*inputs]
        else:
            return False, False
        moves = [mark.move(leaves) for mark in self._marks]
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        return 1 in moves and -1 not in moves, True

    def after(self, grads: Sequence[torch.Tensor | None] | None = None) -> None:
        """It has ended. ``grads``: of the inputs."""
        self.passes += 1
        there = [(place, leaf) for place, ref in enumerate(self._leaves) if (leaf := ref()) is not None]
        found = ((place, leaf, leaf.grad if grads is None else grads[place]) for place, leaf in there)
        plain = ((place, leaf, grad) for place, leaf, grad in found if grad is not None and _is_plain(grad))
        replaced = grads is not None
        self._marks = [
            _Mark(leaf, grad, place if replaced else None) for place, leaf, grad in itertools.islice(plain, _TENSORS)
        ]


class _Mark:
    """A few elements of a tensor, those with the largest gradients."""

    def __init__(self, leaf: torch.Tensor, grad: torch.Tensor, place: int | None) -> None:
        """``place``: among the tensors of a pass, where another one may stand in the next."""
        self._leaf = weakref.ref(leaf)
        self._place = place
        self._shape = leaf.shape
        grad = grad.detach().flatten()
        self._places = grad.abs().topk(min(_ELEMENTS, grad.numel())).indices
        self._slopes: list[float] = grad[self._places].tolist()
        self._values = self._look(leaf)

    def _look(self, leaf: torch.Tensor) -> list[float]:
        values: list[float] = leaf.detach().flatten()[self._places].tolist()
        return values

    def move(self, leaves: Sequence[torch.Tensor]) -> int:
        """0: it is where it was; 1: it has moved up or down along its gradient; -1: it has moved otherwise."""
        leaf = self._leaf()
        if self._place is not None and self._place < len(leaves):
            leaf = leaves[self._place]
        if leaf is None or leaf.shape != self._shape:
            return 0
        pairs = zip(self._look(leaf), self._values, self._slopes, strict=True)
        signs = {(now > before) == (slope > 0) for now, before, slope in pairs if now != before and slope}
        return 0 if not signs else 1 if len(signs) == 1 else -1


def _stand_for(inputs: Sequence[torch.Tensor], modules: Sequence[torch.nn.Module]) -> bool:
    """Whether these are all trained parameters of a module, or tensors in the place of them."""
    shapes = [leaf.shape for leaf in inputs]
    return any(shapes == [p.shape for p in module.parameters() if p.requires_grad] for module in modules)


def _is_plain(grad: torch.Tensor) -> bool:
    return (
        type(grad) is torch.Tensor
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
