"""Which checkpoint a Trainer goes on from.

In the run's location lie holdfast's checkpoints, with manifests, and perhaps those that the Trainer wrote without
holdfast, or that another tool left half written. The newest that is whole is taken: by manifest and checksums, or,
for the Trainer's own, if nothing that a resume needs is missing. What is marked as incomplete is removed; what only
looks so is set aside.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import mmap
import operator
import os
import secrets
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.adapters.transformers.loop import RUN_FILE, rank_file, read_run
from holdfast.base.private_folders import own_folder, own_folders
from holdfast.config import Settings
from holdfast.errors import CheckpointCorruptError, StoreError
from holdfast.runtime.host import Host
from holdfast.store import MANIFEST, SENTINEL, Backend
from holdfast.store.checkpoints import Checkpoint, whole
from holdfast.store.local import LocalBackend
from holdfast.store.manifest import FileEntry, step_of
from holdfast.store.pipeline import read_checked
from holdfast.torch.state import read_tree

log = logging.getLogger("holdfast")

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(slots=True)
class Start:
    """Where an attempt begins."""

    path: str | None = None
    """A folder of this machine with the Trainer's files; None: from scratch."""
    run: dict[str, Any] | None = None
    """What holdfast saved beside them."""
    mine: dict[str, Any] | None = None
    """What it saved for this rank."""
    checkpoint: Checkpoint | None = None
    foreign_step: int | None = None
    """The step of a checkpoint that the Trainer wrote without holdfast."""

    @property
    def step(self) -> int:
        if self.checkpoint is not None:
            return self.checkpoint.step
        return self.foreign_step or 0

    @property
    def exact(self) -> bool:
        """Whether all is known that an exact resume needs."""
        return self.run is not None and self.mine is not None


def is_foreign(backend: Backend, name: str) -> bool:
    """Whether a folder was never holdfast's: neither its manifest nor the mark of an unfinished checkpoint."""
    if not isinstance(backend, LocalBackend):
        return False
    folder = os.path.join(backend.root, name)
    return not any(os.path.lexists(os.path.join(folder, mark)) for mark in (MANIFEST, SENTINEL))


def choose(host: Host, explicit: str | None, world: int) -> Start:
    """On all ranks: the same start. ``explicit``: the folder that the script names."""
    session = host.session
    if session.rank == 0:
        chosen = _chosen(host, explicit) if host.settings.checkpointing else {"path": explicit}
        session.board.put_once("start", json.dumps(chosen).encode())
    answer = session.board.wait("start", 1800.0)
    if answer is None:
        raise TimeoutError("rank 0 did not say within 1800 s where to start")
    chosen = json.loads(answer)
    if chosen["path"] is not None:
        return _from_folder(chosen["path"], session.rank, world)
    start = Start()

    def load(checkpoint: Checkpoint) -> None:
        nonlocal start
        start = _loaded(checkpoint, session.rank, world, session.token, model_only=chosen["model_only"])

    if host.resume(load, is_foreign) is None:
        return Start()
    return start


def _chosen(host: Host, explicit: str | None) -> dict[str, Any]:
    """On rank 0: a folder to begin with, or none, which means the newest checkpoint of our own."""
    backends = host.session.backends
    newest, full = _newest(backends, host.settings)
    choice: dict[str, Any] = {"path": None, "model_only": not full}
    if explicit is not None:
        if newest is not None and (_same(newest, explicit) or _origin(newest) == os.path.abspath(explicit)):
            return choice  # the script names the newest itself; or it is what grew out of the one that it names
        set_aside(backends, lambda step: step > _step_at(explicit), f"this run begins at {explicit}, as told")
        return {**choice, "path": os.path.abspath(explicit)}
    if host.settings.resume != "auto":
        return choice
    for backend in backends:
        for name in sorted(_foreign(backend), key=lambda name: -(step_of(name) or 0)):
            folder = os.path.join(backend.root, name)  # type: ignore[attr-defined]
            problem = unfit(folder)
            if problem is not None:
                log.warning("%s is not used: %s", folder, problem)
                set_aside([backend], functools.partial(operator.eq, step_of(name)), "it is not whole")
            elif newest is None or (step_of(name) or 0) > newest.step:
                log.warning("resuming from %s, which was written without holdfast", folder)
                return {**choice, "path": folder}
            else:
                break
    return choice


