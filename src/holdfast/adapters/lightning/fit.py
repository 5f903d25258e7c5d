"""One fit of a Lightning Trainer: from the checkpoint it goes on from to its end."""

from __future__ import annotations

import io
import logging
import math
import mmap
import os
from typing import Any

import torch

from holdfast.adapters.lightning.data import Pass
from holdfast.adapters.lightning.file import put_hyper_parameters, read_checkpoint
from holdfast.adapters.lightning.logs import Logs
from holdfast.adapters.lightning.loop import RUN, Steps
from holdfast.adapters.lightning.state import put_averages, put_logged, put_metric_states
from holdfast.base.run_directory import default_location, home_of
from holdfast.config import Settings
from holdfast.errors import HoldfastError, Preempted, StateError, StoreError
from holdfast.progress import Progress
from holdfast.recorder.blackbox import BlackBox
from holdfast.runtime.host import Host
from holdfast.runtime.unfinished import Command, location_of_run
from holdfast.store import open_backend
from holdfast.store.checkpoints import Checkpoint, whole
from holdfast.store.pickled import LIGHTNING
from holdfast.store.pipeline import read_checked
from holdfast.torch import rng
from holdfast.torch.ranks import torch_place
from holdfast.torch.state import Objects, rank_file, read_tree

log = logging.getLogger("holdfast")

_SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy", "RayDDPStrategy")
_fits: dict[str, int] = {}


def why_not(trainer: Any) -> str | None:
    """Why holdfast keeps out of a fit, or None."""
    strategy = type(trainer.strategy).__name__
    if strategy not in _SUPPORTED:
        return f"the strategy {strategy} is not supported, only {', '.join(_SUPPORTED)}"
    return None


def root_of(settings: Settings, trainer: Any) -> str:
    """Where the checkpoints of a script's fits go."""
    root = str(trainer.default_root_dir)
    given = "://" in root or os.path.abspath(root) != os.getcwd()
    return settings.dir or (f"{root.rstrip('/')}/holdfast" if given else default_location())


def location_of(root: str, number: int) -> str:
    """Each further fit of a process has a place of its own."""
    if number == 1:
        return root
    path, query, options = root.partition("?")
    return f"{path.rstrip('/')}/fit-{number}{query}{options}"


def redirect(trainer: Any, named: str, taken: str) -> None:
    """Let the trainer, its loggers and its ModelCheckpoints write below ``taken`` where they would below ``named``."""
    named, taken = (os.path.dirname(os.path.abspath(path)) for path in (named, taken))
    for thing in (trainer, *trainer.loggers, *trainer.callbacks):
        for attribute in ("_default_root_dir", "_root_dir", "_save_dir", "dirpath"):
            path = vars(thing).get(attribute)
            if isinstance(path, str | os.PathLike) and "://" not in str(path):
                absolute = os.path.abspath(path)
                if absolute == named or absolute.startswith(named + os.sep):
                    moved = taken + absolute[len(named) :]
                    setattr(thing, attribute, moved if os.path.isabs(path) else os.path.relpath(moved))


def _told(trainer: Any) -> dict[str, Any]:
    """What tells one fit of a script from another."""
    module = trainer.lightning_module
    names = ("max_epochs", "max_steps", "accumulate_grad_batches", "num_devices", "precision")
    told = {name: str(getattr(trainer, name, None)) for name in names}
    return {**told, "model": type(module).__name__, "hparams": dict(getattr(module, "hparams", {}))}


