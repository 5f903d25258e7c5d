"""A Trainer's own checkpoint as images: its ``_save_checkpoint``, or a subclass's, run without its writes.

The Trainer believes that it saves into a folder of its own. Tensors stay where they are (:mod:`capture`), small files
are picked up from that folder, and what a save at this moment must not do is left out: talking to other ranks, who
may be anywhere, uploading, and deleting old checkpoints.

The files describe a :class:`~holdfast.adapters.transformers.point.Point`, which may lie a little in the past: the
evaluation of a step may be under way, or the next step.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from holdfast.adapters.transformers.point import Point
from holdfast.staging.arena import Arena
from holdfast.torch.capture import Captured, capturing, images

TRAINER_STATE = "trainer_state.json"
_MISSING = object()


def is_rng_file(path: str) -> bool:
    name = os.path.basename(path)
    return name.startswith("rng_state") and name.endswith(".pth")


class TrainerFiles:
    """Makes the files of a Trainer's checkpoints."""

    def __init__(self, trainer: Any, scratch: str | None) -> None:
        """``scratch``: where large files may go for a while; None: the system's place for temporary files."""
        self._trainer = trainer
        self._scratch = scratch
        self.save: Callable[..., None] = trainer._save_checkpoint
        """The Trainer's own, as the script has it."""

    def take(
        self,
        point: Point,
        *,
        moved: Mapping[int, torch.Tensor],
        leads: bool,
        together: bool,
        full: bool,
        arena: Arena | None,
    ) -> list[Any]:
        """The files that this rank would write, but for its random state.

        ``moved``: by address, what to save instead of tensors that have changed since. ``leads``: write what one rank
        writes for all. ``together``: all ranks are here, so that they may talk. ``full``: also what the script left
        out with ``save_only_model``. ``arena``: copy everything out of training's way.
        """
        folder = tempfile.mkdtemp(prefix="holdfast-", dir=self._scratch)
        keep = _Folder(folder)
        name = f"checkpoint-{point.step}"
        with (
            _quietly(),
            self._disguised(folder, leads=leads, together=together, full=full) as genuine,
            capturing(folder, lambda path, value: self._substituted(path, value, point, genuine)) as captured,
        ):
            self.save(self._trainer.model_wrapped, None)
        inside = self._inside(captured, name)
        state = os.path.join(inside.folder, TRAINER_STATE)
        if os.path.exists(state):
            self._correct_state(state, point)
        for path, (tensors, metadata) in inside.tensors.items():
            if moved:
                changed = {key: moved.get(tensor.data_ptr(), tensor) for key, tensor in tensors.items()}
                inside.tensors[path] = (changed, metadata)
        found = [image for image in images(inside, keep, arena) if not is_rng_file(image.path)]
        self._hand_on(folder, name, together)
        return found

    @staticmethod
    def _inside(captured: Captured, name: str) -> Captured:
        """What belongs to the checkpoint: a subclass may write elsewhere too."""
        prefix = f"{name}/"
        inside = Captured(os.path.join(captured.folder, name), captured.substitute)
        for path, value in captured.pickled.items():
            if path.startswith(prefix):
                inside.pickled[path.removeprefix(prefix)] = value
        for path, tensors in captured.tensors.items():
            if path.startswith(prefix):
                inside.tensors[path.removeprefix(prefix)] = tensors
        return inside

    def _hand_on(self, folder: str, name: str, together: bool) -> None:
        """What was written beside the checkpoint, such as TRL's model card, belongs into the output folder."""
        if not together:
            return
        for entry in os.listdir(folder):
            source = os.path.join(folder, entry)
            if entry != name and os.path.isfile(source):
                target = os.path.join(self._trainer.args.output_dir, entry)
                shutil.copyfile(source, f"{target}.holdfast.tmp")
                os.replace(f"{target}.holdfast.tmp", target)

    @contextlib.contextmanager
    def _disguised(self, folder: str, *, leads: bool, together: bool, full: bool) -> Iterator[dict[str, Any]]:
        """The Trainer, with another output folder, and without what would reach beyond it."""
        trainer, args = self._trainer, self._trainer.args
        changes: list[tuple[Any, str, Any]] = [
            (trainer, "_get_output_dir", lambda trial=None: folder),
            (trainer, "_push_from_checkpoint", lambda checkpoint_folder: None),
            (trainer, "store_flos", lambda: None),
            (args, "output_dir", folder),
        ]
        if full:
            changes.append((args, "save_only_model", False))
        model = trainer.model
        if leads and not args.should_save and hasattr(model, "should_save_on_this_rank"):
            changes.append((model, "should_save_on_this_rank", lambda is_main_process: is_main_process))
        genuine = {"class": type(args), "output_dir": args.output_dir, "save_only_model": args.save_only_model}
        best = trainer.state.best_model_checkpoint
        callbacks = copy.copy(trainer.state.stateful_callbacks)
        with _changed(changes), contextlib.ExitStack() as stack:
            if leads != args.should_save:
                args.__class__ = _with_should_save(type(args), leads)
                stack.callback(setattr, args, "__class__", genuine["class"])
            if not together:
                stack.enter_context(_no_barrier())
            try:
                yield genuine
            finally:
                trainer.state.best_model_checkpoint = best
                if not together:
                    trainer.state.stateful_callbacks = callbacks

    def _substituted(self, path: str, value: Any, point: Point, genuine: Mapping[str, Any]) -> Any:
        """What to save instead of ``value``: the arguments undisguised, and what has changed since the point."""
        if value is self._trainer.args:
            args = copy.copy(value)
            args.__class__ = genuine["class"]
            args.output_dir, args.save_only_model = genuine["output_dir"], genuine["save_only_model"]
            return args
        name = os.path.basename(path)
        if point.scheduler is not None and name == "scheduler.pt":
            return point.scheduler
        if point.rates is not None and name == "optimizer.pt":
            groups = [{**group, "lr": rate} for group, rate in zip(value["param_groups"], point.rates, strict=True)]
            return {**value, "param_groups": groups}
        return value

    @staticmethod
    def _correct_state(path: str, point: Point) -> None:
        """The Trainer's state as of the point."""
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
        state.update(point.state)
        state["log_history"] = state["log_history"][: point.log_length]
        control = {"TrainerControl": {"args": point.pending(), "attributes": {}}}
        state["stateful_callbacks"] = {**state["stateful_callbacks"], **point.callbacks, **control}
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(state, indent=2, sort_keys=True) + "\n")


class _Folder:
    """A folder that goes when nothing refers to it any more."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __del__(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def _changed(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of instances, and put back what was there."""
    before = [(target, name, vars(target).get(name, _MISSING)) for target, name, _ in changes]
    try:
        for target, name, value in changes:
            vars(target)[name] = value
        yield
    finally:
        for target, name, value in before:
            if value is _MISSING:
                vars(target).pop(name, None)
            else:
                vars(target)[name] = value


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """No progress bars for writes that do not happen."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _with_should_save(kind: type, saves: bool) -> type:
    """The class of the arguments, of a process that does, or does not, save for all."""
    return type(kind.__name__, (kind,), {"should_save": property(lambda self: saves)})


@contextlib.contextmanager
def _no_barrier() -> Iterator[None]:
    """On this thread nobody waits for the other ranks: they may be elsewhere."""
    import torch.distributed as dist

    if not dist.is_available():
        yield
        return
    barrier, thread = dist.barrier, threading.get_ident()

    def none_here(*args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() == thread else barrier(*args, **kwargs)

    dist.barrier = none_here
    try:
        yield
    finally:
        dist.barrier = barrier
