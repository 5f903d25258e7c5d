"""Loaders of frameworks that have an ``__iter__`` of their own: registered by the framework's adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.base.patching import PatchSet


@dataclass(frozen=True, slots=True)
class LoaderKind:
    """One class of loaders, and how passes over them are followed."""

    batches: Any
    """Subclass of :class:`~holdfast.torch.data.batches.Batches`, with ``adapt(loader, batch)``: makes a batch of the
    loader inside what this one hands out."""
    owner: str
    """Adapter that has registered it."""
    table: PatchSet
    """Its patches of the scope ``follow`` replace the ``__iter__`` by ``iterate``."""


_kinds: dict[type, LoaderKind] = {}


def register_loader(loader: type, batches: Any, *, owner: str, table: PatchSet) -> None:
    """Let passes over loaders of this class be followed. The same owner may register it again."""
    known = _kinds.get(loader)
    if known is not None and known.owner != owner:
        raise ValueError(f"{loader.__qualname__} is registered by the adapter of {known.owner} already, not {owner}")
    _kinds[loader] = LoaderKind(batches, owner, table)


def kind_of(loader: Any) -> LoaderKind | None:
    """The registered kind of this loader, if any."""
    return _kinds.get(type(loader))


def loader_tables() -> list[PatchSet]:
    """The tables of all registered kinds."""
    return list({id(kind.table): kind.table for kind in _kinds.values()}.values())
