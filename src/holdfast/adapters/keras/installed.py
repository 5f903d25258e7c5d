"""Frameworks that lack names of their patch table: this process trains with them unprotected."""

from __future__ import annotations

LEFT_ALONE: set[str] = set()
"""``keras`` or ``tf_keras``. The warning, or the refusal, has been given."""
