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

from holdfast.base.host_memory import fresh_memory
from holdfast.errors import CheckpointCorruptError
from holdfast.staging.images import parse
from holdfast.store.checkpoints import Checkpoint
from holdfast.store.local import LocalBackend
from holdfast.store.manifest import FileEntry
from holdfast.store.pipeline import read_checked
from holdfast.torch.state import Objects, rank_file, tree_of

log = logging.getLogger("holdfast")

_RANK_FILE = re.compile(r"rank-\d+\.safetensors")
DIED_WITH_IT = (
    "%s holds no random state of rank %d, which died on another machine: parameters are exact, and it goes on with "
    "other random numbers"
)
_SHARD = re.compile(r".+/shard-(\d+)\.safetensors")


class Contents:
    """The files of a checkpoint in memory, every byte of them checked, for one rank."""

    def __init__(self, checkpoint: Checkpoint, rank: int, world: int) -> None:
        """Raises :class:`~holdfast.errors.CheckpointCorruptError` if a byte is wrong."""
        self.checkpoint = checkpoint
        self.rank, self.world = rank, world
        self.loaded: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {}
        self._shards: list[FileEntry] = []
        own = rank_file(rank)
        for entry in checkpoint.manifest.files:
            if _SHARD.fullmatch(entry.path):
                self._shards.append(entry)
            elif entry.path.endswith(".safetensors") and (entry.path == own or not _RANK_FILE.fullmatch(entry.path)):
                memory = memoryview(fresh_memory(entry.size))[: entry.size]
                read_checked(checkpoint.backend, checkpoint.name, entry, into=memory)
                try:
                    self.loaded[entry.path] = parse(memory)
                except (ValueError, KeyError) as error:
                    raise CheckpointCorruptError(f"{checkpoint.name}/{entry.path}: {error}") from error

    def put_into(self, objects: Objects) -> dict[str, Any]:
        """Load the objects; returns what was saved beside them for the run."""
        with _shard_folder(self.checkpoint, self._shards, self.rank, self.world) as folder:
            run: dict[str, Any] = objects.load(self.loaded, folder)
        return run

    def of_another(self, step: int) -> dict[str, Any] | None:
        """What another rank saved of itself, with other random numbers: for a rank whose part has died with it."""
        return _others(self.checkpoint, step, self.rank, None)

    def mine(self) -> dict[str, Any] | None:
        """What belongs to this rank; None if it was saved by another number of ranks."""
        own = rank_file(self.rank)
        if own in self.loaded and self.checkpoint.manifest.world_size == self.world:
            tree: dict[str, Any] = tree_of(self.loaded, own)
            return tree
        return None


def restore(contents: Contents, objects: Objects) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load everything; returns what was saved beside the objects: for the run, and for this rank.

    Raises :class:`~holdfast.errors.CheckpointCorruptError` if a byte of a shard is wrong; the objects are then as they
    were.
    """
    checkpoint, rank, world = contents.checkpoint, contents.rank, contents.world
    run = contents.put_into(objects)
    mine = contents.mine()
    if mine is None and checkpoint.manifest.world_size == world:
        log.warning(DIED_WITH_IT, checkpoint.name, rank)
    elif mine is None:
        log.warning(
            "%s was saved by %d ranks and is loaded by %d: parameters are exact, random state and data position are "
            "carried over as closely as possible",
            checkpoint.name,
            checkpoint.manifest.world_size,
            world,
        )
    if mine is None:
        mine = _adapted(checkpoint, run, rank, world)
    elif mine["epoch"] < run["epoch"]:
        # The ranks were on different sides of the end of an epoch, after one and the same step. Opening a pass draws
        # random numbers: this rank has not drawn them yet, and does so when it opens its pass by itself.
        mine["positions"] = {}
    elif mine["epoch"] > run["epoch"]:
        # This one was past it, and comes there again: from before it had drawn them.
        for position in mine["positions"].values():
            mine["random"] = position.get("start", {}).get("rng", mine["random"])
        mine["positions"] = _adapted(checkpoint, run, rank, world)["positions"]
    return run, mine


def _adapted(checkpoint: Checkpoint, run: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """A rank's part where there is none of its own: another's position by samples, random numbers of its own."""
    mine: dict[str, Any] = {"random": None, "positions": {}, "epoch": run["epoch"], "passes": run["passes"]}
    first = _others(checkpoint, run["step"], rank, run["epoch"])
    if first is None:
        return mine
    for name, position in first["positions"].items():
        delivered = position["delivered"] * checkpoint.manifest.world_size // world
        if "skip" in position:
            position["skip"] = max(0, position["skip"] + delivered - position["delivered"])
        total = position.get("total") if checkpoint.manifest.world_size == world else None
        mine["positions"][name] = {**position, "delivered": delivered, "total": total, "workers": []}
    mine["random"] = first["random"]
    return mine


def _others(checkpoint: Checkpoint, step: int, rank: int, epoch: int | None) -> dict[str, Any] | None:
    """The part of the first rank that has one, with random numbers for ``rank``; None if there is no part at all.

    ``epoch``: take one that was in this epoch, if there is one.
    """
    first: dict[str, Any] | None = None
    for entry in checkpoint.manifest.files:
        if not _RANK_FILE.fullmatch(entry.path):
            continue
        memory = memoryview(fresh_memory(entry.size))[: entry.size]
        read_checked(checkpoint.backend, checkpoint.name, entry, into=memory)
        tree: dict[str, Any] = tree_of({entry.path: parse(memory)}, entry.path)
        if entry.path != rank_file(rank):
            tree["random"]["torch"] = torch.Generator().manual_seed(step * 1_000_003 + rank).get_state()
        if epoch is None or tree.get("epoch", epoch) == epoch:
            return tree
        first = first or tree
    return first


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
