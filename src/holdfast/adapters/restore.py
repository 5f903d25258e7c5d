"""From a checkpoint at rest back into the objects of a run. Every byte is checked before it is used."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from holdfast.adapters.state import Objects, rank_file, tree_of
from holdfast.errors import CheckpointCorruptError
from holdfast.staging.images import parse
from holdfast.store.checkpoints import Checkpoint
from holdfast.store.local import LocalBackend
from holdfast.store.manifest import FileEntry
from holdfast.store.pipeline import read_checked

log = logging.getLogger("holdfast")

_RANK_FILE = re.compile(r"rank-\d+\.safetensors")
_SHARD = re.compile(r".+/shard-(\d+)\.safetensors")


def restore(checkpoint: Checkpoint, objects: Objects, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load everything; returns what was saved beside the objects: for the run, and for this rank.

    Raises :class:`~holdfast.errors.CheckpointCorruptError` if a byte is wrong; the objects are then as they were.
    """
    own = rank_file(rank)
    loaded = {}
    shards: list[FileEntry] = []
    for entry in checkpoint.manifest.files:
        if _SHARD.fullmatch(entry.path):
            shards.append(entry)
        elif entry.path.endswith(".safetensors") and (entry.path == own or not _RANK_FILE.fullmatch(entry.path)):
            memory = memoryview(mmap.mmap(-1, max(1, entry.size)))[: entry.size]
            read_checked(checkpoint.backend, checkpoint.name, entry, into=memory)
            try:
                loaded[entry.path] = parse(memory)
            except (ValueError, KeyError) as error:
                raise CheckpointCorruptError(f"{checkpoint.name}/{entry.path}: {error}") from error
    with _shard_folder(checkpoint, shards, rank, world) as folder:
        run = objects.load(loaded, folder)
    saved_world = checkpoint.manifest.world_size
    if own in loaded and saved_world == world:
        mine = tree_of(loaded, own)
    else:
        log.warning(
            "%s was saved by %d ranks and is loaded by %d: parameters are exact, random state and data position are "
            "carried over as closely as possible",
            checkpoint.name,
            saved_world,
            world,
        )
        mine = _adapted(checkpoint, run, rank, world)
    return run, mine


def _adapted(checkpoint: Checkpoint, run: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """A rank's part where the number of ranks has changed: rank 0's position by samples, random numbers of its own."""
    entry = next((entry for entry in checkpoint.manifest.files if entry.path == rank_file(0)), None)
    mine: dict[str, Any] = {"random": None, "positions": {}, "epoch": run["epoch"], "passes": run["passes"]}
    if entry is None:
        return mine
    memory = memoryview(mmap.mmap(-1, max(1, entry.size)))[: entry.size]
    read_checked(checkpoint.backend, checkpoint.name, entry, into=memory)
    first = tree_of({entry.path: parse(memory)}, entry.path)
    for name, position in first["positions"].items():
        delivered = position["delivered"] * checkpoint.manifest.world_size // world
        if "skip" in position:
            position["skip"] = max(0, position["skip"] + delivered - position["delivered"])
        mine["positions"][name] = {**position, "delivered": delivered, "total": None, "workers": []}
    mine["random"] = first["random"]
    if rank:
        generator = torch.Generator().manual_seed(run["step"] * 1_000_003 + rank)
        mine["random"]["torch"] = generator.get_state()
    return mine


@contextlib.contextmanager
def _shard_folder(checkpoint: Checkpoint, shards: list[FileEntry], rank: int, world: int) -> Iterator[str | None]:
    """A folder of this machine in which the shards lie, checked. Each rank checks its share of them."""
    if not shards:
        yield None
        return
    if isinstance(checkpoint.backend, LocalBackend):
        for entry in shards[rank % world :: world]:
            read_checked(checkpoint.backend, checkpoint.name, entry)
        yield os.path.join(checkpoint.backend.root, checkpoint.name)
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-shards-") as folder:
        for entry in shards:
            path = os.path.join(folder, entry.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w+b") as file:
                file.truncate(entry.size)
                with mmap.mmap(file.fileno(), entry.size) as memory, memoryview(memory) as view:
                    read_checked(checkpoint.backend, checkpoint.name, entry, into=view)
        yield folder
