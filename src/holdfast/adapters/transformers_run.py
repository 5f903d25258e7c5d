"""One call of ``Trainer.train`` under holdfast's care: where it starts, what is watched, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers import trainer as trainer_module
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import TrainOutput

from holdfast.adapters import rng
from holdfast.adapters.blackbox import BlackBox
from holdfast.adapters.data import Batches
from holdfast.adapters.host import Host
from holdfast.adapters.place import torch_place
from holdfast.adapters.transformers_feed import AHEAD, Feed, Feeder, FetchLog, calm, shield_workers
from holdfast.adapters.transformers_keep import Keeper, finished_at, output_of
from holdfast.adapters.transformers_loop import TrainerLoop
from holdfast.adapters.transformers_progress import look
from holdfast.adapters.transformers_resume import Start, choose, download_folder
from holdfast.adapters.transformers_save import TrainerFiles
from holdfast.config import Settings
from holdfast.engine import Engine
from holdfast.errors import Preempted
from holdfast.store.manifest import Manifest, checkpoint_name

log = logging.getLogger("holdfast")

_calls: dict[str, int] = {}
"""How often this process has trained in a location."""


class _FinishedBefore(Exception):
    """There is nothing left to train."""


class Attempt:
    """Looks after one call of ``train``."""

    def __init__(self, trainer: Any, resume_from_checkpoint: Any, trial: Any, ignore_keys: Any) -> None:
        self.trainer = trainer
        self.trial = trial
        self.ignore_keys = ignore_keys
        self.settings = _settings(trainer)
        self.explicit = resume_from_checkpoint if isinstance(resume_from_checkpoint, str | os.PathLike) else None
        self.sharded = bool(trainer.is_fsdp_enabled)
        self.host = Host(self.settings, torch_place())
        self.start = Start()
        self.feeder: Feeder | None = None
        self.loop: TrainerLoop
        self.keeper: Keeper
        self._original: dict[str, Any] = {}
        self._started = 0.0
        self._random: dict[str, Any] | None = None
        self._known_feed: Feed | None = None
        self._trained = False
        self._crashed = False

    @property
    def engine(self) -> Engine:
        return self.host.engine

    def run(self, train: Callable[[str | None], Any]) -> Any:
        """Train, from wherever that goes on."""
        trainer, host = self.trainer, self.host
        world = host.session.world
        try:
            explicit = None if self.explicit is None else os.fspath(self.explicit)
            self.start = choose(host, explicit, world)
            self.loop = self._make_loop(explicit)
            self.loop.engine = host.start(
                self.loop, functools.partial(look, trainer, self.loop, host), replicated=not self.sharded
            )
            self.loop.saver = host.saver
            self._settle_saver()
            if host.rank == 0:
                log.warning("[Kubeflow] JIT checkpoint signal handler registered for SIGTERM")
                log.warning("[Kubeflow] JIT checkpointing enabled")
            with self._watching():
                return self._run(train)
        finally:
            self._close()

    def _run(self, train: Callable[[str | None], Any]) -> Any:
        try:
            return train(self.start.path)
        except Preempted:
            raise
        except _FinishedBefore:
            return self._output_again()
        except BaseException as error:
            self._crashed = True
            notice, handler = self.engine.notice, calm()
            self.engine.crashed(error)
            if handler is not None:
                signal.signal(signal.SIGCHLD, handler)
            if notice is not None and self.host.saved_all(self.loop.step) and isinstance(error, Exception):
                # A loader worker that died of the same signal, say: the run was told to leave, and is saved.
                raise Preempted(self.settings.exit_code, self.loop.step, notice) from error
            raise

    # ------------------------------------------------------------------ before

    def _make_loop(self, explicit: str | None) -> TrainerLoop:
        host, settings = self.host, self.settings
        box = BlackBox(host.box_path(), host.rank)
        world = host.session.world
        loop = TrainerLoop(self.trainer, box, host.rank, world, rescue=settings.rescue, sharded=self.sharded)
        scratch = os.path.join(host.session.home, "scratch") if self.sharded else None
        if scratch is not None:
            if host.rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
            os.makedirs(scratch, exist_ok=True)
        loop.files_of = TrainerFiles(self.trainer, scratch)
        start, run = self.start, self.start.run
        if start.checkpoint is not None:
            loop.step = start.checkpoint.step
        elif start.foreign_step is not None:
            loop.step = start.foreign_step
        loop.origin = os.path.abspath(explicit) if explicit is not None else None
        if run is not None:
            loop.initial_step = run["initial_step"]
            loop.seconds_before = run["seconds"]
            loop.place = (run["epoch"], run["passes"], {})
            loop.origin = loop.origin or run["origin"]
        elif start.path is not None:
            loop.initial_step = loop.step
        return loop

    def _settle_saver(self) -> None:
        saver = self.host.saver
        self.keeper = Keeper(self.trainer, self.settings, saver, self.host.session)
        if saver is None:
            return
        saver.retire = self.keeper.retire
        if self.start.foreign_step is not None and saver.committed is None:
            # Where the run begins is saved, if not by us: a stop before the first step has nothing to write.
            saver.committed = Manifest(
                step=self.start.foreign_step,
                reason="periodic",
                world_size=self.host.session.world,
                files=(),
                created="",
                run=self.host.session.run,
                attempt=0,
            )

    # ------------------------------------------------------------------ what is watched

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """While the block runs, the Trainer tells the loop where it is. Methods are set on this one Trainer."""
        trainer = self.trainer
        callback = _Callback(self)
        trainer.callback_handler.callbacks.append(callback)
        methods = {
            "_init_training_state": self._init_training_state,
            "_prepare_for_training": self._prepare_for_training,
            "_load_rng_state": self._load_rng_state,
            "_run_epoch": self._run_epoch,
            "get_batch_samples": self._get_batch_samples,
            "compute_loss": self._compute_loss,
            "_get_grad_norm": self._get_grad_norm,
            "_get_learning_rate": self._get_learning_rate,
            "_evaluate": self._evaluate,
            "get_eval_dataloader": self._get_eval_dataloader,
            "get_test_dataloader": self._get_test_dataloader,
            "_finalize_training": self._finalize_training,
        }
        if self.host.saver is not None:
            methods |= {"_save_checkpoint": self._save_checkpoint, "_get_output_dir": self._get_output_dir}
        before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
        self._original = {name: getattr(trainer, name) for name in methods if hasattr(trainer, name)}
        vars(trainer).update({name: method for name, method in methods.items() if name in self._original})
        skip = trainer_module.skip_first_batches
        trainer_module.skip_first_batches = functools.partial(self._skip_first_batches, skip)
        try:
            yield
        finally:
            trainer_module.skip_first_batches = skip
            for name in methods:
                vars(trainer).pop(name, None)
            vars(trainer).update(before)
            with contextlib.suppress(ValueError):
                trainer.callback_handler.callbacks.remove(callback)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *rest: Any
    ) -> Any:
        trainer, start = self.trainer, self.start
        best = self.keeper.best_of(start)
        result = self._original["_init_training_state"](
            max_steps, num_update_steps_per_epoch, num_train_epochs, *rest
        )
        if best is not None:
            trainer.state.best_model_checkpoint = best
        self.loop.used = 0
        if self._is_finished(max_steps) and not self.sharded:
            raise _FinishedBefore
        if not start.exact:
            return result
        assert start.run is not None
        if start.run["epoch_over"] or start.run["epoch_ended"]:
            return start.run["epoch"] + 1, 0
        return start.run["epoch"], start.run["used"]

    def _is_finished(self, max_steps: int) -> bool:
        checkpoint = self.start.checkpoint
        end = finished_at(checkpoint.manifest) if checkpoint is not None else None
        return end is not None and max_steps <= end

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = self._original["_prepare_for_training"](max_steps, train_dataloader, resume_from_checkpoint)
        model, loader = prepared
        loop, start = self.loop, self.start
        if self._is_finished(max_steps):
            raise _FinishedBefore
        loop.attach(model, self.trainer.optimizer)
        orders = start.run["gradient_orders"] if start.run is not None else {}
        for name, ddp in loop.objects.gradient_orders.items():
            if name in orders:
                ddp.repeat(orders[name])
            else:
                ddp.watch()
        if self.feeder is None and Feeder.fits(loader):
            self.feeder = Feeder(loader, self._open_feed)
            if self.feeder.in_process and loop.fetches is None:
                count = self.trainer.args.gradient_accumulation_steps + AHEAD
                loop.fetches = FetchLog(loop.box.path if self.settings.rescue else None, loop.rank, count)
        elif self.feeder is None:
            shield_workers(loader)
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.sort(key=lambda callback: isinstance(callback, _Callback))  # ours sees what all others decided
        return prepared

    # ------------------------------------------------------------------ the data

    def _skip_first_batches(self, skip: Any, loader: Any, num_batches: int = 0) -> Any:
        """The Trainer wants to skip what it was trained on. The feed begins behind it."""
        if self.feeder is None or not self._is_fed(loader):
            return shield_workers(skip(loader, num_batches))
        return loader

    def _get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return shield_workers(self._original["get_eval_dataloader"](*args, **kwargs))

    def _get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return shield_workers(self._original["get_test_dataloader"](*args, **kwargs))

    def _is_fed(self, loader: Any) -> bool:
        assert self.feeder is not None
        return getattr(loader, "base_dataloader", loader).dataset is self.feeder.plain.dataset

    def _open_feed(self, feeder: Feeder) -> Feed:
        loop = self.loop
        used = loop.used
        position, before = None, None
        after = rng.capture()
        if used:
            saved = self.start.mine["positions"].get("train") if self.start.mine is not None else None
            position = dict(saved or feeder.after(used))
            before = position.pop("fetch_random")
        feed = Feed(
            Batches(feeder.plain, position),
            loop.place[1] + 1,
            loop.fetches,
            self.trainer.args.gradient_accumulation_steps + AHEAD,
        )
        if used:
            feed.prime(before, after)
        loop.open_feed(feed)
        return feed

    def _get_batch_samples(self, epoch_iterator: Any, num_batches: int, *rest: Any, **more: Any) -> Any:
        loop = self.loop
        loop.leave_boundary()
        result = self._original["get_batch_samples"](epoch_iterator, num_batches, *rest, **more)
        loop.used += len(result[0])
        if loop.feed is not self._known_feed:
            self._known_feed = loop.feed
            loop.on_first_batch("train")
        if not self._trained:
            self._trained = True
            self.host.tell_training(loop.step)
        return result

    def _load_rng_state(self, checkpoint: Any) -> None:
        """The random state is put back before what is pending of the last step, and by the feed.

        A loader that skips by itself draws numbers while it does so: those do not count.
        """
        if self.feeder is None and self._random is not None:
            rng.restore(self._random)

    # ------------------------------------------------------------------ the steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        loop = self.loop
        if self.trainer.control.should_training_stop:
            return None  # what was pending of the step that this attempt began with has ended the run
        begins = kwargs["epoch"] == kwargs["epochs_trained"] and self.start.path is not None
        loop.used = kwargs["steps_trained_in_current_epoch"] if begins else 0
        loop.epoch_ends = False
        loop.batches_in_epoch = kwargs["steps_in_epoch"]
        loop.place = (kwargs["epoch"], *loop.place[1:])
        ignored = self.trainer.args.ignore_data_skip
        if loop.used and self.feeder is not None:
            # Skipping costs nothing here, so that there is no reason to leave it out.
            self.trainer.args.ignore_data_skip = False
        try:
            return self._original["_run_epoch"](*args, **kwargs)
        finally:
            self.trainer.args.ignore_data_skip = ignored

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = self._original["compute_loss"](*args, **kwargs)
        self.loop.after_loss()
        return result

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        result = self.loop.grad_norm = self._original["_get_grad_norm"](*args, **kwargs)
        self.loop.gradients_there()
        return result

    def _get_learning_rate(self) -> Any:
        result = self.loop.learning_rate = self._original["_get_learning_rate"]()
        return result

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("skip_scheduler") and self.start.path is not None:
            return {}  # eval_on_start: the run has started before
        return self._original["_evaluate"](*args, **kwargs)

    def on_train_begin(self) -> None:
        """The Trainer has made its counters anew: take them up where they were, and do what is pending."""
        loop, run, mine = self.loop, self.start.run, self.start.mine
        self._started = time.time()
        loop.began = time.monotonic()
        if self.start.path is None:
            loop.initial_step = 0
        elif not self.start.exact:
            self._original["_load_rng_state"](self.start.path)
        if run is not None:
            self._take_up(run, mine)
        self._random = rng.capture()

    def _take_up(self, run: dict[str, Any], mine: dict[str, Any] | None) -> None:
        trainer = self.trainer
        trainer._total_loss_scalar = run["total_loss"]
        trainer._globalstep_last_logged = run["last_logged"]
        if mine is not None:
            if mine["loss"] is not None:
                trainer._tr_loss += mine["loss"]
            trainer.current_flos = mine["flos"]
            self._take_up_metrics(mine["metrics"])
            rng.restore(mine["random"])
        self._do_pending(run)

    def _take_up_metrics(self, metrics: dict[str, Any] | None) -> None:
        """What TRL's trainers gather between two logs."""
        trainer = self.trainer
        if metrics is not None and isinstance(getattr(trainer, "_metrics", None), dict):
            for key, values in metrics["train"].items():
                trainer._metrics["train"][key] = list(values)
            if metrics["tokens"] is not None:
                trainer._total_train_tokens = metrics["tokens"]

    def _do_pending(self, run: dict[str, Any]) -> None:
        """What an uninterrupted run did between the step that was saved and the next."""
        trainer, loop = self.trainer, self.loop
        control = trainer.control
        for name, value in run["pending"].items():
            setattr(control, name, value)
        if run["step"] >= run["max_steps"] and trainer.state.max_steps > run["step"]:
            control.should_training_stop = False  # it was to end there then, and goes on now
        loop.grad_norm, loop.learning_rate = run["grad_norm"], run["learning_rate"]
        loop.place = (run["epoch"], *loop.place[1:])

        def rest() -> None:
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss,
                loop.grad_norm,
                trainer.model_wrapped,
                self.trial,
                run["epoch"],
                self.ignore_keys,
                self._started,
                learning_rate=loop.learning_rate,
            )

        rest()
        control = trainer.control
        over = run["epoch_over"] or control.should_epoch_stop or control.should_training_stop
        if over and not run["epoch_ended"]:
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, control)
            rest()

    # ------------------------------------------------------------------ saving

    def _get_output_dir(self, trial: Any = None) -> str:
        return self.keeper.run_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The Trainer saves. It waits for a copy; the write happens behind its back."""
        trainer, loop, saver = self.trainer, self.loop, self.host.saver
        assert saver is not None
        loop.leave_boundary()
        trainer.store_flos()
        self.keeper.note_best()
        if saver.committed is None or saver.committed.step != loop.step:
            loop.save_now(loop.now())
        if self._somebody_reads():
            self.engine.wait_for_writer()
        if trainer.args.push_to_hub:
            self.keeper.push(checkpoint_name(loop.step))

    def _somebody_reads(self) -> bool:
        """Whether a callback, or the hub, wants the files of a checkpoint as soon as it is saved."""
        callbacks = self.trainer.callback_handler.callbacks
        return bool(self.trainer.args.push_to_hub) or any(
            type(callback).on_save is not TrainerCallback.on_save for callback in callbacks
        )

    # ------------------------------------------------------------------ the end

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        trainer, loop = self.trainer, self.loop
        loop.leave_boundary()
        trainer.store_flos()
        loop.finish()
        self.engine.close()  # from here on a signal acts as it would without holdfast
        trainer._initial_global_step = loop.initial_step
        limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        try:
            with self.keeper.best_at_hand():
                output = self._original["_finalize_training"](
                    trial, num_train_samples, start_time - loop.seconds_before
                )
        finally:
            trainer.args.save_total_limit = limit
        self.keeper.finished(output)
        return output

    def _output_again(self) -> Any:
        """What ``train`` returned when the run was finished, and its model."""
        trainer, checkpoint = self.trainer, self.start.checkpoint
        assert checkpoint is not None
        finished = output_of(checkpoint.manifest)
        state = trainer.state
        best = finished.get("best_model_checkpoint")
        if best is not None:
            state.best_model_checkpoint = best
        if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            with self.keeper.best_at_hand():
                trainer._load_best_model()
        trainer.is_in_train = False
        metrics = finished.get("metrics", {})
        step = finished.get("global_step", checkpoint.step)
        self.engine.finish(checkpoint.step)
        if self.host.rank == 0:
            log.warning("this run is complete at step %d; HOLDFAST_RESUME=never starts it anew", step)
        if metrics:
            state.global_step = step
            logged = {"total_flos": state.total_flos, **metrics, "epoch": state.epoch, "step": step}
            state.log_history.append(logged)
        return TrainOutput(step, finished.get("training_loss", 0.0), metrics)

    def _close(self) -> None:
        loop = getattr(self, "loop", None)
        if loop is not None:
            for feed in loop.place[2].values():
                feed.close()
        self.host.close()
        if loop is not None and self.host.saved_all(loop.step) and not self._crashed:
            loop.remove_traces()  # else a peer that came one step further may need them
        if self.host.rank == 0:
            shutil.rmtree(download_folder(self.host.session.token), ignore_errors=True)


def _settings(trainer: Any) -> Settings:
    settings = Settings.load()
    location = settings.dir or trainer.args.output_dir
    count = _calls[location] = _calls.get(location, 0) + 1
    if count > 1:
        # A second training in the same place is another run: it must not take the first one's end for its own.
        location = f"{location.rstrip('/')}/train-{count}"
    return settings.replace(dir=location, enabled=True)


class _Callback(TrainerCallback):  # type: ignore[misc]
    """What the Trainer tells of its steps."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._attempt.on_train_begin()
        return self._attempt.trainer.control

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.loop.before_optimizer()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        attempt = self._attempt
        attempt.loop.step_done(control)
        every = attempt.settings.progress_every
        if every and state.global_step % every == 0:
            attempt.host.poke()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.loop.look_in()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loop = self._attempt.loop
        loop.end_epoch(loop.place[0] + 1)
