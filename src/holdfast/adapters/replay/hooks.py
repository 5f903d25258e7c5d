"""Where a loop is looked at: constructors, loaders and optimizer steps of torch, while somebody follows it.

Nothing is added to a module's call. What is replaced passes everything on unless a :class:`Watcher` follows in this
process, and is put back when it stops.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from holdfast.adapters.replay.passes import KINDS

_SCHEDULERS = (
    lr_scheduler.LRScheduler,
    lr_scheduler.ReduceLROnPlateau,
    lr_scheduler.SequentialLR,
    lr_scheduler.ChainedScheduler,
)
"""Those that do not leave their making to another."""


class Watcher(Protocol):
    """Who is told."""

    def made_module(self, module: torch.nn.Module) -> None: ...
    def made(self, kind: str, thing: Any) -> None: ...
    def loads(self, file: Any) -> None: ...
    def made_ddp(self, module: DistributedDataParallel) -> None: ...
    def first_act(self, *, training: bool = True) -> bool: ...
    def iterate(self, loader: Any, real: Callable[[Any], Any]) -> Any: ...
    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None: ...
    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None: ...
    def scaler_step(self, scaler: Any, optimizer: Any, real: Callable[[], Any]) -> Any: ...
    def scaler_update(self, scaler: Any, real: Callable[[], Any]) -> Any: ...


class Hooks:
    """Puts a watcher in place and takes it away."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._undo: list[tuple[Any, str, Any]] = []
        self._handles: list[Any] = []
        self._call: Any = None
        self.active = False

    def begin(self) -> None:
        if self.active:
            return
        self.active = True
        watcher = self._watcher
        self._after(torch.nn.Module, "__init__", watcher.made_module)
        self._after(torch.nn.Module, "__setstate__", watcher.made_module)
        self._after(DistributedDataParallel, "__init__", watcher.made_ddp)
        self._after(torch.optim.Optimizer, "__init__", functools.partial(watcher.made, "optimizer"))
        for kind in _SCHEDULERS:
            self._after(kind, "__init__", functools.partial(watcher.made, "scheduler"))
        scaler = torch.amp.GradScaler
        self._after(scaler, "__init__", functools.partial(watcher.made, "scaler"))
        self._around(
            scaler,
            "step",
            lambda real: (
                lambda one, optimizer, *args, **options: watcher.scaler_step(
                    one, optimizer, functools.partial(real, one, optimizer, *args, **options)
                )
            ),
        )
        self._around(
            scaler,
            "update",
            lambda real: (
                lambda one, *args, **options: watcher.scaler_update(one, functools.partial(real, one, *args, **options))
            ),
        )
        for holder in (torch, torch.serialization):
            self._around(holder, "load", self._load)
        self.watch_loaders()
        self._handles = [
            register_optimizer_step_pre_hook(watcher.before_step),
            register_optimizer_step_post_hook(watcher.after_step),
        ]

    def _load(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def load(file: Any, *args: Any, **options: Any) -> Any:
            self._watcher.loads(file)
            return real(file, *args, **options)

        return load

    def watch_loaders(self) -> None:
        """Also those of packages that were imported since."""
        watcher = self._watcher
        kinds = [DataLoader, *KINDS]
        torchdata = sys.modules.get("torchdata.stateful_dataloader")
        if torchdata is not None:
            kinds.append(torchdata.StatefulDataLoader)
        watched = {holder for holder, _, _ in self._undo}
        for kind in kinds:
            if kind not in watched:
                self._around(kind, "__iter__", lambda real: lambda loader: watcher.iterate(loader, real))

    def watch_first_call(self) -> None:
        """Tell the watcher before the next call of a module, once."""
        if self._call is not None or not self.active:
            return
        real = self._call = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._watcher.first_act(training=False):
                self.forget_first_call()
                return module(*args, **kwargs)
            return real(module, *args, **kwargs)

        torch.nn.Module.__call__ = call

    def forget_first_call(self) -> None:
        if self._call is not None:
            torch.nn.Module.__call__ = self._call
            self._call = None

    def end(self) -> None:
        self.forget_first_call()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for holder, name, own in reversed(self._undo):
            setattr(holder, name, own)
        self._undo.clear()
        self.active = False

    def _after(self, holder: Any, name: str, tell: Callable[[Any], None]) -> None:
        def wrap(real: Callable[..., None]) -> Callable[..., None]:
            def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
                real(self, *args, **kwargs)
                tell(self)

            return wrapped

        self._around(holder, name, wrap)

    def _around(self, holder: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        real = holder.__dict__[name]
        self._undo.append((holder, name, real))
        setattr(holder, name, functools.wraps(real)(wrap(real)))
