"""Where a Trainer's loop is, and its state as files: the engine's view of a ``transformers.Trainer``.

The state that is saved for a step is always that of the end of ``on_step_end``, wherever the ranks are by then. The
engine may stop the training there, at each batch of an evaluation, before the Trainer saves, and before the next
batch is fetched.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

from holdfast.adapters.transformers.feed import Feed, FetchLog, calm, fetch_of
from holdfast.adapters.transformers.loss import Losses, losses_of
from holdfast.adapters.transformers.point import FLAGS, Point, number
from holdfast.adapters.transformers.save import TrainerFiles
from holdfast.engine.saving import Files
from holdfast.recorder.blackbox import BlackBox
from holdfast.recorder.boxes import BOUNDARY, IN_FLIGHT
from holdfast.staging.images import BytesImage
from holdfast.torch import rng
from holdfast.torch.capture import archive
from holdfast.torch.loop import Loop, _record_of
from holdfast.torch.state import Objects, total_bytes, tree_image

RUN_FILE = "holdfast-trainer.json"


def rank_file(rank: int) -> str:
    return f"holdfast-rank-{rank:05d}.safetensors"


class TrainerLoop(Loop):
    """The position of a Trainer. Its thread writes it; others read."""

    def __init__(self, trainer: Any, box: BlackBox, rank: int, world: int, *, rescue: bool, sharded: bool) -> None:
        super().__init__(Objects({}, rank, incremental=False), box, rank, rescue=rescue)
        self.world = world
        self.sharded = sharded
        """The state is spread over the ranks: it can be saved only by all together, at the end of a step."""
        self.point: Point | None = None
        """The last step that is complete; None: this attempt has not completed one."""
        self.epoch_ends = False
        """The Trainer does what comes at the end of an epoch."""
        self.batches_in_epoch: int | None = None
        self.used = 0
        self.feed: Feed | None = None
        self.fetches: FetchLog | None = None
        self.origin: str | None = None
        self.initial_step = 0
        self.seconds_before = 0.0
        """Time spent training in earlier attempts."""
        self.began = time.monotonic()
        self.grad_norm: Any = None
        self.learning_rate: Any = None
        self.files_of: TrainerFiles | None = None
        self._trainer = trainer
        self._asked: Point | None = None
        self._losses = Losses(f"{box.path}.loss" if box.path and rescue else None)
        self._stateful: list[Any] = []
        self._by_metric = False
        self._metrics_owner = False
        self._event: torch.cuda.Event | None = None
        self._seen_buffers = 0
        self._unprepared = True

    # ------------------------------------------------------------------ called by the training thread

    def attach(self, model: torch.nn.Module, optimizer: Any) -> None:
        """The Trainer has prepared what it trains."""
        from transformers.trainer_callback import ExportableState

        trainer = self._trainer
        inner = getattr(optimizer, "optimizer", optimizer)
        self.objects = Objects({"model": model, "optimizer": inner}, self.rank, incremental=False)
        self._size = 3 * sum(value.numel() * value.element_size() for value in model.parameters())
        self._stateful = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, ExportableState)]
        self._by_metric = type(trainer.lr_scheduler).__name__ in ("ReduceLROnPlateau", "GreedyLR")
        self._metrics_owner = isinstance(getattr(trainer, "_metrics", None), dict)
        if any(parameter.is_cuda for parameter in model.parameters()):
            self._event = torch.cuda.Event()
        self.watch_buffers()

    def open_feed(self, feed: Feed) -> None:
        """A pass over the data begins, or goes on."""
        epoch, passes, _ = self.place
        if self.feed is not None:
            self.feed.close(keep_persistent=True)
        self.feed = feed
        self.place = (epoch, passes + 1, {"train": feed})  # type: ignore[dict-item]
        self._leave_base("train")

    def step_done(self, control: Any) -> None:
        """A step is complete; its callbacks have been called."""
        trainer = self._trainer
        step = trainer.state.global_step
        point = Point(trainer, step, control)
        epoch, passes, _ = self.place
        point.epoch, point.used, feed = epoch, self.used, self.feed
        point.epoch_over = self.used == self.batches_in_epoch
        point.grad_norm, point.learning_rate = self.grad_norm, self.learning_rate
        point.loss = self._losses.note(step, trainer._tr_loss, point.flos)
        if feed is not None:
            point.feed, point.mark = feed, feed.settle(self.used)
        if self._stateful:
            point.keep_callbacks(self._stateful)
        if self._by_metric:
            point.keep_scheduler(trainer.lr_scheduler, trainer.optimizer)
        if self._metrics_owner:
            point.metrics = _copied_metrics(trainer)
        if self._event is not None:
            self._event.record()
        self.point = point
        self._note(BOUNDARY, step, epoch, passes, self.used)
        if self._buffers is not None:
            self._buffers.keep(step)
        elif self._seen_buffers < 2:
            self._seen_buffers += 1
            self.step = step
            self.watch_buffers()
        # The order matters: between these two the next step counts as the soonest to stop at, which is always possible;
        # and a thread that finds the state clean takes the point for that of the step.
        self.step = step
        self.pending = not self.sharded
        self.dirty = False
        if self._unprepared and self.saver is not None and trainer.args.save_strategy.value != "no":
            self.prepare()
        self.look_in()

    def start_over(self, step: int) -> None:
        """The Trainer begins again at the step that this attempt began with."""
        self.pending, self.dirty, self.point = True, False, None
        self.step = step

    def look_in(self) -> None:
        """Stop here if that is agreed. Nothing is decided by passing."""
        engine = self.engine
        if engine is not None and self.step >= engine.next_stop:
            engine.at_boundary(self.step)

    def leave_boundary(self) -> None:
        """The last step is over, with all that belongs to it: from here on the next one can be stopped at."""
        self.pending = False
        self.look_in()

    def end_epoch(self, epochs_done: int) -> None:
        self.epoch_ends = True
        if self.engine is not None and self.point is not None:
            self.engine.at_boundary(self.step, epoch=epochs_done)

    def before_optimizer(self) -> None:
        self._before_optimizer()

    def after_loss(self) -> None:
        """A forward pass is done."""
        if not self.pending:
            self._note_in_flight()

    def gradients_there(self) -> None:
        """All forward and backward passes of a step are done: peers may complete it without this rank."""
        self._note_in_flight()
        self._losses.note(self.step + 1, self._trainer._tr_loss, self._trainer.current_flos)

    def _note_in_flight(self) -> None:
        epoch, passes, _ = self.place
        self._note(IN_FLIGHT, self.step + 1, epoch, passes, self.used)
        if self._buffers is not None and self.rank == 0:
            self._buffers.keep(self.step + 1)

    def now(self) -> Point:
        """This moment, at which nothing but the end of the epoch may be pending."""
        trainer = self._trainer
        point = Point(trainer, self.step, trainer.control)
        last = self.point
        point.epoch, point.used = (last.epoch, last.used) if last is not None else (self.place[0], self.used)
        point.epoch_over = last.epoch_over if last is not None else False
        point.epoch_ended = self.epoch_ends
        if last is not None:
            point.feed, point.mark = last.feed, last.mark
        point.flags = (point.flags[0], point.flags[1], False, False, False)
        point.grad_norm, point.learning_rate = self.grad_norm, self.learning_rate
        point.loss = number(trainer._tr_loss)
        point.random = rng.capture()
        point.keep_callbacks(self._stateful)
        if self._metrics_owner:
            point.metrics = _copied_metrics(trainer)
        return point

    def save_now(self, point: Point) -> None:
        """The Trainer's own periodic save: on all ranks, at the same place."""
        assert self.engine is not None
        self._asked = point
        try:
            self.engine.save(point.step)
        finally:
            self._asked = None

    def finish(self) -> None:
        """The run is complete: commit its end."""
        assert self.engine is not None
        self.over = True
        if self.point is None and self.saver is not None and self.saver.committed_at is None and self.step:
            return  # there was nothing to train after a checkpoint that is not ours to complete
        self.epoch_ends = True
        self._asked = self.now()
        try:
            self.engine.finish(self.step)
        finally:
            self._asked = None

    # ------------------------------------------------------------------ asked by the engine, from any thread

    def rests_at(self, step: int) -> bool:
        return self.pending and self.step == step and not self.over

    def freeze(self, wait_s: float) -> bool:
        if self.sharded and not self._saved(self.step):
            return False  # its parts can be had only by all ranks together
        return super().freeze(wait_s)

    def _saved(self, step: int) -> bool:
        committed = self.saver.committed if self.saver is not None else None
        return step == 0 or (committed is not None and committed.step >= step)

    def prepare(self) -> None:
        """Get memory for copies. Names and sizes are those of a plain model; others get theirs at the first save."""
        if self.rank != 0 or self.sharded or not self._unprepared:
            return
        self._unprepared = False
        models, optimizers = self.objects.models.values(), self.objects.optimizers.values()
        weights = [value for model in models for value in model.parameters()]
        states = [
            value
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        sizes = {}
        for path, tensors in (("model.safetensors", weights), ("optimizer.pt", states)):
            sizes[path] = sum(value.nbytes + 1024 for value in tensors) + (1 << 20)
        self._arena.reserve(sizes, sizes if any(value.is_cuda for value in weights) else ())

    def files(self, *, live: bool, at_boundary: bool) -> Files:
        point = self._asked or self.point
        assert point is not None
        assert self.files_of is not None
        together = self._asked is not None or self.sharded
        inexact: list[str] = []
        tree = self._own_tree_at(point, inexact)
        taken: list[Any] | None = None

        def take() -> list[Any]:
            nonlocal taken
            if taken is None:
                taken = self._take(point, leads=True, together=together, live=live, inexact=inexact)
                self._size = total_bytes(taken)
            return taken

        def own() -> list[Any]:
            return [*more, *self._own_images(self.rank, tree)]

        more: list[Any] = []
        if self.rank != 0 and together:
            more = self._take(point, leads=False, together=True, live=live, inexact=inexact)
        if live and not self.over:
            calm()
        if self.rank == 0 and (at_boundary or not live):
            take()  # on the Trainer's own thread, where this is possible
        if not live:
            own_now = own()
            return Files(own=lambda: own_now, shared=lambda: taken or [], inexact=inexact)
        return Files(own=own, shared=take, of=lambda rank: self._part_of(rank, point.step), inexact=inexact)

    # ------------------------------------------------------------------ what the files are made of

    def _take(self, point: Point, *, leads: bool, together: bool, live: bool, inexact: list[str]) -> list[Any]:
        assert self.files_of is not None
        if self._event is not None:
            torch.cuda.set_device(self._trainer.args.device)
            self._event.synchronize()
        buffers = self._buffers_at(point.step, point.random is not None, inexact) if not self.sharded else {}
        moving = self._buffers.tensors if self._buffers is not None else []
        moved = {live.data_ptr(): buffers[id(live)] for live in moving if id(live) in buffers}
        images = self.files_of.take(
            point,
            moved=moved,
            leads=leads,
            together=together,
            full=point is not self._asked or self.over,
            arena=None if live else self._arena,
        )
        if leads:
            images.append(BytesImage(RUN_FILE, json.dumps(self._run_tree_at(point), indent=1).encode()))
        return images

    def _run_tree_at(self, point: Point) -> dict[str, Any]:
        orders = {name: ddp.order for name, ddp in self.objects.gradient_orders.items()}
        return {
            "format": 1,
            "step": point.step,
            "epoch": point.epoch,
            "used": point.used,
            "passes": self.place[1],
            "epoch_over": point.epoch_over,
            "epoch_ended": point.epoch_ended,
            "pending": point.pending(),
            "max_steps": self._trainer.state.max_steps,
            "grad_norm": number(point.grad_norm),
            "learning_rate": number(point.learning_rate),
            "total_loss": point.total_loss,
            "last_logged": point.last_logged,
            "initial_step": self.initial_step,
            "seconds": self.seconds_before + time.monotonic() - self.began,
            "origin": self.origin,
            "gradient_orders": orders,
        }

    def _own_tree_at(self, point: Point, inexact: list[str]) -> dict[str, Any]:
        if getattr(self._trainer, "_buffered_inputs", None) is not None:
            inexact.append("what the model generated for the steps ahead is generated anew")
        random = point.random
        if random is None:
            record = _record_of(self.box.records(), point.step)
            random = record.random if record is not None else rng.capture()
        positions = {}
        if point.feed is not None and point.mark is not None:
            positions["train"] = point.feed.position(point.mark)
        return {
            "random": random,
            "positions": positions,
            "loss": number(point.loss),
            "flos": float(point.flos),
            "metrics": point.metrics,
        }

    def _own_images(self, rank: int, tree: dict[str, Any]) -> list[Any]:
        name = "rng_state.pth" if self.world == 1 else f"rng_state_{rank}.pth"
        return [archive(name, self._rng_states(tree["random"])), tree_image(rank_file(rank), tree)]

    def _rng_states(self, random: dict[str, Any]) -> dict[str, Any]:
        """The random state as the Trainer writes it."""
        import numpy

        python, legacy = random["python"], random.get("numpy")
        states: dict[str, Any] = {
            "python": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
            "numpy": numpy.random.get_state(),
            "cpu": random["torch"],
        }
        if legacy is not None:
            key = legacy["key"].numpy().astype("uint32")
            states["numpy"] = ("MT19937", key, legacy["pos"], legacy["has_gauss"], legacy["gauss"])
        if torch.cuda.is_available():
            own = random.get("cuda", torch.cuda.get_rng_state())
            states["cuda"] = own
            if self._trainer.args.parallel_mode.value == "distributed":
                every = torch.cuda.random.get_rng_state_all()
                every[torch.cuda.current_device()] = own
                states["cuda"] = every
        return states

    def _part_of(self, rank: int, step: int) -> list[Any] | None:
        tree = self._tree_of(rank, step) if self.box.path is not None else None
        if tree is None:
            return None
        path = self._box_of(rank)
        position = tree["positions"].get("train")
        if position is not None:
            position["fetch_random"] = fetch_of(path, tree["passes"], position["delivered"])
        loss, flos = losses_of(f"{path}.loss", step)
        point = self.point
        tree.update(loss=loss, flos=flos, metrics=point.metrics if point is not None else None)
        return self._own_images(rank, tree)

    def remove_traces(self) -> None:
        self._losses.remove()
        if self.fetches is not None:
            self.fetches.remove()
        super().remove_traces()


def _copied_metrics(trainer: Any) -> dict[str, Any]:
    """What TRL's trainers gather between two logs."""
    gathered = {str(key): list(values) for key, values in trainer._metrics.get("train", {}).items()}
    return {"train": gathered, "tokens": getattr(trainer, "_total_train_tokens", None)}


def read_run(folder: str) -> dict[str, Any] | None:
    """What holdfast saved beside the Trainer's files; None: the checkpoint is the Trainer's alone."""
    try:
        with open(os.path.join(folder, RUN_FILE), encoding="utf-8") as file:
            tree: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    missing = set(FLAGS) - set(tree.get("pending", ()))
    if tree.get("format") != 1 or missing:
        raise ValueError(f"{RUN_FILE} has format {tree.get('format')!r}, which this version of holdfast does not read")
    return tree
