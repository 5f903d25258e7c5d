"""One attempt of a script that trains with Keras, whether it calls ``fit`` once or several times.

All calls of ``fit`` in a process are one run: steps are counted on through them. What a finished call has left is
committed when it returns, and every later checkpoint refers to it. So a resumed run does not train a finished call
again, and what the script does after it finds the model, the optimizer and the history as they were.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.adapters.keras import exchange as keras_exchange
from holdfast.adapters.keras.box import StepBox
from holdfast.adapters.keras.fit import Fit, Framework, Mode, numbers
from holdfast.adapters.keras.images import BufferImage, read_tree, tree_image
from holdfast.adapters.keras.kept import KeptState
from holdfast.adapters.keras.seeds import Seeds
from holdfast.config import Settings
from holdfast.engine.saving import Adopted, Files
from holdfast.errors import CheckpointCorruptError, Preempted
from holdfast.notice import SignalSource
from holdfast.progress import Progress
from holdfast.runtime.environment import surroundings
from holdfast.runtime.host import Host
from holdfast.runtime.session import Place
from holdfast.store.checkpoints import Checkpoint
from holdfast.store.manifest import FileEntry
from holdfast.store.pipeline import Image, read_checked

log = logging.getLogger("holdfast")

WEIGHTS = "model.weights.h5"
KEPT_ENDS = 16
"""Calls of fit whose end is committed when it comes; more are a loop around fit, and each commit takes its time."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def end_folder(number: int) -> str:
    """Where a checkpoint holds what a finished call of fit has left."""
    return f"fit-{number}"


