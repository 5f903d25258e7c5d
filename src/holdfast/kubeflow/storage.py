"""Where a job keeps its checkpoints: ``pvc://claim/path``, ``s3://bucket/prefix`` and the like, or a plain path."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError
from holdfast.locations import expanded, without_secrets
from holdfast.store import SCHEMES

MOUNT = "/mnt/kubeflow-checkpoints"
"""Where the claim of ``pvc://`` is mounted in the training pods."""

_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_OBJECTS = tuple(scheme for scheme in SCHEMES if scheme != "file")
_ONE_SLASH = re.compile(rf"({'|'.join(('pvc', *SCHEMES))}):|[A-Za-z][A-Za-z0-9+.-]+:/")
ACCEPTED = f"pvc://<claim>/<path>, {', '.join(f'{scheme}://<bucket>/<prefix>' for scheme in _OBJECTS)}, or a path"


@dataclass(frozen=True, slots=True)
class Output:
    """An ``output_dir``, checked."""

    text: str
    claim: str | None = None
    path: str = ""
    """On the claim; without one, of a path, the same from the root."""

    @property
    def is_object_store(self) -> bool:
        return "://" in self.text and self.claim is None

    def location(self) -> str:
        """Where the training finds it, in a pod or on this machine."""
        if self.claim is not None:
            return f"{MOUNT}/{self.path}".rstrip("/")
        return self.path or self.text

    def block(self, secret: str | None) -> dict[str, Any]:
        """``spec.checkpointing.storage`` of a TrainJob."""
        if self.claim is not None:
            return {
                "uri": self.location(),
                "persistentVolume": {"claimName": self.claim, "mountPath": MOUNT},
            }
        storage: dict[str, Any] = {"uri": self.text}
        return {**storage, "secretRef": {"name": secret}} if secret else storage


def is_name(value: Any) -> bool:
    """Whether an object of Kubernetes can be called that."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def parse_output(value: Any) -> Output:
    """Raises ConfigError for what is no location."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip() or any(ord(letter) < 32 for letter in value):
        raise ConfigError(f"output_dir: {value!r} is not accepted; it must be {ACCEPTED}")
    scheme, separator, rest = value.partition("://")
    if not separator:
        if _ONE_SLASH.match(value):
            raise ConfigError(f"output_dir: {value!r} lacks '//' after its scheme; it must be {ACCEPTED}")
        # Now: a notebook may change its folder before it submits.
        return Output(value, path=os.path.abspath(expanded(value)))
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        if not is_name(claim):
            raise ConfigError(f"output_dir: {value!r} names no claim; it must be pvc://<claim>/<path>")
        if ".." in path.split("/") or ":" in path:
            raise ConfigError(f"output_dir: {value!r} leaves the claim; its path must be without '..' and ':'")
        if "$(" in path:
            raise ConfigError(
                f"output_dir: {value!r} is not accepted: Kubernetes takes $( for the name of a variable; its path must "
                f"be without it"
            )
        return Output(value, claim, path.strip("/"))
    if scheme not in _OBJECTS:
        raise ConfigError(f"output_dir: {value!r} has the scheme {scheme!r}, which is not known; it must be {ACCEPTED}")
    if (shown := without_secrets(value)) != value:
        raise ConfigError(f"output_dir: {shown} is given with credentials; give them in a secret, named by secret_name")
    if not rest.split("/")[0]:
        raise ConfigError(f"output_dir: {value!r} names no bucket; it must be {scheme}://<bucket>/<prefix>")
    return Output(value.rstrip("/"))
