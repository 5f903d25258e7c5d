"""Every backend keeps every promise of the contract."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from holdfast.store.base import Backend
from holdfast.store.local import LocalBackend
from holdfast.store.object import ObjectBackend
from holdfast.testing import BackendContract


class TestLocal(BackendContract):
    restart_displaces = False

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        backend = LocalBackend(str(tmp_path / "not" / "there" / "yet"))
        yield backend
        backend.close()

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, LocalBackend)
        return LocalBackend(backend.root)


class TestLocalWithoutDirectIO(TestLocal):
    @pytest.fixture
    def backend(self, tmpfs_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        really = os.open

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            # Newer kernels accept the flag on tmpfs; the older ones and several network file systems do not.
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return really(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        backend = LocalBackend(f"file://{tmpfs_path}/location")
        yield backend
        backend.close()


class TestMemory(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        backend = ObjectBackend("s3://bucket/a/prefix", store=MemoryStore())
        yield backend
        backend.close()

    def reopen(self, backend: Backend) -> Backend:
        assert isinstance(backend, ObjectBackend)
        return ObjectBackend(backend.uri, store=backend._client.store)


class TestMemoryAtTheRootOfTheBucket(TestMemory):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        backend = ObjectBackend("s3://bucket", store=MemoryStore())
        yield backend
        backend.close()


class TestS3(BackendContract):
    @pytest.fixture
    def backend(self, s3_uri: str) -> Iterator[Backend]:
        backend = ObjectBackend(s3_uri)
        yield backend
        backend.close()

    def reopen(self, backend: Backend) -> Backend:
        return ObjectBackend(backend.uri)