class KerasRun:
    """The training of this process, as the engine sees it. The training thread writes its fields; others read."""

    def __init__(self, settings: Settings, place: Place, location: str, finished: dict[str, int], seeds: Seeds) -> None:
        """``finished``: by location, the calls of fit that this process has finished; counted on here."""
        self._seeds = seeds
        self.settings = settings
        self.location = location
        self.step = 0
        self.epochs_before = 0
        """Epochs of the calls of fit that are finished."""
        self.pending = True
        """The boundary of the last step is still ahead, or the run is between two steps for longer."""
        self.in_step = False
        self.frozen = False
        self.fit: Fit | None = None
        """The call of fit that is under way, or was last."""
        self.training = False
        """Such a call is under way."""
        self._finished = finished
        self._ends: dict[int, list[Adopted]] = {}
        self._loaded: tuple[Checkpoint, dict[str, Any], memoryview] | None = None
        self._size = 0
        self.kept: KeptState | None = None
        """Where there are other workers, what they need if this one dies."""
        self._kept_count = 0
        self._told_training = False
        self._closed = False
        self.host = Host(settings, place)
        self.box = StepBox(self.host.box_path(), self.host.rank)
        checkpoint = self.host.resume(self._load)
        if checkpoint is not None:
            self._go_on_from(checkpoint)
        self.engine = self.host.start(self, self._progress)
        self.box.note(self.step)
        # Before threads can no longer be started, which is later than the end of the script and sooner than atexit.
        register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
        (surroundings().at_exit or register)(self.end)

    # ------------------------------------------------------------------ start

    def _load(self, checkpoint: Checkpoint) -> None:
        """Read what this rank needs, and check the rest; changes nothing but what is remembered here."""
        entries = {entry.path: entry for entry in checkpoint.manifest.files}
        own = entries.get(rank_file(self.host.rank)) or entries.get(rank_file(0))
        weights = entries.get(WEIGHTS)
        if own is None or weights is None:
            raise CheckpointCorruptError(f"{checkpoint.name} is no checkpoint of Keras: {WEIGHTS} is not in it")
        if checkpoint.manifest.world_size != self.host.session.world:
            log.warning(
                "%s was saved by %d workers and is loaded by %d: weights are exact, random state and data position "
                "are carried over as closely as possible",
                checkpoint.name,
                checkpoint.manifest.world_size,
                self.host.session.world,
            )
        for entry in checkpoint.manifest.files:
            if entry.path.startswith("fit-"):
                read_checked(checkpoint.backend, checkpoint.name, entry)
        state = _tree(checkpoint, own)
        if state.get("earlier") is not None:
            paths = [rank_file(rank) for rank in range(checkpoint.manifest.world_size)]
            places = [_tree(checkpoint, entries[path])["epoch"] for path in paths if path in entries]
            if min(places) < state["epoch"]:
                # Between the same two steps another worker was at the end of an epoch, this one in the next.
                state = state["earlier"]
        self._loaded = (checkpoint, state, _read(checkpoint, weights))

    def _go_on_from(self, checkpoint: Checkpoint) -> None:
        self.step = checkpoint.step
        for entry in checkpoint.manifest.files:
            folder, _, path = entry.path.partition("/")
            if path:
                self._ends.setdefault(int(folder.removeprefix("fit-")), []).append(_adopted(checkpoint, entry, path))

    def begin(self, framework: Framework, model: Any, first: int, epochs: int) -> Fit:
        """A call of fit begins, in the training thread."""
        number = self._finished.get(self.location, 0) + 1
        fit = Fit(self, framework, model, number, first, epochs, self._seeds)
        if self._loaded is not None:
            checkpoint, state, weights = self._loaded
            if number == state["fit"]:
                fit.load(state, weights)
                self._loaded = None
                if fit.mode is Mode.DONE:
                    self._keep_end(fit, checkpoint)
                    log.warning(
                        "fit %d was complete at step %d and is not trained again; HOLDFAST_RESUME=never starts anew",
                        number,
                        self.step,
                    )
            elif number < state["fit"]:
                self._load_end(fit, checkpoint)
        self.fit = fit
        self.training = True
        self.pending = True
        self.in_step = False
        return fit

    def _load_end(self, fit: Fit, checkpoint: Checkpoint) -> None:
        """Of a call that was finished before the one that was interrupted."""
        fit.past = True
        folder = end_folder(fit.number)
        entries = {entry.path: entry for entry in checkpoint.manifest.files}
        own = entries.get(f"{folder}/{rank_file(self.host.rank)}") or entries.get(f"{folder}/{rank_file(0)}")
        if own is None:
            log.warning(
                "fit %d was finished and is not trained again; what it left was not kept, so that the script sees the "
                "model as it is now until fit %d goes on",
                fit.number,
                self._loaded[1]["fit"] if self._loaded else 0,
            )
            fit.mode = Mode.DONE
            return
        fit.load(_tree(checkpoint, own), _read(checkpoint, entries[f"{folder}/{WEIGHTS}"]))

    # ------------------------------------------------------------------ the training thread

    def listen_again(self) -> None:
        """Libraries that Keras starts with the training put signal handlers of their own in place of ours."""
        for source in self.engine.sources:
            if isinstance(source, SignalSource):
                source.reinstall()

    def at_boundary(self, epochs_done: int | None = None) -> None:
        self.engine.at_boundary(self.step, epoch=epochs_done)

    def before_step(self) -> None:
        """The first batch of this attempt is about to be trained."""
        if not self._told_training:
            self._told_training = True
            self.host.tell_training(self.step)

    def finish(self, fit: Fit) -> None:
        """A call of fit has returned."""
        fit.finished = True
        self.in_step = False
        self.pending = True
        if fit.mode is not Mode.DONE and not fit.past:
            self.at_boundary()
            self._commit_end(fit)
        self.epochs_before = fit.epochs_done()
        self._finished[self.location] = fit.number
        self.training = False

    def _commit_end(self, fit: Fit) -> None:
        if self.step == 0 or fit.number > KEPT_ENDS:
            return
        manifest = self.engine.rest(self.step)
        saver = self.host.saver
        if manifest is None or saver is None or saver.committed_at is None or manifest.step != self.step:
            return
        self._keep_end(fit, Checkpoint(manifest.name, saver.committed_at, manifest))

    def _keep_end(self, fit: Fit, checkpoint: Checkpoint) -> None:
        """Later checkpoints refer to what this call has left, which lies in ``checkpoint``."""
        own = [entry for entry in checkpoint.manifest.files if "/" not in entry.path]
        self._ends[fit.number] = [_adopted(checkpoint, entry, entry.path) for entry in own]

    def note_boundary(self) -> None:
        """A step is complete: leave word of it for whoever finds this process dead."""
        self.box.note(self.step)
        if self.kept is not None:
            self.kept.keep_random(self.step)

    def note_pass(self) -> None:
        """The first step of a pass over the data is done: all variables are there."""
        fit = self.fit
        if self.host.session.world == 1 or self.box.path is None or fit is None:
            return
        variables = fit.framework.moving(fit.model)
        if self.kept is None or len(variables) != self._kept_count:
            self.kept, self._kept_count = KeptState(self.box.path, variables), len(variables)
        self.kept.keep_pass(fit.at_pass())
        self.kept.keep(self.step)

    def put_back(self) -> bool:
        """Undo what a step in flight may have changed; False if that was not kept."""
        return self.kept is not None and self.kept.put_back(self.step)

    def give_up_step(self) -> bool:
        """Called from any thread where another worker is gone: the step that waits for it fails at once, instead of
        when TensorFlow finds out, and the training thread saves. False if no step is waiting."""
        if self.host.session.world == 1 or not self.in_step:
            return False
        keras_exchange.abort()
        return True

    def fail(self, error: BaseException) -> None:
        """A call of fit was left by an exception."""
        try:
            if not isinstance(error, Preempted):
                if self.fit is not None:
                    self.fit.settle(error)
                self.engine.crashed(error)
        finally:
            self.close()

    def end(self) -> None:
        """The script trains no more, at least not here."""
        if self._closed:
            return
        if getattr(sys, "last_value", None) is None and not self.training:
            self.engine.finish(self.step)
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.host.close()
        if self.host.saved_all(self.step):
            if self.kept is not None:
                self.kept.remove()
            self.box.remove()

    @property
    def closed(self) -> bool:
        return self._closed

    # ------------------------------------------------------------------ asked by the engine, from any thread

    def soonest(self) -> int:
        return self.step if self.pending or self.fit is None else self.step + self.fit.in_flight

    def last_boundary(self) -> int:
        return self.step

    def epoch(self) -> int:
        return self.fit.epochs_done() if self.fit is not None else self.epochs_before

    def rests_at(self, step: int) -> bool:
        return self.training and step == self.step and self.fit is not None and self.fit.rests()

    def freeze(self, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while True:
            # The order matters: the training thread sets its flag first and looks at this one second.
            self.frozen = True
            if not self.in_step:
                return True
            self.frozen = False
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)

    def wait_while_frozen(self) -> None:
        """Another thread saves the state as it stands, and then ends the process."""
        while self.frozen:
            self.in_step = False
            time.sleep(0.05)
            self.in_step = True

    def size(self) -> int:
        return self._size

    def prepare(self) -> None:
        """Nothing: what a save needs is made for each."""

    def files(self, *, live: bool, at_boundary: bool) -> Files:
        fit = self.fit
        assert fit is not None
        state = fit.small()
        doubts = fit.doubts()

        def own() -> Sequence[Image]:
            return [tree_image(rank_file(self.host.rank), state)]

        def shared() -> Sequence[Image | Adopted]:
            weights = BufferImage(WEIGHTS, fit.framework.weights(fit.model))
            self._size = weights.size
            return [weights, *self._earlier(fit.number)]

        def of(rank: int) -> Sequence[Image] | None:
            found = self.kept.of(self._box_of(rank), self.step) if self.kept is not None else None
            return None if found is None else [tree_image(rank_file(rank), _as_rank(state, found))]

        if live:
            return Files(own=own, shared=shared, of=of, inexact=doubts)
        copied, leads = own(), self.host.rank == 0
        copied_shared = shared() if leads else ()
        return Files(own=lambda: copied, shared=lambda: copied_shared, inexact=doubts)

    def _box_of(self, rank: int) -> str:
        assert self.box.path is not None
        return os.path.join(os.path.dirname(self.box.path), f"rank-{rank}")

    def _earlier(self, number: int) -> list[Adopted]:
        """What the calls of fit before this one have left."""
        found = []
        for end, files in self._ends.items():
            if end < number:
                found += [dataclasses.replace(file, path=f"{end_folder(end)}/{file.path}") for file in files]
        return found

    # ------------------------------------------------------------------ progress

    def _progress(self) -> Progress:
        fit = self.fit
        known: dict[str, Any] = {}
        if fit is not None:
            total = fit.data.total() if fit.data is not None else None
            logs = numbers(fit.logs)
            known = {
                "epoch": min(fit.epoch + 1, fit.epochs),
                "total_epochs": fit.epochs,
                "total_steps": fit.steps_before + total * (fit.epochs - fit.first) if total else None,
                "loss": logs.get("loss"),
                "accuracy": _accuracy(logs, ""),
                "validation_loss": fit.epoch_logs.get("val_loss"),
                "validation_accuracy": _accuracy(numbers(fit.epoch_logs), "val_"),
                "learning_rate": fit.framework.learning_rate(fit.model),
            }
        return Progress(
            step=self.step, resumed_from=self.host.resumed_from, checkpointing=self.host.checkpointing(), **known
        )


