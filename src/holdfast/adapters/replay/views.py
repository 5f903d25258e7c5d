"""Loaders as :class:`~holdfast.torch.data.batches.Batches` can continue them, and their workers between two passes."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from holdfast.base.attached import attach, attached
from holdfast.torch.data.idle import IdleWorkers
from holdfast.torch.data.stateful import is_stateful_dataloader
from holdfast.torch.data.workers import loader_like

_VIEW = "_holdfast_view"


def plain_view(loader: Any) -> Any:
    """A loader that :class:`Batches` can continue at any batch: subclasses of DataLoader as far as possible."""
    if type(loader) is DataLoader or is_stateful_dataloader(loader) or not issubclass(type(loader), DataLoader):
        return loader
    own = ("_get_iterator", "_auto_collation", "_index_sampler")
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in own):
        return loader
    view = attached(loader, _VIEW)
    if view is None:
        view = loader_like(loader, DataLoader, {})
        attach(loader, _VIEW, view)
    return view


def idle_workers(loader: Any) -> IdleWorkers | None:
    """The persistent workers that have served a pass over this loader and wait for its next one."""
    return IdleWorkers.of(loader) or IdleWorkers.of(attached(loader, _VIEW))