class _Memory(io.RawIOBase):
    """A file that lies in memory, without another copy of it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._memory))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._memory) - self._at)
        buffer[:count] = self._memory[self._at : self._at + count]
        self._at += count
        return count


class Fit:
    """What holdfast knows of the fit that is under way."""

    def __init__(self, trainer: Any, settings: Settings, modes: dict[str, Any]) -> None:
        """``modes``: Lightning's table of the ways to combine loaders."""
        self.trainer = trainer
        self._root = root_of(settings, trainer)
        number = _fits[self._root] = _fits.get(self._root, 0) + 1
        root, self._command = self._root, None
        if settings.dir is None:
            self._command = Command.of_this_process(_told(trainer))
            if trainer.is_global_zero:
                root = location_of_run(root, settings, self._command)
                if root != self._root:
                    redirect(trainer, self._root, root)
        self.settings = settings.replace(dir=location_of(root, number))
        self.logs = Logs(trainer)
        if self._has_saved():
            self.logs.continue_versions(home_of(location_of(root, number)))
        self.steps: Steps | None = None
        """Where training is, once it has begun."""
        self.loss: Any = None
        self.host: Host | None = None
        self._modes = modes
        self._run: dict[str, Any] | None = None
        self._mine: dict[str, Any] = {}
        self._resuming = False
        self._trusting = False
        """The script has said that checkpoints may run code: ``fit(weights_only=False)``."""
        self._first = True
        self._trains = False
        self._max_steps = -1

    # ------------------------------------------------------------------ the start

    def _has_saved(self) -> bool:
        """Whether an earlier attempt has left a checkpoint that this one resumes from."""
        settings = self.settings
        if not settings.checkpointing or settings.dir is None or settings.resume == "never":
            return False
        try:
            return any(settings.resumes_from(found.manifest.run) for found in whole([open_backend(settings.dir)]))
        except (HoldfastError, OSError):
            return False  # what is wrong with it is reported when it is opened for good

    def load(self, connector: Any, original: Any, path: Any, weights_only: bool | None) -> None:
        """In place of Lightning's own loading: from the newest whole checkpoint, if there is one."""
        self._place = torch_place()
        self.host = host = Host(self.settings, self._place, command=self._command)
        self._trusting = weights_only is False
        loaded: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        checkpoint = host.resume(lambda found: loaded.__setitem__(slice(None), [self._read(found)]))
        if path or checkpoint is None:
            original(connector, path, weights_only)
        if checkpoint is None:
            return
        theirs = connector._loaded_checkpoint.get("global_step", -1) if path else -1
        content, self._run, self._mine = loaded[0]
        if theirs > self._run["step"]:
            if host.rank == 0:
                log.warning("%s is at step %d, ahead of %s: going on from there", path, theirs, checkpoint.name)
            self._run, self._mine = None, {}
            return
        connector._ckpt_path = f"{checkpoint.location}/{LIGHTNING}"
        content["loops"]["fit_loop"] = self._run["loops"]
        put_hyper_parameters(content, self.trainer)
        connector._loaded_checkpoint = content

    def _read(self, checkpoint: Checkpoint) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Lightning's checkpoint, what belongs to the run beside it, and what belongs to this rank; all checked."""
        assert self.host is not None
        rank, world = self.host.rank, self.host.session.world
        entries = {entry.path: entry for entry in checkpoint.manifest.files}

        def content(path: str) -> memoryview:
            if path not in entries:
                raise StateError(
                    f"{checkpoint.location} holds no {path}, it is not of a Lightning fit: give another place with "
                    f"HOLDFAST_DIR"
                )
            memory = memoryview(mmap.mmap(-1, max(1, entries[path].size)))[: entries[path].size]
            read_checked(checkpoint.backend, checkpoint.name, entries[path], into=memory)
            return memory

        run = read_tree(bytearray(content(RUN)))
        loaded = read_checkpoint(_Memory(content(LIGHTNING)), checkpoint.location, trusting=self._trusting)
        saved = checkpoint.manifest.world_size
        if saved == world and rank_file(rank) in entries:
            return loaded, run, read_tree(bytearray(content(rank_file(rank))))
        if rank == 0:
            log.warning(
                "%s was saved by %d ranks and is loaded by %d: parameters are exact, random state and data position "
                "are carried over as closely as possible",
                checkpoint.name,
                saved,
                world,
            )
        first = read_tree(bytearray(content(rank_file(0)))) if rank_file(0) in entries else {}
        return loaded, run, _adapted(first, run, saved, rank, world)

    def begin(self) -> None:
        """The trainer is set up, and training is about to start."""
        assert self.host is not None
        trainer, host = self.trainer, self.host
        optimizers = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)}
        objects = Objects({"model": trainer.strategy.model, **optimizers}, host.rank, incremental=False)
        self.logs.begin(host.session.home)
        if self._run is not None:
            self.logs.rewind(self._run.get("logs", {}), self._run["step"])
        box = BlackBox(host.box_path(), host.rank)
        steps = Steps(
            trainer, objects, box, self._place, self.logs, rescue=self.settings.rescue, trusting=self._trusting
        )
        for text in steps.inexact if host.rank == 0 else ():
            log.warning("a resume of this fit may not be exact: %s", text)
        run = self._run
        if run is None:
            steps.step = trainer.global_step
            for ddp in objects.gradient_orders.values():
                ddp.watch()
        else:
            steps.step = run["step"]
            steps.place = (run["epoch"], run["passes"], {})
            for name, ddp in objects.gradient_orders.items():
                ddp.repeat(run["gradient_orders"].get(name, []))
            self._resuming = run["ended"] is None
        # The reporter asks at once, before this fit knows its steps.
        steps.engine = host.start(steps, lambda: self._progress(steps))
        steps.saver = host.saver
        steps.hook(backward=host.session.world > 1 and self.settings.rescue)
        self.steps = steps
        self._max_steps = trainer.max_steps
        if self._resuming and 0 < self._max_steps <= steps.step:
            # The last step is done, but not what follows it: let the loops come to that.
            trainer.fit_loop.epoch_loop.max_steps = steps.step + 1
        if run is not None and not self._resuming:
            self._put_values()
            self._put_random()

    @property
    def is_complete(self) -> bool:
        """Whether this fit was brought to its end before, under limits that are not lower than the present ones."""
        if self._run is None or self._run["ended"] is None:
            return False
        now = (self.trainer.max_epochs, self.trainer.max_steps)
        return not any(_more(one, other) for one, other in zip(now, self._run["ended"], strict=True))

    def tell_complete(self) -> None:
        assert self.steps is not None
        assert self.host is not None
        if self.host.rank == 0:
            log.warning("this run is complete at step %d; HOLDFAST_RESUME=never starts it anew", self.steps.step)

    # ------------------------------------------------------------------ training

    def open_pass(self, combined: Any) -> Any:
        """Lightning asks for an iterator over all loaders."""
        assert self.steps is not None
        steps = self.steps
        position = self._mine.get("data") if self._resuming else None
        fetcher = self.trainer.fit_loop._data_fetcher
        ahead = getattr(fetcher, "prefetch_batches", 0) > 0 and not _has_length(combined, self._modes)
        if steps.data is not None:
            steps.data.close(keep_persistent=True)
        try:
            data = Pass(combined, self._modes, ahead, position)
        except StateError as error:
            if not self._mine.get("adapted"):
                raise
            log.warning("the epoch begins again with its first batch: %s", error)
            data = Pass(combined, self._modes, ahead, None)
        steps.begin_pass(data)
        self._first = True
        return data.iterator

    def before_batch(self, epoch_loop: Any) -> bool:
        """The next batch is about to be fetched. False: not yet, as the last one is still to be ended."""
        steps = self.steps
        assert steps is not None
        if self._resuming:
            self._go_on(epoch_loop)
            return False
        if steps.pending:
            steps.pending = False
            steps.pause()
        return True

    def after_batch(self, epoch_loop: Any) -> None:
        """A batch is done."""
        steps = self.steps
        assert steps is not None
        if self._first:
            self._first = False
            steps.first_batch()
            self._tell_training()
        step = epoch_loop.global_step
        if step == steps.step:
            return  # gradients are being accumulated
        steps.reach(step, self.trainer.current_epoch + 1 if epoch_loop._num_ready_batches_reached() else None)
        every = self.settings.progress_every
        if every and self.host is not None and step % every == 0:
            self.host.poke()

    def _go_on(self, epoch_loop: Any) -> None:
        """Training is at the boundary again that was saved: what follows the batch comes next."""
        assert self.steps is not None
        assert self._run is not None
        assert self.host is not None
        trainer, run = self.trainer, self._run
        self._resuming = False
        fit_loop = trainer.fit_loop
        fit_loop.on_iteration_done()  # from here on everything is as if it had never stopped
        epoch_loop.val_loop.restarting = False
        self.steps.counters.put(run["loops"])
        epoch_loop.max_steps = self._max_steps
        fit_loop._last_train_dl_reload_epoch = run["reload_epoch"]
        trainer.should_stop = run["stop"]
        self._put_values()
        self._tell_training()
        self._first = False
        self.steps.first_batch()
        self._put_random()

    def _put_random(self) -> None:
        if self._mine.get("random") is not None:
            rng.restore(self._mine["random"])

    def _tell_training(self) -> None:
        if self.host is not None and self.steps is not None and not self._trains:
            self._trains = True
            self.host.tell_training(self.steps.step)

    def _put_values(self) -> None:
        trainer, mine = self.trainer, self._mine
        put_averages(trainer.fit_loop.epoch_loop._results, mine.get("averages", []), trainer.strategy)
        put_metric_states(trainer.lightning_module, mine.get("metrics", {}))
        assert self.steps is not None
        self.steps.attributes.put(mine.get("attributes", {}), trainer.strategy.root_device)
        if "logged" in mine:
            put_logged(trainer._logger_connector, mine["logged"], trainer.strategy.root_device)

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """The fit came to its end."""
        assert self.steps is not None
        assert self.host is not None
        self.steps.over = True
        self.steps.at_end = True
        self.steps.step = self.trainer.global_step
        try:
            self.host.engine.finish(self.steps.step)
        except Exception as error:  # what the script does with its model is worth more
            log.error("the end of the run could not be saved: %s", error, exc_info=not isinstance(error, StoreError))

    def crashed(self, error: BaseException) -> None:
        assert self.steps is not None
        assert self.host is not None
        self.steps.over = True
        if not isinstance(error, Preempted):
            self.host.engine.crashed(error)

    def close(self) -> None:
        if self.steps is None:
            _fits[self._root] -= 1  # it never trained: a search for a learning rate, or an error before
        else:
            self.steps.unhook()
            if self.steps.data is not None:
                self.steps.data.close()
        if self.host is not None:
            self.host.close()
            if self.steps is not None and self.host.saved_all(self.steps.step):
                self.steps.remove_traces()

    # ------------------------------------------------------------------ progress

    def _progress(self, steps: Steps) -> Progress:
        assert self.host is not None
        trainer, step = self.trainer, steps.step
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None
        values = {_plain(name): value for name, value in dict(trainer._logger_connector._callback_metrics).items()}
        epoch = min(trainer.current_epoch + 1, epochs) if epochs else trainer.current_epoch + 1
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return Progress(
            epoch=epoch,
            total_epochs=epochs,
            step=step,
            total_steps=step if steps.at_end else self._total_steps(epochs),
            loss=_number(self.loss) if self.loss is not None else _first_of(values, "train_loss", "loss"),
            accuracy=_first_of(values, "train_acc", "train_accuracy", "acc", "accuracy"),
            validation_loss=_first_of(values, "val_loss", "valid_loss", "validation_loss"),
            validation_accuracy=_first_of(values, "val_acc", "val_accuracy", "valid_acc", "validation_accuracy"),
            learning_rate=_number(rates[0]) if rates else None,
            resumed_from=self.host.resumed_from if self._run is not None else None,
            checkpointing=self.host.checkpointing(),
        )

    def _total_steps(self, epochs: int | None) -> int | None:
        limit = self.trainer.max_steps if self.trainer.max_steps > 0 else math.inf
        batches = self.trainer.fit_loop.max_batches
        by_epochs = math.inf
        if epochs is not None and batches not in (0, math.inf) and self.trainer.lightning_module.automatic_optimization:
            by_epochs = math.ceil(batches / self.trainer.accumulate_grad_batches) * epochs
        total = min(limit, by_epochs)
        return None if total == math.inf else int(total)


