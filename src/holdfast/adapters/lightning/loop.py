"""Where a Lightning fit is, and its state as files.

The boundary of a step is the end of its last batch, before a validation that may follow and before the end of the
epoch. What follows is done again by a run that goes on from there, under the random state of the boundary. So a
notice does not wait for the end of a validation: until then, nothing that is saved has changed.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.lightning import logs
from holdfast.adapters.lightning.attributes import Attributes
from holdfast.adapters.lightning.data import Pass, Spot
from holdfast.adapters.lightning.file import drop_hyper_parameters, refused_of
from holdfast.adapters.lightning.logs import Logs
from holdfast.adapters.lightning.state import (
    Averages,
    Counters,
    as_before_batch_end,
    average_states,
    averages,
    fingerprint,
    logged,
    metric_states,
)
from holdfast.engine.saving import Files
from holdfast.recorder.blackbox import BlackBox, Record
from holdfast.recorder.boxes import BOUNDARY
from holdfast.runtime.session import Place
from holdfast.store.pickled import LIGHTNING
from holdfast.torch import rng
from holdfast.torch.backward import BeforeBackward
from holdfast.torch.capture import _archived
from holdfast.torch.loop import Loop, _record_of
from holdfast.torch.state import Objects, rank_file, total_bytes, tree_image

_PLAIN = ("state_dict", "optimizer_states", "loops")
RUN = "run.safetensors"
log = logging.getLogger("holdfast")

_SWA = "StochasticWeightAveraging takes up its work at the beginning of an epoch, not in the middle of one"


@dataclass(slots=True)
class Note:
    """What has changed by the time of the next boundary, as it was at the last one."""

    counters: list[dict[str, Any]]
    stepped: int
    averages: Averages
    data: Pass | None
    spot: Spot | None
    stop: bool
    logs: logs.Note
    schedulers: list[Any] | None = None
    rest: dict[str, Any] | None = None
    """What changes in a validation and at the end of an epoch, where one of them follows."""
    weights: torch.Tensor | None = None


class Steps(Loop):
    """The position of a fit."""

    def __init__(
        self,
        trainer: Any,
        objects: Objects,
        box: BlackBox,
        place: Place,
        logs: Logs,
        *,
        rescue: bool,
        trusting: bool,
    ) -> None:
        """``trusting``: checkpoints may hold what runs code when it is read."""
        super().__init__(objects, box, place.rank, rescue=rescue)
        self.trainer = trainer
        self.logs = logs
        self.counters = Counters(trainer.fit_loop)
        self.data: Pass | None = None
        self.at_end = False
        """The fit is over: what is saved is its end."""
        self._alone = place.world == 1
        self._moved = True
        """Training has left the boundary that the note describes."""
        # These are stepped after the boundary, by what follows it, and once more by a run that goes on from there.
        self._late_schedulers = any(
            config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs
        )
        self.inexact = [_SWA] if any(_is_swa(callback) for callback in trainer.callbacks) else []
        """What of this fit cannot be restored exactly, in words."""
        self.attributes = Attributes(trainer)
        self._unsaved_told = False
        self._trusting = trusting
        self._refused_told = trusting or place.rank != 0
        with contextlib.suppress(Exception):  # callbacks that make their state when training starts
            callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
            self._tell_refused({"callbacks": callbacks, "lr_schedulers": self._schedulers()})
        self.noted: Note = self._take_note()

    # ------------------------------------------------------------------ called by the training thread

    def hook(self, *, backward: bool) -> None:
        """As :class:`Loop`, but for the optimizers: Lightning runs forward and backward inside of their step."""
        if backward:
            self._hooks.append(BeforeBackward(self._before_backward))

    def before_update(self) -> None:
        """Gradients are there, and the optimizer is about to change the weights."""
        self._before_optimizer()

    def _note_in_flight(self) -> None:
        if not self._alone:  # it is for survivors
            super()._note_in_flight()

    def begin_pass(self, data: Pass) -> None:
        self.data = data
        self.place = (self.trainer.current_epoch, self.place[1] + 1, data.active)
        if len(data.active) == 1:
            self._leave_base(*data.active)

    def first_batch(self) -> None:
        """The order of the pass is known now."""
        assert self.data is not None
        if len(self.data.active) == 1:
            self._leave_base(*self.data.active)
        self.watch_buffers()

    def reach(self, step: int, epochs_done: int | None) -> None:
        """An optimizer step is complete, and all that goes with it. In steady state: notes and one comparison."""
        delivered = 0
        if self.data is not None:
            for batches in self.data.active.values():
                delivered = batches.mark()[0]
        self.step = step
        self.dirty = False
        epoch, passes, active = self._place
        if epochs_done is not None:
            epoch = epochs_done
            self.place = (epoch, passes, active)
        self._note(BOUNDARY, step, epoch, passes, delivered)
        if self._buffers is not None:
            self._buffers.keep(step)
        self.noted = self._take_note()
        if epochs_done is not None:
            self._note_rest()
        engine = self.engine
        if engine is not None and (step >= engine.next_stop or epochs_done is not None):
            self._moved = False
            engine.at_boundary(step, epoch=epochs_done)
            self._moved = True

    def begin_validation(self) -> None:
        """Until the next batch, the boundary can be gone back to."""
        self._note_rest()
        self.pending = True

    def pause(self) -> None:
        """The boundary may have to be gone back to: inside a validation, or right before the next batch."""
        engine = self.engine
        if engine is not None and self.step >= engine.next_stop and self._is_intact():
            engine.at_boundary(self.step)

    def _take_note(self) -> Note:
        trainer, data = self.trainer, self.data
        epoch_loop = trainer.fit_loop.epoch_loop
        note = Note(
            self.counters.take(),
            epoch_loop._batches_that_stepped,
            averages(epoch_loop._results),
            data,
            None if data is None else data.here(),
            trainer.should_stop,
            self.logs.note(),
        )
        if self._late_schedulers:
            note.schedulers = self._schedulers()
        return note

    def _note_rest(self) -> None:
        note, trainer = self.noted, self.trainer
        if note.rest is not None:
            return
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        note.weights = fingerprint(trainer.lightning_module)
        note.schedulers = note.schedulers or self._schedulers()
        note.rest = {
            "callbacks": copy.deepcopy({key: state for key, state in callbacks.items() if state}),
            "counters": self.counters.take_others(),
            "metrics": metric_states(trainer.lightning_module),
            "logged": logged(trainer._logger_connector),
            "attributes": self.attributes.take(),
        }

    def _schedulers(self) -> list[Any]:
        return copy.deepcopy([config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs])

    def _is_intact(self) -> bool:
        """Whether the weights are those of the boundary."""
        before = self.noted.weights
        return before is None or torch.equal(before, fingerprint(self.trainer.lightning_module))

    # ------------------------------------------------------------------ asked by the engine, from any thread

    def freeze(self, wait_s: float) -> bool:
        return super().freeze(wait_s) and self._is_intact()

    def prepare(self) -> None:
        if self.rank == 0:
            cuda = self.trainer.strategy.root_device.type == "cuda"
            self._arena.reserve({LIGHTNING: self._size + (1 << 20)}, {LIGHTNING} if cuda else ())

    def files(self, *, live: bool, at_boundary: bool) -> Files:
        step = self.step
        here = at_boundary and (self.at_end or not self._moved)
        tree = self._own_tree(None if here else _record_of(self.box.records(), step))
        inexact = [] if self.at_end else [*self.inexact, *self._attributes_lost(tree, here)]
        # At a boundary all ranks are here, on their training threads: hooks of the user may talk to each other.
        checkpoint = self._dump() if at_boundary else None
        if at_boundary:
            self.logs.flush()

        def own() -> list[Any]:
            return [tree_image(rank_file(self.rank), tree)]

        def shared() -> list[Any]:
            if not at_boundary and self._has_own_values():
                inexact.append(f"what on_save_checkpoint of the module adds is from inside of step {step + 1}")
            content = checkpoint or self._dump()
            self._exchange_buffers(content, self._buffers_at(step, here, inexact))
            images = [
                _archived(LIGHTNING, content, None if live else self._arena),
                tree_image(RUN, self._run_tree(step, tree)),
            ]
            self._size = total_bytes(images)
            return images

        if live:
            return Files(own=own, shared=shared, of=lambda rank: self._part_of(rank, step), inexact=inexact)
        own_staged = self._stage(own())
        shared_staged = shared() if self.rank == 0 else []
        return Files(own=lambda: own_staged, shared=lambda: shared_staged, inexact=inexact)

    def _attributes_lost(self, tree: dict[str, Any], here: bool) -> list[str]:
        """What attributes of the script's objects will not be as they were, in words; said aloud the first time."""
        unsaved = self.attributes.unsaved()
        if unsaved and not self._unsaved_told and self.rank == 0:
            self._unsaved_told = True
            log.warning("a resume of this fit may not be exact: %s", "; ".join(unsaved))
        if here or self.noted.rest is not None:
            return unsaved
        return [
            *unsaved,
            *(f"attributes of {name} are from inside of step {self.step + 1}" for name in tree["attributes"]),
        ]

    def _has_own_values(self) -> bool:
        """Whether the user adds values to checkpoints, which may have changed since the boundary."""
        adds = type(self.trainer.lightning_module).on_save_checkpoint
        return not adds.__module__.startswith(("lightning.", "pytorch_lightning."))

    def _dump(self) -> dict[str, Any]:
        """Lightning's own checkpoint, as of the boundary."""
        content: dict[str, Any] = self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if not self._trusting:
            drop_hyper_parameters(content)
            self._tell_refused({key: value for key, value in content.items() if key not in _PLAIN})
        if self.at_end:
            return content
        note = self.noted
        content["global_step"] = self.step
        content["loops"]["fit_loop"] = as_before_batch_end(self._loops())
        if note.rest is not None:
            content["callbacks"] = note.rest["callbacks"]
        if note.schedulers is not None:
            content["lr_schedulers"] = note.schedulers
        return content

    def _tell_refused(self, content: dict[str, Any]) -> None:
        """Say, once, what a resume would refuse to read."""
        names = [] if self._refused_told else refused_of(content)
        if names:
            self._refused_told = True
            log.warning(
                "checkpoints of this fit hold %s, and are resumed from only if the script allows that: a class by "
                "torch.serialization.add_safe_globals([…]) before fit, everything by fit(weights_only=False)",
                ", ".join(names),
            )

    def _loops(self) -> dict[str, Any]:
        if self.at_end:
            return dict(self.trainer.fit_loop.state_dict())
        note = self.noted
        return self.counters.state(note.counters, note.rest["counters"] if note.rest else None, note.stepped)

    def _exchange_buffers(self, content: dict[str, Any], kept: dict[int, torch.Tensor]) -> None:
        """Running statistics as they were at the boundary, instead of those that have moved on."""
        if self._buffers is None or not kept:
            return
        places = {live.data_ptr(): kept[id(live)] for live in self._buffers.tensors if id(live) in kept}
        weights = content["state_dict"]
        for name, value in weights.items():
            if isinstance(value, torch.Tensor) and value.data_ptr() in places and value.numel():
                weights[name] = places[value.data_ptr()].reshape(value.shape)

    def _own_tree(self, record: Record | None) -> dict[str, Any]:
        trainer = self.trainer
        note = self._take_note() if self.at_end else self.noted
        epoch, passes, _ = self.place
        rest = note.rest
        return {
            "random": rng.capture() if record is None else record.random,
            "positions": {},
            "data": note.data.position(note.spot) if note.data is not None and note.spot is not None else None,
            "epoch": epoch if record is None else record.epoch,
            "passes": passes if record is None else record.passes,
            "averages": average_states(trainer.fit_loop.epoch_loop._results, note.averages),
            "metrics": metric_states(trainer.lightning_module) if rest is None else rest["metrics"],
            "logged": logged(trainer._logger_connector) if rest is None else rest["logged"],
            "attributes": self.attributes.take() if rest is None else rest["attributes"],
        }

    def _run_tree(self, step: int, own: dict[str, Any]) -> dict[str, Any]:
        note, trainer = self.noted, self.trainer
        return {
            "logs": self.logs.content(self.logs.note() if self.at_end else note.logs),
            **super()._run_tree(step, own),
            "loops": self._loops(),
            "stop": note.stop,
            "reload_epoch": trainer.fit_loop._last_train_dl_reload_epoch,
            "ended": [trainer.max_epochs, trainer.max_steps] if self.at_end else None,
        }

    def _tree_of(self, rank: int, step: int) -> dict[str, Any] | None:
        """What another rank would have written, from its black box. Its averages of the epoch are lost with it."""
        tree = super()._tree_of(rank, step)
        if tree is None or (self.noted.spot is not None and len(self.noted.spot[2]) > 1):
            return None
        positions = tree["positions"]
        index = self.noted.spot[0] if self.noted.spot is not None else 0
        tree["data"] = {"index": index, "consumed": None, "loaders": positions} if positions else None
        return tree


def _is_swa(callback: Any) -> bool:
    return any(kind.__name__ == "StochasticWeightAveraging" for kind in type(callback).__mro__)
