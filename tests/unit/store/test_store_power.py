"""A power cut takes what was not synced: the order of the fsyncs must leave whole checkpoints all the same."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast.store.local
from holdfast.store.checkpoints import clean, retain, verify, whole
from holdfast.store.local import LocalBackend
from holdfast.store.manifest import Manifest
from holdfast.testing import Power, PowerCutError
from holdfast.testing.backend_contract import read_back, save_checkpoint
from tests.unit.store.store_crashes import CrashingShutil, VolatileDisk

CHANCES = 6
"""How often the dice are thrown for each moment of the cut."""


def _files(step: int) -> dict[str, bytes]:
    return {
        "frozen.bin": b"the same" * 700,
        "model.bin": bytes([step]) * (4096 + step),
        "deep/er/state.bin": b"%d" % step,
    }


class History:
    """A process that saves and removes on a volatile disk, and what it knows to be committed."""

    def __init__(self, folder: Path) -> None:
        self.power = Power()
        self.folder = folder
        self.location = folder / "disk" / "not" / "there"
        (folder / "disk").mkdir()
        self.disk = VolatileDisk(self.power, str(folder / "disk"))
        holdfast.store.local.os = self.disk  # type: ignore[assignment]
        holdfast.store.local.shutil = CrashingShutil(self.power)  # type: ignore[assignment]
        self.backend = LocalBackend(str(self.location))
        self.committed: set[int] = set()
        self.last: Manifest | None = None

    def save(self, step: int) -> None:
        self.last = save_checkpoint(self.backend, step, _files(step), unchanged_since=self.last)
        self.committed.add(step)

    def retain(self, keep: int) -> None:
        self.committed = set(sorted(self.committed)[-keep:])
        retain(self.backend, keep)

    def set_aside(self, step: int) -> None:
        self.committed.discard(step)
        self.backend.set_aside(f"checkpoint-{step}")

    def cut(self, chance: random.Random) -> LocalBackend:
        holdfast.store.local.os = os
        holdfast.store.local.shutil = shutil
        self.disk.after_a_power_cut(str(self.folder / "after"), chance)
        return LocalBackend(str(self.folder / "after" / "not" / "there"))


@pytest.fixture(autouse=True)
def _the_real_os_afterwards() -> Iterator[None]:
    yield
    holdfast.store.local.os = os
    holdfast.store.local.shutil = shutil


ACTIONS: dict[str, Callable[[History], object]] = {
    "the first save": lambda history: None,
    "a save": lambda history: history.save(3),
    "retention": lambda history: history.retain(1),
    "setting aside": lambda history: history.set_aside(2),
    "saving again what was set aside": lambda history: (history.set_aside(2), history.save(2)),
    "cleaning": lambda history: (history.backend.begin("checkpoint-9"), clean(history.backend)),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_visible_after_a_power_cut_is_whole(tmpfs_path: Path, action: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for moment in itertools.count():
        for throw in range(CHANCES):
            folder = tmpfs_path / f"{moment}-{throw}"
            folder.mkdir()
            history = History(folder)
            finished = False
            try:
                if action == "the first save":
                    history.power.left = moment
                    history.save(1)
                else:
                    history.save(1)
                    history.save(2)
                    history.power.left = moment
                    ACTIONS[action](history)
                finished = True
            except PowerCutError:
                pass
            after = history.cut(chance)
            found = {checkpoint.step: checkpoint for checkpoint in whole([after])}
            assert history.committed <= set(found), f"lost at operation {moment}"
            for name in after.names():
                assert after.read_manifest(name) is None or int(name.rpartition("-")[2]) in found, name
            for step, checkpoint in found.items():
                assert verify(checkpoint) == []
                assert read_back(after, checkpoint.manifest) == _files(step)
            clean(after)
            assert len(after.names()) == len(found)
            shutil.rmtree(folder)
        if finished:
            return
