"""Where ray is patched."""

from __future__ import annotations

from holdfast.adapters.ray.callback import install

__all__ = ["install"]
