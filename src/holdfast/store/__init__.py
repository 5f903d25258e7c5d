"""Checkpoints at rest: layout, manifest, commit, verification, retention; local and object storage."""

from __future__ import annotations

from holdfast.base.process import Owner
from holdfast.errors import ConfigError
from holdfast.locations import without_secrets
from holdfast.store.base import MANIFEST, SENTINEL, Backend, Sink

__all__ = ["MANIFEST", "SENTINEL", "Backend", "Owner", "Sink", "open_backend"]

SCHEMES = ("s3", "gs", "az", "file")


def open_backend(location: str) -> Backend:
    """The backend for a path or URI. Nothing is created and nothing is contacted yet."""
    location = without_secrets(location)
    scheme, separator, _ = location.partition("://")
    if not separator or scheme == "file":
        from holdfast.store.local import LocalBackend

        return LocalBackend(location)
    if scheme not in SCHEMES:
        raise ConfigError(
            f"location {location!r}: scheme {scheme!r} is not known; accepted are a path, "
            + ", ".join(f"{name}://" for name in SCHEMES)
        )
    from holdfast.store.object import ObjectBackend

    return ObjectBackend(location)