def _adapted(first: dict[str, Any], run: dict[str, Any], saved: int, rank: int, world: int) -> dict[str, Any]:
    """A rank's part where the number of ranks has changed: rank 0's position by samples, random numbers of its own.

    The counters of batches in ``run`` are changed with it.
    """
    data, random = first.get("data"), first.get("random")
    if data is not None:
        for position in data["loaders"].values():
            delivered = position["delivered"] * saved // world
            if "skip" in position:
                position["skip"] = max(0, position["skip"] + delivered - position["delivered"])
            position.update(delivered=delivered, total=None, workers=[])
        data["index"] = data["index"] * saved // world
    batches = run["loops"]["epoch_loop.batch_progress"]
    batches["current"] = {name: count * saved // world for name, count in batches["current"].items()}
    if rank and random is not None:
        random["torch"] = torch.Generator().manual_seed(run["step"] * 1_000_003 + rank).get_state()
    return {"random": random, "data": data, "adapted": True}


def _more(one: Any, other: Any) -> bool:
    """Whether a limit is higher than another; -1 and None: no limit."""
    unlimited = (None, -1)
    return other not in unlimited and (one in unlimited or one > other)


def _has_length(combined: Any, modes: dict[str, Any]) -> bool:
    try:
        len(modes[combined._mode]["iterator"](combined.flattened, combined._limits))
        return True
    except (TypeError, NotImplementedError, OverflowError, ValueError):
        return False


def _plain(name: str) -> str:
    name = name.lower().replace("/", "_").replace("-", "_")
    return name.removesuffix("_epoch").removesuffix("_step")


def _first_of(values: dict[str, Any], *names: str) -> float | None:
    return next((_number(values[name]) for name in names if name in values), None)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(value.detach() if hasattr(value, "detach") else value)