def _accuracy(logs: dict[str, Any], prefix: str) -> float | None:
    """The first value that goes by that name: ``accuracy``, ``acc``, ``sparse_categorical_accuracy`` …"""
    for name, value in logs.items():
        plain = name.removeprefix(prefix)
        if name.startswith(prefix) and (plain == "acc" or plain.endswith("accuracy")):
            return float(value)
    return None


def _as_rank(mine: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The state of a rank that is gone: what it kept, and for the rest what this rank has, which did the same."""
    kept = {name: value for name, value in found["variables"].items() if name in mine["variables"]}
    return {
        **mine,
        "random": {**mine["random"], **found["random"]},
        "began_random": found["began_random"],
        "data": {**mine["data"], **found["data"]},
        "variables": {**mine["variables"], **kept},
        "earlier": None,
    }


def _adopted(checkpoint: Checkpoint, entry: FileEntry, path: str) -> Adopted:
    """A file of a committed checkpoint, as ``path`` in a later one."""
    source, at = (checkpoint.name, entry.path) if entry.ref is None else entry.ref.split("/", 1)
    placed = dataclasses.replace(entry, path=at)
    return Adopted(path, entry.size, placed, source, home=checkpoint.backend.uri)


def _read(checkpoint: Checkpoint, entry: FileEntry) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(1, entry.size)))[: entry.size]
    read_checked(checkpoint.backend, checkpoint.name, entry, into=memory)
    return memory


def seeds_in(checkpoint: Checkpoint, rank: int) -> list[int]:
    """With which seeds the datasets of a rank's script were shuffled that have none of their own."""
    entries = {entry.path: entry for entry in checkpoint.manifest.files}
    own = entries.get(rank_file(rank)) or entries.get(rank_file(0))
    return [] if own is None else [int(seed) for seed in _tree(checkpoint, own)["shuffle_seeds"]]


def _tree(checkpoint: Checkpoint, entry: FileEntry) -> dict[str, Any]:
    try:
        tree = read_tree(_read(checkpoint, entry))
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise CheckpointCorruptError(f"{checkpoint.name}/{entry.path}: {error}") from error
    if not isinstance(tree, dict) or "fit" not in tree:
        raise CheckpointCorruptError(f"{checkpoint.name}/{entry.path} is not what Keras training leaves")
    return tree
