"""A link, a pipe or a device inside a checkpoint is not one of its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import CheckpointCorruptError
from holdfast.store import open_backend
from holdfast.store.checkpoints import open_checkpoint, whole
from holdfast.store.pipeline import read_checked
from tests.attacks.hostile import ended
from tests.kit.checkpoints import make_checkpoint

FILE = "model.safetensors"


def _swap(run: Path, kind: str) -> None:
    """Put something of the same bytes, or none, in place of a file of the newest checkpoint."""
    path = run / "checkpoint-4" / FILE
    copy = run.parent / "copy"
    os.rename(path, copy)
    if kind == "link":
        path.symlink_to(copy)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")


@pytest.mark.core
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_a_checkpoint_with_a_link_in_place_of_a_file_is_damaged_and_not_resumed(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_checkpoint(run, 3)
    make_checkpoint(run, 4)
    _swap(run, kind)
    backend = open_backend(str(run))
    with pytest.raises(CheckpointCorruptError):
        open_checkpoint(backend, "checkpoint-4")
    assert [found.step for found in whole([backend])] == [3]
    verified = ended("verify", run)
    assert verified.returncode == 1
    assert "damaged" in verified.stdout


def test_a_file_that_becomes_a_link_after_the_look_is_not_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "run", 4)
    backend = open_backend(str(tmp_path / "run"))
    checkpoint = open_checkpoint(backend, "checkpoint-4")
    assert checkpoint is not None
    _swap(tmp_path / "run", "link")
    with pytest.raises(CheckpointCorruptError, match="link"):
        read_checked(backend, checkpoint.name, next(e for e in checkpoint.manifest.files if e.path == FILE))


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_manifest_that_is_a_link_makes_a_damaged_checkpoint_that_no_start_removes(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_checkpoint(run, 3)
    make_checkpoint(run, 4)
    manifest = run / "checkpoint-4" / "holdfast.json"
    os.rename(manifest, tmp_path / "copy")
    if kind == "link":
        manifest.symlink_to(tmp_path / "copy")
    else:
        os.mkfifo(manifest)
    assert ended("verify", run).returncode == 1
    assert ended("prune", run, "--unfinished", "--yes").returncode == 0
    assert (run / "checkpoint-4" / FILE).exists()
    assert [found.step for found in whole([open_backend(str(run))])] == [3]


def test_incremental_saves_adopt_no_links(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_checkpoint(run, 4)
    _swap(run, "link")
    backend = open_backend(str(run))
    backend.begin("checkpoint-5")
    assert backend.adopt("checkpoint-5", FILE, "checkpoint-4", FILE) is None
    assert not (run / "checkpoint-5" / FILE).is_symlink()
