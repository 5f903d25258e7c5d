"""What a Trainer is watched doing: its steps, its data, and what is pending when it goes on.

The methods of :class:`Watch` up to ``get_output_dir`` take a function of the patch table and return what stands in for
it while this Trainer trains. Each replacement calls the Trainer's own, so that subclasses keep theirs. A callback of
ours is added too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers.trainer_callback import TrainerCallback

from holdfast.adapters.transformers.attempt import Attempt
from holdfast.adapters.transformers.feed import AHEAD, Feed, Feeder, FetchLog, iterate, shield_workers
from holdfast.adapters.transformers.patches import (
    CHECKPOINTING,
    DATA,
    LOAD_RNG_STATE,
    SHARDS,
    TORCH,
    TRAINING,
    TRANSFORMERS,
)
from holdfast.adapters.transformers.retention import finished_at
from holdfast.adapters.transformers.shards import Readers
from holdfast.torch import rng
from holdfast.torch.data.batches import Batches

log = logging.getLogger("holdfast")

_Function = Callable[..., Any]


class FinishedBefore(Exception):
    """There is nothing left to train."""


class Watch:
    """Tells the loop of one attempt where its Trainer is."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.trainer = attempt.trainer
        self.loop = attempt.loop
        self.start = attempt.start
        self._over = False
        self._originals: dict[str, Any] = {}
        """By target, the Trainer's own methods."""
        self._feeder: Feeder | None = None
        self._random: dict[str, Any] | None = None
        self._known_feed: Feed | None = None
        self._ended_epoch = -1
        self._started = 0.0
        self._begun = self._trained = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the block runs, the Trainer tells the loop where it is."""
        trainer = self.trainer
        callback = _Callback(self._attempt, self)
        trainer.callback_handler.callbacks.append(callback)
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave, callback)
            applied = stack.enter_context(TRANSFORMERS.applied(TRAINING, self, to=trainer))
            self._originals = applied.originals
            if self._attempt.host.saver is not None:
                stack.enter_context(TRANSFORMERS.applied(CHECKPOINTING, self, to=trainer))
            for table in (TRANSFORMERS, TORCH):
                stack.enter_context(table.applied(DATA, self))
            if self._attempt.sharded:
                importlib.import_module("torch.distributed.checkpoint")
                stack.enter_context(TORCH.applied(SHARDS, Readers))
            yield

    def _leave(self, callback: TrainerCallback) -> None:
        self._over = True
        with contextlib.suppress(ValueError):
            self.trainer.callback_handler.callbacks.remove(callback)

    # ------------------------------------------------------------------ the start

    def init_training_state(self, original: _Function) -> _Function:
        def init_training_state(max_steps: int, *rest: Any) -> Any:
            trainer, start = self.trainer, self.start
            if self._begun:
                self._attempt.begin_again()
            self._begun = True
            best = self._attempt.keeper.best_of(start)
            result = original(max_steps, *rest)
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

        return init_training_state

    def _is_finished(self, max_steps: int) -> bool:
        checkpoint = self.start.checkpoint
        end = finished_at(checkpoint.manifest) if checkpoint is not None else None
        if checkpoint is not None and end is not None and max_steps > end and self._attempt.host.rank == 0:
            log.warning("resuming from %s, step %d, where the run ended before", checkpoint.location, checkpoint.step)
        return end is not None and max_steps <= end

    def prepare_for_training(self, original: _Function) -> _Function:
        def prepare_for_training(max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
            prepared = original(max_steps, train_dataloader, resume_from_checkpoint)
            self._prepared(max_steps, *prepared)
            return prepared

        return prepare_for_training

    def _prepared(self, max_steps: int, model: Any, loader: Any) -> None:
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

    def load_rng_state(self, original: _Function) -> _Function:
        """The random state is put back before what is pending of the last step, and by the feed.

        A loader that skips by itself draws numbers while it does so: those do not count.
        """

        def load_rng_state(checkpoint: Any) -> None:
            if self._feeder is None and self._random is not None:
                rng.restore(self._random)

        return load_rng_state

    # ------------------------------------------------------------------ the data

    def skip_first_batches(self, original: _Function) -> _Function:
        """The Trainer wants to skip what it was trained on. The feed begins behind it."""

        def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
            if self._feeder is None or not self._is_fed(loader):
                return shield_workers(original(loader, num_batches))
            return loader

        return skip_first_batches

    def get_eval_dataloader(self, original: _Function) -> _Function:
        return lambda *args, **kwargs: shield_workers(original(*args, **kwargs))

    get_test_dataloader = get_eval_dataloader

    def iterate(self, original: _Function) -> _Function:
        return iterate(original)

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

    # Those that are called at each step check by themselves that the training run is not over.

    def get_batch_samples(self, original: _Function) -> _Function:
        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            if self._over:
                return original(*args, **kwargs)
            loop = self.loop
            loop.leave_boundary()
            result = original(*args, **kwargs)
            loop.used += len(result[0])
            if loop.feed is not self._known_feed:
                self._known_feed = loop.feed
                loop.on_first_batch("train")
            if not self._trained:
                self._trained = True
                self._attempt.host.tell_training(loop.step)
            return result

        return get_batch_samples

    # ------------------------------------------------------------------ the steps

    def run_epoch(self, original: _Function) -> _Function:
        def run_epoch(*args: Any, **kwargs: Any) -> Any:
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
                return original(*args, **kwargs)
            finally:
                self.trainer.args.ignore_data_skip = ignored

        return run_epoch

    def compute_loss(self, original: _Function) -> _Function:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not self._over:
                self.loop.after_loss()
            return result

        return compute_loss

    def get_grad_norm(self, original: _Function) -> _Function:
        def get_grad_norm(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not self._over:
                self.loop.grad_norm = result
                self.loop.gradients_there()
            return result

        return get_grad_norm

    def get_learning_rate(self, original: _Function) -> _Function:
        def get_learning_rate() -> Any:
            result = self.loop.learning_rate = original()
            return result

        return get_learning_rate

    def evaluate(self, original: _Function) -> _Function:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("skip_scheduler") and self.start.path is not None:
                return {}  # eval_on_start: the run has started before
            return original(*args, **kwargs)

        return evaluate

    # ------------------------------------------------------------------ saving, and the end

    def finalize_training(self, original: _Function) -> _Function:
        return functools.partial(self._attempt.finalize_training, original)

    def save_checkpoint(self, original: _Function) -> _Function:
        return self._attempt.save_checkpoint

    def get_output_dir(self, original: _Function) -> _Function:
        return lambda trial=None: self._attempt.keeper.run_dir

    # ------------------------------------------------------------------ what is pending

    def on_train_begin(self) -> None:
        """The Trainer has made its counters anew: take them up where they were, and do what is pending."""
        loop, run, mine = self.loop, self.start.run, self.start.mine
        self._started = time.time()
        loop.began = time.monotonic()
        if self.start.path is None:
            loop.initial_step = 0
        elif not self.start.exact:
            self._originals[LOAD_RNG_STATE](self.start.path)
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

        trainer.model_wrapped.train()  # as the step has left it: TRL's logs are of training or evaluation by this
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
