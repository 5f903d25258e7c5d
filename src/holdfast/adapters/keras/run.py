"""One attempt of a script that trains with Keras, whether it calls ``fit`` once or several times.

All calls of ``fit`` in a process are one run: steps are counted on through them. What a finished call has left is
committed when it returns, and every later checkpoint holds it too. So a resumed run does not train a finished call
again, and what the script does after it finds the model, the optimizer and the history as they were.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.adapters.keras import exchange as keras_exchange
from holdfast.adapters.keras.box import StepBox
from holdfast.adapters.keras.fit import Fit, Framework, Mode, numbers
from holdfast.adapters.keras.identity import Identity
from holdfast.adapters.keras.images import BufferImage, tree_image
from holdfast.adapters.keras.kept import KeptState
from holdfast.adapters.keras.records import WEIGHTS, Records, bytes_of, rank_file, tree_in
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
from holdfast.store.pipeline import Image, read_checked

log = logging.getLogger("holdfast")

_KEPT_ANYWAY = 16
"""Calls of fit whose end is committed when it comes, however short they are."""
_WORTH = 20.0
"""The end of any other is committed if so many times as long was trained since the last one as a commit takes."""


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
        self._ends = 0
        """Calls whose end this process has committed."""
        self._end_s = 0.0
        """What that took last."""
        self._ended_at = time.monotonic()
        self._size = 0
        self.kept: KeptState | None = None
        """Where there are other workers, what they need if this one dies."""
        self._kept_count = 0
        self._told_training = False
        self.doubts_told: set[str] = set()
        self._closed = False
        self.host = Host(settings, place)
        self.records = Records(self.host.rank, self.host.session.world)
        """What the calls of fit of this run have left."""
        self.box = StepBox(self.host.box_path(), self.host.rank)
        checkpoint = self.host.resume(self._load)
        if checkpoint is not None:
            self.step = checkpoint.step
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
        if self.host.session.world > 1:
            # All must find the same later on; with one worker, what is damaged is lost for itself.
            for entry in checkpoint.manifest.files:
                if "/" in entry.path:
                    read_checked(checkpoint.backend, checkpoint.name, entry)
        state = tree_in(checkpoint, own)
        if state.get("earlier") is not None:
            paths = [rank_file(rank) for rank in range(checkpoint.manifest.world_size)]
            places = [tree_in(checkpoint, entries[path])["epoch"] for path in paths if path in entries]
            if min(places) < state["epoch"]:
                # Between the same two steps another worker was at the end of an epoch, this one in the next.
                state = {**state["earlier"], "fits": state.get("fits", {})}
        self.records = Records(self.host.rank, self.host.session.world)
        self.records.open(checkpoint, state, bytes_of(checkpoint, weights))

    def begin(self, framework: Framework, model: Any, first: int, epochs: int, identity: Identity) -> Fit:
        """A call of fit begins, in the training thread."""
        number, record = self.records.find(self._finished.get(self.location, 0) + 1, identity)
        fit = Fit(self, framework, model, number, first, epochs, self._seeds, identity)
        if record is not None and record.state is not None and record.weights is not None:
            fit.load(record.state, record.weights)
            record.state = record.weights = None
            if fit.mode is Mode.DONE and number == self.records.newest:
                log.warning(
                    "fit %d was complete at step %d and is not trained again; HOLDFAST_RESUME=never starts anew",
                    number,
                    self.step,
                )
        self.fit = fit
        self.training = True
        self.pending = True
        self.in_step = False
        return fit

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
        if fit.mode is not Mode.DONE:
            self.at_boundary()
            self._commit_end(fit)
        self.epochs_before = fit.epochs_done()
        self._finished[self.location] = fit.number
        self.training = False

    def _commit_end(self, fit: Fit) -> None:
        if self.step == fit.began_at and fit.mode is Mode.ANEW:
            return  # nothing was trained
        began = time.monotonic()
        alone = self.host.session.world == 1  # else all must decide alike
        if alone and self._ends >= _KEPT_ANYWAY and began - self._ended_at < _WORTH * self._end_s:
            return  # a loop around fit: it would do little else
        manifest = self.engine.rest(self.step)
        saver = self.host.saver
        if manifest is None or saver is None or saver.committed_at is None or manifest.step != self.step:
            return
        checkpoint = Checkpoint(manifest.name, saver.committed_at, manifest)
        self.records.keep(fit.number, fit.identity, checkpoint, saver.committed_at.free_bytes())
        self._ends += 1
        self._ended_at = time.monotonic()
        self._end_s = self._ended_at - began

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
        state = {**fit.small(), "fits": self.records.facts(fit.number)}
        doubts = fit.doubts()

        def own() -> Sequence[Image]:
            return [tree_image(rank_file(self.host.rank), state)]

        def shared() -> Sequence[Image | Adopted]:
            weights = BufferImage(WEIGHTS, fit.weights())
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
        """What all other calls of fit have left."""
        saver, newest = self.host.saver, None
        if saver is not None and saver.committed is not None and saver.committed_at is not None:
            newest = Checkpoint(saver.committed.name, saver.committed_at, saver.committed)
        return self.records.others(number, newest)

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


def seeds_in(checkpoint: Checkpoint, rank: int) -> list[int]:
    """With which seeds the datasets of a rank's script were shuffled that have none of their own."""
    entries = {entry.path: entry for entry in checkpoint.manifest.files}
    own = entries.get(rank_file(rank)) or entries.get(rank_file(0))
    return [] if own is None else [int(seed) for seed in tree_in(checkpoint, own)["shuffle_seeds"]]