def _newest(backends: Sequence[Backend], settings: Settings) -> tuple[Checkpoint | None, bool]:
    """Our newest checkpoint that training can go on from, and whether it holds more than the model."""
    newest = None
    for checkpoint in whole(backends) if settings.resume != "never" else ():
        if not settings.resumes_from(checkpoint.manifest.run):
            continue
        if not _model_only(checkpoint):
            return checkpoint, True
        newest = newest or checkpoint
    return newest, False


def _foreign(backend: Backend) -> Iterator[str]:
    return (name for name in backend.names() if is_foreign(backend, name))


def _same(checkpoint: Checkpoint, path: str) -> bool:
    return isinstance(checkpoint.backend, LocalBackend) and os.path.realpath(path) == os.path.realpath(
        os.path.join(checkpoint.backend.root, checkpoint.name)
    )


def _origin(checkpoint: Checkpoint) -> str | None:
    """The folder that the script named when the run began that this checkpoint belongs to."""
    for entry in checkpoint.manifest.files:
        if entry.path == RUN_FILE:
            try:
                tree = json.loads(_read(checkpoint, entry))
                return tree.get("origin") if isinstance(tree, dict) else None
            except (StoreError, ValueError):
                return None
    return None


def _step_at(path: str) -> int:
    try:
        with open(os.path.join(path, "trainer_state.json"), encoding="utf-8") as file:
            return int(json.load(file)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return step_of(os.path.basename(os.path.normpath(path))) or 0


def set_aside(backends: Sequence[Backend], which: Callable[[int], bool], why: str) -> None:
    """Move checkpoints out of the way, so that a later start does not take them for the newest of this run."""
    for backend in backends:
        names = [name for name in backend.names() if which(step_of(name) or 0)]
        if not names:
            continue
        if not isinstance(backend, LocalBackend):
            raise StoreError(f"{backend.uri} holds {names[0]}, which is newer than the start of this run: {why}")
        target = os.path.join(backend.root, f"previous-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
        os.makedirs(target)
        for name in names:
            os.rename(os.path.join(backend.root, name), os.path.join(target, name))
        log.warning("%s: %s moved to %s", why, ", ".join(sorted(names)), target)


def unfit(folder: str) -> str | None:
    """Why a checkpoint that the Trainer wrote by itself cannot be resumed from; None: as far as one can see it can."""
    names = set(os.listdir(folder))
    try:
        with open(os.path.join(folder, "trainer_state.json"), encoding="utf-8") as file:
            step = json.load(file)["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return "its trainer_state.json is missing or torn"
    if step != step_of(os.path.basename(os.path.normpath(folder))):
        return f"its trainer_state.json is of step {step}"
    sharded = any(name.startswith("pytorch_model_fsdp") for name in names)
    weights = [name for name in _WEIGHTS if name in names]
    for index in _INDEXES:
        if index in names:
            path = os.path.join(folder, index)
            with contextlib.suppress(OSError, ValueError, KeyError), open(path, encoding="utf-8") as file:
                weights += set(json.load(file)["weight_map"].values())
    if not weights and not sharded:
        return "it holds no weights"
    needed = [*weights, "scheduler.pt"]
    if not sharded:
        needed.append("optimizer.pt")
    for name in needed:
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            return f"{name} is missing"
        if not (_is_whole_safetensors(path) if name.endswith(".safetensors") else zipfile.is_zipfile(path)):
            return f"{name} is torn"
    return None


def _is_whole_safetensors(path: str) -> bool:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if not 0 < length <= size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
    return bool(end + 8 + length == size)


def _model_only(checkpoint: Checkpoint) -> bool:
    """A checkpoint of a Trainer with ``save_only_model``: nothing that training could go on with."""
    return not any(entry.path.startswith("optimizer") for entry in checkpoint.manifest.files)


def _from_folder(path: str, rank: int, world: int) -> Start:
    if not os.path.isdir(path):
        raise FileNotFoundError(f"resume_from_checkpoint={path!r} is no folder of this machine")
    if os.path.lexists(os.path.join(path, SENTINEL)):
        raise CheckpointCorruptError(f"resume_from_checkpoint={path!r} is not whole: its writer was killed")
    if os.path.isfile(os.path.join(path, MANIFEST)):
        backend = LocalBackend(os.path.dirname(os.path.abspath(path)))
        from holdfast.store.checkpoints import open_checkpoint

        checkpoint = open_checkpoint(backend, os.path.basename(os.path.abspath(path)))
        assert checkpoint is not None
        start = _loaded(checkpoint, rank, world, "", model_only=True)
        start.checkpoint = None
        start.foreign_step = checkpoint.step
        return start
    return Start(path, foreign_step=_step_at(path))


def _loaded(checkpoint: Checkpoint, rank: int, world: int, token: str, *, model_only: bool) -> Start:
    """Check every byte, and bring it onto this machine where it is not there yet."""
    if _model_only(checkpoint) and not model_only:
        raise StoreError(f"{checkpoint.name} holds the model alone, and an older one holds all of the training's state")
    if isinstance(checkpoint.backend, LocalBackend):
        for entry in checkpoint.manifest.files[rank % world :: world]:
            read_checked(checkpoint.backend, checkpoint.name, entry)
        path = os.path.join(checkpoint.backend.root, checkpoint.name)
    else:
        path = download(checkpoint, token)
    if _model_only(checkpoint) and rank == 0:
        log.warning("%s holds the model alone: the optimizer and its schedule start anew", checkpoint.name)
    try:
        run = read_run(path)
    except ValueError as error:
        raise CheckpointCorruptError(f"{checkpoint.name}: {error}") from error
    mine = None
    own = next((entry for entry in checkpoint.manifest.files if entry.path == rank_file(rank)), None)
    if checkpoint.manifest.world_size == world and own is not None:
        # Checked here too: the rank whose share it is in may be a moment later, and torn bytes cannot be parsed.
        mine = read_tree(bytearray(_read(checkpoint, own)))
    elif run is not None and rank == 0:
        log.warning(
            "%s was saved by %d ranks and is loaded by %d: parameters are exact, random state and data position are "
            "carried over as closely as possible",
            checkpoint.name,
            checkpoint.manifest.world_size,
            world,
        )
    return Start(path, run, mine, checkpoint)


def download(checkpoint: Checkpoint, token: str) -> str:
    """A folder of this machine with the files of ``checkpoint``, checked; fetched once for all ranks here."""
    folder = os.path.join(own_folder(_download_folder(token)), checkpoint.name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = os.path.join(folder, ".done")
        if not os.path.exists(done):
            for entry in checkpoint.manifest.files:
                _fetch(checkpoint, entry, os.path.join(folder, entry.path))
            with open(done, "w", encoding="ascii"):
                pass
    return folder


def remove_download(token: str) -> None:
    """Remove what :func:`download` made for this attempt."""
    for folder in own_folders(_download_folder(token)):
        shutil.rmtree(folder, ignore_errors=True)


def _download_folder(token: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"holdfast-{os.getuid()}-{token}")


def _fetch(checkpoint: Checkpoint, entry: FileEntry, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w+b") as file:
        if not entry.size:
            return
        file.truncate(entry.size)
        with mmap.mmap(file.fileno(), entry.size) as memory, memoryview(memory) as view:
            read_checked(checkpoint.backend, checkpoint.name, entry, into=view)


def _read(checkpoint: Checkpoint, entry: FileEntry) -> bytes:
    memory = bytearray(entry.size)
    read_checked(checkpoint.backend, checkpoint.name, entry, into=memoryview(memory))
    return bytes(memory)
