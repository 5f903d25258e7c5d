"""Random histories with power cuts at every operation, against a plain dictionary."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from typing import Any

import obstore
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from obstore.store import MemoryStore

import holdfast.store.local
from holdfast.store.base import Backend
from holdfast.store.local import LocalBackend
from holdfast.store.object import ObjectBackend
from holdfast.testing.store_machine import CheckpointMachine, CrashingBackend, Power

_ROOT = "/dev/shm" if os.path.isdir("/dev/shm") else None
_NUMBERS = itertools.count()

SETTINGS = settings(
    deadline=None, stateful_step_count=20, suppress_health_check=list(HealthCheck), print_blob=True, database=None
)


class _CrashingOs:
    """The module ``os``, with a power supply: each call that changes the disk may be the last."""

    CHANGES = frozenset(
        ("open", "write", "fsync", "unlink", "rename", "link", "mkdir", "makedirs", "rmdir", "ftruncate", "pwrite")
    )

    def __init__(self, power: Power) -> None:
        self._power = power

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in self.CHANGES:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self._power.use()
            return function(*args, **kwargs)

        return call


class _CrashingShutil:
    """``shutil.rmtree`` one entry at a time: it works on the real ``os``, which does not fail here."""

    def __init__(self, power: Power) -> None:
        self._power = power

    def rmtree(self, path: str, ignore_errors: bool = False) -> None:
        for parent, folders, files in os.walk(path, topdown=False):
            for name in files:
                self._power.use()
                os.unlink(os.path.join(parent, name))
            for name in folders:
                self._power.use()
                os.rmdir(os.path.join(parent, name))
        if os.path.isdir(path):
            self._power.use()
            os.rmdir(path)


class LocalMachine(CheckpointMachine):
    """Crashes at system calls."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="holdfast-model-", dir=_ROOT)

    def open(self, power: Power) -> Backend:
        holdfast.store.local.os = _CrashingOs(power)  # type: ignore[assignment]
        holdfast.store.local.shutil = _CrashingShutil(power)  # type: ignore[assignment]
        return LocalBackend(os.path.join(self.folder, "location"))

    def _path(self, folder: str, path: str) -> str:
        return os.path.join(self.folder, "location", folder, path)

    def stored(self, folder: str, path: str) -> bytes:
        with open(self._path(folder, path), "rb") as file:
            return file.read()

    def store(self, folder: str, path: str, data: bytes | None) -> None:
        if data is None:
            os.unlink(self._path(folder, path))
            return
        with open(self._path(folder, path), "r+b") as file:
            file.write(data)
            file.truncate()

    def teardown(self) -> None:
        holdfast.store.local.os = os
        holdfast.store.local.shutil = shutil
        shutil.rmtree(self.folder)


class ObjectMachine(CheckpointMachine):
    """Crashes at requests: each may be the last, before it is sent or before its answer is known."""

    shares_folders = True

    def setup_store(self) -> tuple[str, Any]:
        return "s3://bucket/prefix", MemoryStore()

    def __init__(self) -> None:
        super().__init__()
        self.uri, self.raw = self.setup_store()

    def open(self, power: Power) -> Backend:
        backend = ObjectBackend(self.uri, store=self.raw)
        really = backend._client.call

        def call(*args: Any, **kwargs: Any) -> Any:
            power.use()
            result = really(*args, **kwargs)
            power.use()
            return result

        backend._client.call = call  # type: ignore[method-assign]
        return backend

    def _key(self, folder: str, path: str) -> str:
        return f"{self.uri.split('/', 3)[3]}/{folder}/{path}"

    def stored(self, folder: str, path: str) -> bytes:
        return bytes(obstore.get(self.raw, self._key(folder, path)).bytes())

    def store(self, folder: str, path: str, data: bytes | None) -> None:
        if data is None:
            obstore.delete(self.raw, self._key(folder, path))
        else:
            obstore.put(self.raw, self._key(folder, path), data)


class WrappedMachine(LocalMachine):
    """Crashes around the backend's operations, as for a backend of which nothing else is known."""

    def open(self, power: Power) -> Backend:
        return CrashingBackend(LocalBackend(os.path.join(self.folder, "location")), power)


def test_local_folders_survive_any_history() -> None:
    run_state_machine_as_test(LocalMachine, settings=settings(SETTINGS, max_examples=80))


def test_a_wrapped_backend_survives_any_history() -> None:
    run_state_machine_as_test(WrappedMachine, settings=settings(SETTINGS, max_examples=40))


def test_object_storage_survives_any_history() -> None:
    run_state_machine_as_test(ObjectMachine, settings=settings(SETTINGS, max_examples=50, stateful_step_count=15))


def test_a_real_s3_server_survives_any_history(s3_uri: str) -> None:
    class S3Machine(ObjectMachine):
        def setup_store(self) -> tuple[str, Any]:
            uri = f"{s3_uri}-{next(_NUMBERS)}"
            return uri, ObjectBackend(uri)._client.store

    run_state_machine_as_test(S3Machine, settings=settings(SETTINGS, max_examples=8, stateful_step_count=12))


@pytest.fixture(autouse=True)
def _the_real_os_afterwards() -> Any:
    yield
    holdfast.store.local.os = os
    holdfast.store.local.shutil = shutil
