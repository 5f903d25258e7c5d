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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from holdfast.adapters.transformers.patches import ALONE, LEADING, SAVE, TORCH, TRANSFORMERS
from holdfast.adapters.transformers.point import Point
from holdfast.staging.arena import Arena
from holdfast.torch.capture import Captured, capturing, images

TRAINER_STATE = "trainer_state.json"


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
        keep = _Folder(tempfile.mkdtemp(prefix="holdfast-", dir=self._scratch))
        # Model cards are named after the output folder.
        folder = os.path.join(keep.path, os.path.basename(os.path.abspath(self._trainer.args.output_dir)) or "output")
        os.mkdir(folder)
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
    def _disguised(self, folder: str, *, leads: bool, together: bool, full: bool) -> Iterator[Any]:
        """The Trainer, with another output folder, and without what would reach beyond it. Yields its own arguments."""
        trainer, args, model = self._trainer, self._trainer.args, self._trainer.model
        disguise = _copy_with(args, {"output_dir": folder, **({"save_only_model": False} if full else {})}, leads)
        shown = dict(vars(disguise))
        best = trainer.state.best_model_checkpoint
        callbacks = copy.deepcopy(trainer.state.stateful_callbacks)
        wrappers = _Wrappers(folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(TRANSFORMERS.applied(SAVE, wrappers, to=trainer, thread=True))
            if leads and not args.should_save:
                stack.enter_context(TRANSFORMERS.applied(LEADING, wrappers, to=model, thread=True))
            if not together:
                stack.enter_context(TORCH.applied(ALONE, wrappers, thread=True))
            trainer.args = disguise
            try:
                yield args
            finally:
                trainer.args = args
                # What a subclass noted in the arguments meanwhile stays.
                vars(args).update({key: value for key, value in vars(disguise).items() if _differs(value, shown, key)})
                trainer.state.best_model_checkpoint = best
                if full:  # not a save that the script has asked for
                    trainer.state.stateful_callbacks = callbacks

    def _substituted(self, path: str, value: Any, point: Point, genuine: Any) -> Any:
        """What to save instead of ``value``: the arguments undisguised, and what has changed since the point."""
        if value is self._trainer.args:
            return genuine
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


def _copy_with(args: Any, values: Mapping[str, Any], saves: bool) -> Any:
    """The arguments with other values, of a process that does, or does not, save for all."""
    kind = type(args)
    if saves != args.should_save:
        kind = type(kind.__name__, (kind,), {"should_save": property(lambda self: saves)})
    copied = object.__new__(kind)
    vars(copied).update(vars(args), **values)
    return copied


def _differs(value: Any, before: Mapping[str, Any], key: str) -> bool:
    return key not in before or value is not before[key]


class _Wrappers:
    """Replacements of the Trainer's own functions while its save is captured: see the patch table."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def output_dir(self, original: Any) -> Any:
        return lambda trial=None: self._folder

    def nothing(self, original: Any) -> Any:
        return lambda *args, **kwargs: None

    barrier = nothing

    def should_save_on_this_rank(self, original: Any) -> Any:
        return lambda is_main_process: is_main_process
