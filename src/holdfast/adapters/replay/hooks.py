"""Observation of a loop: constructors, loaders and optimizer steps of torch, while somebody follows it.

Nothing is added to a module's call once the loop has begun. What is replaced passes everything on unless a
:class:`Watcher` follows in this process, and is put back when it stops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, ValuesView
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.adapters.replay.loaders import loader_tables
from holdfast.adapters.replay.patches import TORCH, TORCHDATA
from holdfast.base.patching import Applied


class Watcher(Protocol):
    """Receives what the hooks observe."""

    def made_module(self, module: torch.nn.Module) -> None: ...
    def made(self, kind: str, thing: Any) -> None: ...
    def loads(self, file: Any) -> Any: ...
    def before_backward(self, outputs: Any, inputs: Sequence[torch.Tensor] | None = None) -> bool: ...
    def after_backward(self, grads: Sequence[torch.Tensor | None] | None = None) -> None: ...
    def made_ddp(self, module: DistributedDataParallel) -> None: ...
    def first_act(self, *, training: bool = True) -> bool: ...
    def iterate(self, loader: Any, real: Callable[[Any], Any]) -> Any: ...
    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None: ...
    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None: ...
    def scaler_step(self, scaler: Any, optimizer: Any, real: Callable[[], Any]) -> Any: ...
    def scaler_update(self, scaler: Any, real: Callable[[], Any]) -> Any: ...


class Hooks:
    """Puts a watcher in place and takes it away. Its other methods are the wrappers of the patch tables."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._applied: dict[str, Applied] = {}
        """By framework: its patches that are in place."""
        self._call: Applied | None = None
        self._backward: Applied | None = None
        self._handles: list[Any] = []
        self._in_step = False
        """Whether a hook of an optimizer's step tells the watcher, while torch goes through all such hooks."""
        self._loads: dict[Callable[..., Any], Callable[..., Any]] = {}
        """By original, its one replacement: torch.load stays the same object as torch.serialization.load."""
        self.active = False

    def begin(self) -> None:
        """Raises MissingTargetsError if a library lacks a name, and then leaves all of them as they are."""
        if self.active:
            return
        self.active = True
        watcher = self._watcher
        try:
            self._applied[TORCH.framework] = TORCH.begin("follow", self)
            self.watch_loaders()
            self._backward = TORCH.begin("by hand", self)
        except BaseException:
            self.end()
            raise
        self._handles = [
            register_optimizer_step_pre_hook(self._step_hook(watcher.before_step)),
            register_optimizer_step_post_hook(self._step_hook(watcher.after_step)),
        ]

    def watch_loaders(self) -> None:
        """Follow the loaders of other packages too, of those that were imported since."""
        for table in (TORCHDATA, *loader_tables()):
            if table.framework not in self._applied:
                applied = table.begin("follow", self)
                if applied.originals:
                    self._applied[table.framework] = applied

    def watch_first_call(self) -> None:
        """Tell the watcher before the next call of a module, once."""
        if self._call is None and self.active:
            self._call = TORCH.begin("first call", self)

    def forget_first_call(self) -> None:
        if self._call is not None:
            self._call.undo()
            self._call = None

    def forget_backward(self) -> None:
        if self._backward is not None:
            self._backward.undo()
            self._backward = None

    def end(self) -> None:
        self.active = False
        self.forget_first_call()
        self.forget_backward()
        for handle in self._handles:
            if self._in_step:  # torch goes through its hooks now, and their number must not change
                handle.hooks_dict_ref()[handle.id] = _nothing
            else:
                handle.remove()
        self._handles.clear()
        for applied in self._applied.values():
            applied.undo()
        self._applied.clear()
        self._loads.clear()

    def _step_hook(self, tell: Callable[..., None]) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._in_step = True
            try:
                tell(optimizer)
            finally:
                self._in_step = False

        return hook

    # ------------------------------------------------------------------ wrappers

    def module_made(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._after(original, self._watcher.made_module)

    def ddp_made(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._after(original, self._watcher.made_ddp)

    def optimizer_made(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._after(original, functools.partial(self._watcher.made, "optimizer"))

    def scheduler_made(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._after(original, functools.partial(self._watcher.made, "scheduler"))

    def scaler_made(self, original: Callable[..., None]) -> Callable[..., None]:
        return self._after(original, functools.partial(self._watcher.made, "scaler"))

    def _after(self, original: Callable[..., None], tell: Callable[[Any], None]) -> Callable[..., None]:
        def made(thing: Any, *args: Any, **kwargs: Any) -> None:
            original(thing, *args, **kwargs)
            if self.active:
                tell(thing)

        return made

    def scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tell = self._watcher.scaler_step

        def step(scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
            real = functools.partial(original, scaler, optimizer, *args, **options)
            return tell(scaler, optimizer, real) if self.active else real()

        return step

    def scaler_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tell = self._watcher.scaler_update

        def update(scaler: Any, *args: Any, **options: Any) -> Any:
            real = functools.partial(original, scaler, *args, **options)
            return tell(scaler, real) if self.active else real()

        return update

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        if original in self._loads:
            return self._loads[original]

        def load(f: Any, *args: Any, **options: Any) -> Any:
            if self.active:
                f = self._watcher.loads(f)
            return original(f, *args, **options)

        self._loads[original] = load
        return load

    def backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Any = None, *args: Any, **options: Any) -> None:
            looked_at = self._backward is not None and self._watcher.before_backward(tensors)
            original(tensors, *args, **options)
            if looked_at:
                self._watcher.after_backward()

        return backward

    def grad_by_hand(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            if isinstance(inputs, Iterator | ValuesView):
                inputs = tuple(inputs)
            leaves = inputs if isinstance(inputs, tuple | list) else [inputs]
            plain = all(isinstance(leaf, torch.Tensor) and leaf.is_leaf for leaf in leaves)
            looked_at = (
                plain
                and self._backward is not None
                and not torch._C._are_functorch_transforms_active()
                and self._watcher.before_backward(outputs, leaves)
            )
            found = original(outputs, inputs, *args, **options)
            if looked_at:
                self._watcher.after_backward(found)
            return found

        return grad

    def iterate(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def iterate(loader: Any) -> Any:
            return self._watcher.iterate(loader, original) if self.active else original(loader)

        return iterate

    def first_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._call is not None and self._watcher.first_act(training=False):
                self.forget_first_call()
                return module(*args, **kwargs)
            return original(module, *args, **kwargs)

        return call

    def first_functional_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._call is not None and self._watcher.first_act(training=False):
                self.forget_first_call()
                return torch.nn.utils.stateless._functional_call(*args, **kwargs)
            return original(*args, **kwargs)

        return call


def _nothing(*_: Any) -> None:
    """Stands for a hook that could not be removed."""
