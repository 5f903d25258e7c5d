"""Where keras is patched."""

from __future__ import annotations

from holdfast.adapters.keras.training import install
from holdfast.base.patching import PatchSet

__all__ = ["install"]
TABLES: tuple[PatchSet, ...] = ()
