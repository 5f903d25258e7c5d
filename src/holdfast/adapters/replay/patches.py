"""Where replay is patched."""

from __future__ import annotations

from holdfast.adapters.replay.follower import install

__all__ = ["install"]
