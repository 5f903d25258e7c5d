"""What a script has made that has a state: modules, optimizers, schedulers, scalers, in the order of their making.

A resumed process runs the same script, which makes the same things in the same order: so order is their name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from holdfast.torch.ddp import GradientOrder
from holdfast.torch.state import Objects

_PRUNE_AT = 4096


class Registry:
    """Remembers, without keeping alive."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._others: dict[str, dict[int, weakref.ref[Any]]] = {"optimizer": {}, "scheduler": {}, "scaler": {}}
        """By the number in the order of their making. Some scripts make an optimizer for each batch."""
        self._made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._counts = dict.fromkeys(self._others, 0)
        self._prune_at = _PRUNE_AT
        self._orders: weakref.WeakKeyDictionary[torch.nn.Module, GradientOrder] = weakref.WeakKeyDictionary()
        self.tracked: list[Any] = []
        self.version = 0
        """Changes with everything that is made."""

    def note_module(self, module: torch.nn.Module) -> None:
        self.version += 1
        self._modules.append(weakref.ref(module))
        if len(self._modules) > self._prune_at:  # modules that are made in a forward pass come and go
            self._modules = [ref for ref in self._modules if ref() is not None]
            self._prune_at = 2 * len(self._modules) + _PRUNE_AT

    def note_order(self, module: DistributedDataParallel) -> GradientOrder:
        order = self._orders[module] = GradientOrder(module)
        return order

    def note(self, kind: str, thing: Any) -> None:
        if thing in self._made:
            return
        refs, number = self._others[kind], self._counts[kind]
        self._counts[kind] += 1
        self._made[thing] = number
        refs[number] = weakref.ref(thing, lambda _: refs.pop(number, None))
        self.version += 1

    def track(self, thing: Any) -> None:
        """Something of the user's own with a state."""
        if not any(known is thing for known in self.tracked):
            self.tracked.append(thing)
            self.version += 1

    def orders(self) -> list[GradientOrder]:
        return list(self._orders.values())

    def alive(self, kind: str) -> list[Any]:
        return [thing for ref in [*self._others[kind].values()] if (thing := ref()) is not None]

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """Which optimizer this is, in the order of their making."""
        self.note("optimizer", optimizer)
        return self._made[optimizer]

    def is_trained(self, model: torch.nn.Module) -> bool:
        """Whether an optimizer has one of its parameters."""
        trained = {id(parameter) for parameter in self.parameters()}
        return any(id(parameter) in trained for parameter in model.parameters())

    def roots(self) -> list[torch.nn.Module]:
        """Modules with a state that are no part of another; those that are trained first."""
        modules = [module for ref in self._modules if (module := ref()) is not None and "_modules" in vars(module)]
        seen: set[int] = set()
        unique = [module for module in modules if not (id(module) in seen or seen.add(id(module)))]  # type: ignore[func-returns-value]
        inner = {id(child) for module in unique for child in module._modules.values() if child is not None}
        roots = [module for module in unique if id(module) not in inner and _has_state(module)]
        trained = {id(parameter) for parameter in self.parameters()}
        return sorted(roots, key=lambda root: not any(id(parameter) in trained for parameter in root.parameters()))

    def parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self.alive("optimizer"):
            for group in optimizer.param_groups:
                yield from group["params"]

    def objects(self, rank: int, *, incremental: bool) -> Objects:
        """Everything, under the names that it has in a checkpoint."""
        roots = self.roots()
        named: dict[str, Any] = _numbered("model", roots)
        for kind in self._others:
            named |= _numbered(kind, [thing for thing in self.alive(kind) if _is_enabled(thing)])
        loose = Loose(roots, self.alive("optimizer"))
        if loose.tensors:
            named["parameters"] = loose
        named |= _numbered("tracked", self.tracked)
        objects = Objects(named, rank, incremental=incremental)
        # What is not the user's own changes in optimizer steps alone, and need not be copied at every boundary.
        objects.tracked = {name: value for name, value in objects.tracked.items() if name.startswith("tracked")}
        for name, root in _numbered("model", roots).items():
            wrapper = getattr(root, "_orig_mod", root)
            if wrapper in self._orders:
                objects.gradient_orders[name] = self._orders[wrapper]
        return objects


class Loose:
    """Tensors that are trained and belong to no module, as an object with a state."""

    def __init__(self, roots: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        owned = {id(parameter) for root in roots for parameter in root.parameters()}
        self.tensors: dict[str, torch.Tensor] = {}
        for number, optimizer in enumerate(optimizers):
            for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if id(parameter) not in owned:
                    owned.add(id(parameter))
                    self.tensors[f"{number}.{index}"] = parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.detach().copy_(state[name])


def _numbered(name: str, things: list[Any]) -> dict[str, Any]:
    return {name if number == 1 else f"{name}_{number}": thing for number, thing in enumerate(things, 1)}


def _has_state(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _is_enabled(thing: Any) -> bool:
    return not isinstance(thing, torch.amp.GradScaler) or thing.is_enabled()
