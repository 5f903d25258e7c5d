"""Random histories with power cuts at every operation, against a plain dictionary."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import obstore
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from obstore.store import MemoryStore

import holdfast.store.local
from holdfast.store.base import Backend
from holdfast.store.checkpoints import open_checkpoint
from holdfast.store.local import LocalBackend
from holdfast.store.object import ObjectBackend
from holdfast.testing import CheckpointMachine, CrashingBackend, Power
from holdfast.testing.backend_contract import adopt_file, write_file
from tests.unit.store.store_crashes import CrashingOs, CrashingShutil

_ROOT = "/dev/shm" if os.path.isdir("/dev/shm") else None
_NUMBERS = itertools.count()

SETTINGS = settings(
    deadline=None, stateful_step_count=20, suppress_health_check=list(HealthCheck), print_blob=True, database=None
)


class LocalMachine(CheckpointMachine):
    """Crashes at system calls."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="holdfast-model-", dir=_ROOT)

    def open(self, power: Power) -> Backend:
        holdfast.store.local.os = CrashingOs(power)  # type: ignore[assignment]
        holdfast.store.local.shutil = CrashingShutil(power)  # type: ignore[assignment]
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
    run_state_machine_as_test(LocalMachine, settings=settings(SETTINGS, max_examples=50))


def test_a_wrapped_backend_survives_any_history() -> None:
    run_state_machine_as_test(WrappedMachine, settings=settings(SETTINGS, max_examples=25))


def test_object_storage_survives_any_history() -> None:
    run_state_machine_as_test(ObjectMachine, settings=settings(SETTINGS, max_examples=20, stateful_step_count=15))


def test_a_real_s3_server_survives_any_history(s3_uri: str) -> None:
    class S3Machine(ObjectMachine):
        def setup_store(self) -> tuple[str, Any]:
            uri = f"{s3_uri}-{next(_NUMBERS)}"
            return uri, ObjectBackend(uri)._client.store

    run_state_machine_as_test(S3Machine, settings=settings(SETTINGS, max_examples=8, stateful_step_count=12))


def _die_at_step_9(machine: CheckpointMachine) -> None:
    base = open_checkpoint(machine.backend, "checkpoint-3")
    assert base is not None
    machine.backend.begin("checkpoint-9")
    for entry in base.manifest.files:
        adopt_file(machine.backend, "checkpoint-9", base.name, entry)
    write_file(machine.backend, "checkpoint-9", "more.bin", b"dead")
    machine.backend.put_part("checkpoint-9", "rank-0", b"dead")


_BEFORE_AND_THEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], Any]]] = {
    "save": (lambda machine: None, lambda machine, crash: machine._save(9, {"model.bin": b"new"}, True, crash)),
    "save over a dead one": (
        _die_at_step_9,
        lambda machine, crash: machine._save(9, {"model.bin": b"new"}, True, crash),
    ),
    "save over one set aside": (
        lambda machine: machine._set_aside(3, None),
        lambda machine, crash: machine._save(3, {"größe.bin": b"again"}, False, crash),
    ),
    "retain": (lambda machine: None, lambda machine, crash: machine.retain(1, crash)),
    "clean": (_die_at_step_9, lambda machine, crash: machine.clean(crash)),
    "set aside": (lambda machine: None, lambda machine, crash: machine._set_aside(3, crash)),
}


@pytest.mark.parametrize("action", _BEFORE_AND_THEN)
@pytest.mark.parametrize("machine_class", [LocalMachine, ObjectMachine])
def test_a_power_cut_at_each_single_operation_loses_nothing(
    machine_class: type[CheckpointMachine], action: str
) -> None:
    before, then = _BEFORE_AND_THEN[action]
    check = machine_class.all_that_is_visible_is_as_it_was_saved_and_the_newest_is_found
    for crash in itertools.count():
        machine = machine_class()
        try:
            machine.start(
                [
                    {"größe.bin": b"1" * 50, "model.bin": b"one"},
                    {"model.bin": b"two"},
                    {"nested/optimizer.bin": b"three"},
                ]
            )
            before(machine)
            cuts = machine.power_cuts
            then(machine, crash)
            finished = machine.power_cuts == cuts
            machine.clean(None)
            check(machine)
        finally:
            machine.teardown()
        if finished:
            assert crash > 1
            return


@pytest.fixture(autouse=True)
def _the_real_os_afterwards() -> Any:
    yield
    holdfast.store.local.os = os
    holdfast.store.local.shutil = shutil
