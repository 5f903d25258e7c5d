"""Where ray is patched."""

from __future__ import annotations

from holdfast.adapters.ray.callback import install
from holdfast.base.patching import PatchSet

__all__ = ["install"]
TABLES: tuple[PatchSet, ...] = ()
