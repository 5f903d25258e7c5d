"""What a Trainer is watched doing: its steps, its data, and what is pending when it goes on.

Methods are set on the one Trainer, for the time that it trains, and a callback is added. Each hands over to the
Trainer's own, so that subclasses keep theirs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import trainer as trainer_module
from transformers.trainer_callback import TrainerCallback

from holdfast.adapters.transformers.feed import AHEAD, Feed, Feeder, FetchLog, shield_workers
from holdfast.adapters.transformers.retention import finished_at
from holdfast.torch import rng
from holdfast.torch.data.batches import Batches

if TYPE_CHECKING:
    from holdfast.adapters.transformers.run import Attempt

log = logging.getLogger("holdfast")

NEEDED = (
    "_init_training_state",
    "_prepare_for_training",
    "_load_rng_state",
    "_run_epoch",
    "get_batch_samples",
    "_get_learning_rate",
    "_evaluate",
    "_maybe_log_save_evaluate",
    "_finalize_training",
    "_save_checkpoint",
)
"""Methods without which a Trainer cannot be watched: it is of another version."""


class FinishedBefore(Exception):
    """There is nothing left to train."""


class Watch:
    """Tells the loop of one attempt where its Trainer is."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.trainer = attempt.trainer
        self.loop = attempt.loop
        self.start = attempt.start
        self.original: dict[str, Any] = {}
        """The Trainer's own methods."""
        self._feeder: Feeder | None = None
        self._random: dict[str, Any] | None = None
        self._known_feed: Feed | None = None
        self._ended_epoch = -1
        self._started = 0.0
        self._begun = self._trained = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the block runs, the Trainer tells the loop where it is. Methods are set on this one Trainer."""
        trainer = self.trainer
        callback = _Callback(self._attempt, self)
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
            "_finalize_training": self._attempt.finalize_training,
        }
        if self._attempt.host.saver is not None:
            methods |= {
                "_save_checkpoint": self._attempt.save_checkpoint,
                "_get_output_dir": self._attempt.get_output_dir,
            }
        before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
        self.original = {name: getattr(trainer, name) for name in methods if hasattr(trainer, name)}
        vars(trainer).update({name: method for name, method in methods.items() if name in self.original})
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
        if self._begun:
            self._attempt.begin_again()
        self._begun = True
        best = self._attempt.keeper.best_of(start)
        result = self.original["_init_training_state"](max_steps, num_update_steps_per_epoch, num_train_epochs, *rest)
        if best is not None:
            trainer.state.best_model_checkpoint = best
        if self._is_finished(max_steps) and not self._attempt.sharded:
            raise FinishedBefore
        if not start.exact:
            return result
        assert start.run is not None
        if start.run["epoch_over"] or start.run["epoch_ended"]:
            return start.run["epoch"] + 1, 0
        return start.run["epoch"], start.run["used"]

    def _is_finished(self, max_steps: int) -> bool:
        checkpoint = self.start.checkpoint
        end = finished_at(checkpoint.manifest) if checkpoint is not None else None
        if checkpoint is not None and end is not None and max_steps > end and self._attempt.host.rank == 0:
            log.warning("resuming from %s, step %d, where the run ended before", checkpoint.location, checkpoint.step)
        return end is not None and max_steps <= end

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = self.original["_prepare_for_training"](max_steps, train_dataloader, resume_from_checkpoint)
        model, loader = prepared
        loop, start = self.loop, self.start
        if self._is_finished(max_steps):
            raise FinishedBefore
        loop.attach(model, self.trainer.optimizer)
        orders = start.run["gradient_orders"] if start.run is not None else {}
        for name, ddp in loop.objects.gradient_orders.items():
            if name in orders:
                ddp.repeat(orders[name])
            else:
                ddp.watch()
        self._feeder = None
        if Feeder.fits(loader):
            self._feeder = Feeder(loader, self._open_feed)
            if self._feeder.in_process and loop.fetches is None:
                count = self.trainer.args.gradient_accumulation_steps + AHEAD
                loop.fetches = FetchLog(loop.box.path if self._attempt.settings.rescue else None, loop.rank, count)
        else:
            shield_workers(loader)
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.sort(key=lambda callback: isinstance(callback, _Callback))  # ours sees what all others decided
        return prepared

    # ------------------------------------------------------------------ the data

    def _skip_first_batches(self, skip: Any, loader: Any, num_batches: int = 0) -> Any:
        """The Trainer wants to skip what it was trained on. The feed begins behind it."""
        if self._feeder is None or not self._is_fed(loader):
            return shield_workers(skip(loader, num_batches))
        return loader

    def _get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return shield_workers(self.original["get_eval_dataloader"](*args, **kwargs))

    def _get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return shield_workers(self.original["get_test_dataloader"](*args, **kwargs))

    def _is_fed(self, loader: Any) -> bool:
        assert self._feeder is not None
        return getattr(loader, "base_dataloader", loader).dataset is self._feeder.plain.dataset

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
        result = self.original["get_batch_samples"](epoch_iterator, num_batches, *rest, **more)
        loop.used += len(result[0])
        if loop.feed is not self._known_feed:
            self._known_feed = loop.feed
            loop.on_first_batch("train")
        if not self._trained:
            self._trained = True
            self._attempt.host.tell_training(loop.step)
        return result

    def _load_rng_state(self, checkpoint: Any) -> None:
        """The random state is put back before what is pending of the last step, and by the feed.

        A loader that skips by itself draws numbers while it does so: those do not count.
        """
        if self._feeder is None and self._random is not None:
            rng.restore(self._random)

    # ------------------------------------------------------------------ the steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        loop = self.loop
        if self.trainer.control.should_training_stop or kwargs["epoch"] == self._ended_epoch:
            return None  # what was pending of the step that this attempt began with has ended it
        begins = kwargs["epoch"] == kwargs["epochs_trained"] and self.start.path is not None
        loop.used = kwargs["steps_trained_in_current_epoch"] if begins else 0
        loop.epoch_ends = False
        loop.batches_in_epoch = kwargs["steps_in_epoch"]
        loop.place = (kwargs["epoch"], *loop.place[1:])
        ignored = self.trainer.args.ignore_data_skip
        if loop.used and self._feeder is not None:
            # Skipping costs nothing here, so that there is no reason to leave it out.
            self.trainer.args.ignore_data_skip = False
        try:
            return self.original["_run_epoch"](*args, **kwargs)
        finally:
            self.trainer.args.ignore_data_skip = ignored

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = self.original["compute_loss"](*args, **kwargs)
        self.loop.after_loss()
        return result

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        result = self.loop.grad_norm = self.original["_get_grad_norm"](*args, **kwargs)
        self.loop.gradients_there()
        return result

    def _get_learning_rate(self) -> Any:
        result = self.loop.learning_rate = self.original["_get_learning_rate"]()
        return result

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("skip_scheduler") and self.start.path is not None:
            return {}  # eval_on_start: the run has started before
        return self.original["_evaluate"](*args, **kwargs)

    def on_train_begin(self) -> None:
        """The Trainer has made its counters anew: take them up where they were, and do what is pending."""
        loop, run, mine = self.loop, self.start.run, self.start.mine
        self._started = time.time()
        loop.began = time.monotonic()
        if self.start.path is None:
            loop.initial_step = 0
        elif not self.start.exact:
            self.original["_load_rng_state"](self.start.path)
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
                self._attempt.trial,
                run["epoch"],
                self._attempt.ignore_keys,
                self._started,
                learning_rate=loop.learning_rate,
            )

        rest()
        control = trainer.control
        over = run["epoch_over"] or control.should_epoch_stop or control.should_training_stop
        if over and not run["epoch_ended"]:
            self._ended_epoch = run["epoch"]
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, control)
            rest()


class _Callback(TrainerCallback):  # type: ignore[misc]
    """What the Trainer tells of its steps."""

    def __init__(self, attempt: Attempt, watch: Watch) -> None:
        self._attempt = attempt
        self._watch = watch

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._watch.on_train_begin()
        return self._attempt.trainer.control

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.loop.before_optimizer()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        attempt = self._attempt
        attempt.loop.step_done(control)
        attempt.forget_download()
        every = attempt.settings.progress_every
        if every and state.global_step % every == 0:
            attempt.host.poke()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._attempt.settings.progress_every:
            self._attempt.host.poke()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.loop.look_in()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loop = self._attempt.loop
        loop.end_epoch(loop.place[0] + 1)
