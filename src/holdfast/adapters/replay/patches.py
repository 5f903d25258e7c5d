"""Where replay is patched."""

from __future__ import annotations

from holdfast.adapters.replay.follower import install
from holdfast.base.patching import PatchSet

__all__ = ["install"]
TABLES: tuple[PatchSet, ...] = ()
