"""Where keras is patched."""

from __future__ import annotations

from holdfast.adapters.keras.training import install

__all__ = ["install"]
