"""What a followed loop does, as its hooks tell it: the passes, fetches and steps of the real loop and of its replay."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from _holdfast_startup import required
from holdfast.adapters.replay.files import Files
from holdfast.adapters.replay.loop import Followed, Pass
from holdfast.adapters.replay.objects import Registry
from holdfast.adapters.replay.passes import Watched
from holdfast.adapters.replay.resume import Replay
from holdfast.adapters.replay.trace import AFTER, BEFORE, Trace
from holdfast.errors import Preempted, StateError
from holdfast.runtime.environment import surroundings
from holdfast.runtime.host import Host
from holdfast.runtime.ownership import _claims, is_left_alone
from holdfast.runtime.protection import unprotected

log = logging.getLogger("holdfast")

_EARLY_STEPS = 3
"""In its first steps a loop is looked at more closely: what it has made, and which buffers move."""


class Events:
    """One loop, in one thread."""

    loop: Followed

    def __init__(self) -> None:
        self.replaying = False
        """While the loop is replayed up to the point that it was saved at: what it does now was done already."""
        self.host: Host | None = None
        """None until the first training act, when the other ranks are met and the checkpoint is found."""
        self.registry = Registry()
        self.trace = Trace()
        self._files = Files()
        self.busy = False
        """While a loader works for us: what it does inside is not the script's."""
        self.fetched = False
        """Whether a batch was fetched since the last step, but for evaluations."""
        self._process = os.getpid()
        self._thread = 0
        self._following = False
        self._over = False
        self._failure: StateError | None = None
        self._replay: Replay | None = None
        self._depth = 0
        """Steps that are under way: an optimizer may wrap another."""
        self._stepping: torch.optim.Optimizer | None = None
        """The outermost of them."""
        self._scaling = False
        self._scaled: torch.optim.Optimizer | None = None
        self._several = False
        self._unsettled = False
        """With several optimizers: one has stepped since the last point."""
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """The number of each optimizer that has stepped, in the order of their first steps."""
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        """Loaders that gave the last batch before a step,"""
        self._used: weakref.WeakSet[Any] = weakref.WeakSet()
        """and those that gave a batch for one, each beside others say."""
        self._evaluated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._looked = -1
        self._epochs_done: int | None = None
        """Told at the next boundary."""
        self._early = _EARLY_STEPS
        self._told = False
        self._claimed = False
        """Whether somebody else has been in charge: what comes after, an evaluation say, is not a loop of ours."""
        self._missed = 0
        """Steps that were not followed."""

    def first_act(self, *, training: bool = True) -> bool:
        """Something trains, or is about to. Returns whether there is nothing more to wait for."""
        raise NotImplementedError

    def close(self, *, end_passes: bool = True) -> None:
        raise NotImplementedError

    def _leave(self, leaving: Preempted) -> NoReturn:
        raise NotImplementedError

    def stand_back(self) -> None:
        """Somebody else is in charge of the training that is about to begin."""
        raise NotImplementedError

    def _is_ours(self) -> bool:
        if not self._claimed and is_left_alone(sys._getframe()):
            self.stand_back()
        return not self._claimed and os.getpid() == self._process

    def _acts(self) -> bool:
        """Whether what this thread does now is to be followed."""
        if not self._following or self._over or self.busy or get_ident() != self._thread or _claims:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    # ------------------------------------------------------------------ passes

    def iterate(self, loader: Any, real: Callable[[Any], Any]) -> Any:
        """``iter(loader)``."""
        if not self._following and not self._over:
            self.first_act()
        if not self._acts():
            return real(loader)
        self._depth = 0
        total = _length(loader)
        loop = self.loop
        if self._replay is not None:
            self._attend()
            if not self._arrives(BEFORE):
                number = len(self.trace.table)
                self._checked(self._replay.check_open, number, total)
                self.trace.open(total)
                self._checked(self._replay.check_ahead, self.trace)
                loop.prepare_pass(loader, number)
                watched = Watched(self, loader, number)
                loop.begin_pass(watched)
                return watched
        if self._unsettled:
            self._settle()
        if loop.pending:
            loop.note(BEFORE, rarely=True)
            self._attend()
        watched = Watched(self, loader, self.trace.open(total))
        loop.prepare_pass(loader, watched.number)
        watched.open()
        loop.begin_pass(watched)
        return watched

    def before_fetch(self, one: Pass) -> None:
        """A real fetch after a step, which is a point, or in an evaluation."""
        if get_ident() != self._thread:
            self._give_up("its batches are fetched by another thread than the one that trains")
            return
        self._depth = 0
        if self._unsettled:
            self._settle()
        loop = self.loop
        if self._evaluates(one):
            # The state stays as it is. The point is its beginning: what it has summed up so far may be out of sight.
            loop.resting = loop.behind = True
            self._attend()
            loop.behind = False
            return
        loop.pending = loop.resting = False  # a step is in flight from here on
        loop.note(BEFORE)
        if not self._told:
            self._tell_training()
        self._attend()

    def _evaluates(self, one: Pass) -> bool:
        if one.trains or one.loader in self._trained or one.loader in self._used:
            return False
        main = self.loop.main
        return (main is not None and not main.training) or (bool(self._trained) and one.loader in self._evaluated)

    def after_end(self, one: Pass) -> None:
        """A pass has come to its end."""
        self.trace.end(one.number)
        loop = self.loop
        loop.end_pass(one)
        if not one.trains:
            if one.loader not in self._used:
                self._evaluated.add(one.loader)
            return
        epoch, passes, _ = loop.place
        loop.place = (epoch + 1, passes, {})
        self._epochs_done = epoch + 1
        if not self._unsettled and not self.fetched:  # else gradients may be there that no step has used
            loop.pending = loop.resting = True
            loop.note(AFTER, rarely=True)
            self._attend()

    def replayed_fetch(self, one: Watched) -> Any:
        """The next batch of a replay; if the replay ends here, the next one is real."""
        if not self._acts():
            raise StateError("a loader is read by another thread than the one that trains: such a loop is not replayed")
        self._attend()
        replay, trace = self._replay, self.trace
        assert replay is not None
        if self._arrives(BEFORE):
            return None
        if not self._checked(replay.has_next, one):
            trace.end(one.number)
            self.loop.end_pass(one)
            self._checked(replay.check_ahead, trace)
            self._arrives(AFTER)
            raise StopIteration
        self.busy = True
        try:
            batch = replay.batch(one)
        finally:
            self.busy = False
        trace.fetch(one.number)
        self.loop.latest = one.reference
        self.fetched = one.fresh = True
        self._checked(replay.check_ahead, trace)
        return batch

    # ------------------------------------------------------------------ steps

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._following and not self._over:
            self.first_act()
        if not self._acts():
            if not self._following and not _claims:
                self._miss_step()
            if self._following and self._replay is None and get_ident() != self._thread and not _claims:
                self._give_up("its optimizer steps in another thread than the one that fetches its batches")
            return
        if optimizer is self._stepping:
            self._depth = 0  # its last step ended with an error, which the script has caught
        self._depth += 1
        if self._depth > 1 or self._scaling:
            return
        self._stepping = optimizer
        if self._replay is not None:
            self._replay.before_step(optimizer)
        else:
            self._begin_step()

    def _miss_step(self) -> None:
        """A step that is not followed: reported at the end, or refused before it is made."""
        if is_left_alone(sys._getframe()):
            return
        self._missed += 1
        if required():
            unprotected(f"an optimizer step cannot be followed, since {self._why_missed()}")

    def _why_missed(self) -> str:
        if self._claimed:
            return "a framework, or holdfast.Run, was in charge before"
        if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
            return "their optimizer was not made in this process, but sent to it or read from a file"
        return f"torch.distributed was not initialised, though WORLD_SIZE is {os.environ.get('WORLD_SIZE')}"

    def _begin_step(self) -> None:
        if self._early:
            self._look_around()
        if not self._unsettled:
            self.loop._before_optimizer()

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._depth == 0 or not self._acts():
            return
        self._depth -= 1
        if self._depth or self._scaling:
            return
        self._stepping = None
        if self._replay is not None:
            self._replay.after_step()
        self._count(optimizer)
        self._complete(optimizer)

    def scaler_step(self, scaler: Any, optimizer: Any, real: Callable[[], Any]) -> Any:
        """With a scaler, a step is complete when the scale is updated; one that it skips counts."""
        if not self._following and not self._over:
            self.first_act()
        if not scaler.is_enabled() or not self._acts():
            return real()
        self._scaled = optimizer
        if self._replay is not None:
            optimizer._opt_called = True
            self._count(optimizer)
            return None
        self._begin_step()
        self._scaling = True
        try:
            result = real()
        finally:
            self._scaling = False
            self._depth = 0
        self._count(optimizer)
        return result

    def scaler_update(self, scaler: Any, real: Callable[[], Any]) -> Any:
        if self._scaled is None or not self._acts():
            return real()
        if self._replay is not None:
            scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        else:
            real()
        optimizer, self._scaled = self._scaled, None
        self._complete(optimizer)
        return None

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        number = self._stepped.get(optimizer)
        if number is None:
            number = self._stepped[optimizer] = self.registry.number(optimizer)
        self.trace.step(number)
        latest = self.loop.latest() if self.loop.latest is not None else None
        if self.trace.steps <= 2:
            self.loop.count_fetches(latest)
        if latest is not None and not latest.trains:
            latest.trains = True
            self._trained.add(latest.loader)
        for one in self.loop.open_passes():
            if one.fresh:
                one.fresh = False
                self._used.add(one.loader)

    def _complete(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, and its scaler with it."""
        if self._replay is not None:
            self._checked(self._replay.check_ahead, self.trace)
            self._attend()
            self._arrives(AFTER)
            self.fetched = False
            return
        loop = self.loop
        if self._several:
            # Between the steps of several optimizers values and their graphs may be alive, such as a batch that one
            # network has made for another: the iteration must end first.
            self._unsettled = loop.pending = True
            if self.fetched or not self._closes(optimizer):
                return
            self._settle()
        else:
            loop.complete_step(random=not self.fetched)
            if self.fetched:
                self.fetched = False
                return
        # A loop that fetches nothing from a loader between its steps: this is the boundary.
        loop.pending = loop.resting = False
        if not self._told:
            self._tell_training()
        self._attend()

    def _closes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer is the last of an iteration: the one that was the last to step for the first time."""
        stepped = [*self._stepped]
        return len(stepped) == len(self.registry.alive("optimizer")) and stepped[-1] is optimizer

    def _settle(self) -> None:
        self._unsettled = self.fetched = False
        self.loop.complete_step()

    def _look_around(self) -> bool:
        """See what the script has made; returns whether it can be saved. If not, that is said now, and not at a
        preemption."""
        if self._early:
            self._early -= 1
            self.loop.watch_buffers()
            self.loop.frames.note_constants(sys._getframe())
        if self._looked == self.registry.version:
            return True
        try:
            self.loop.adopt()
        except StateError as error:
            self._give_up(f"its state cannot be saved: {error}")
            return False
        self._looked = self.registry.version
        self._several = len(self.registry.alive("optimizer")) > 1
        return True

    def _give_up(self, why: str) -> None:
        if not self._over:
            self.loop.pending = False
            self.close(end_passes=False)
            unprotected(f"this loop goes on unprotected, since {why}")

    def _tell_training(self) -> None:
        assert self.host is not None
        self._told = True
        self.host.tell_training(self.loop.step)

    # ------------------------------------------------------------------ boundaries

    def _attend(self) -> None:
        """In steady state a comparison."""
        engine = self.loop.engine
        assert engine is not None
        if self.loop.step < engine.next_stop and self._epochs_done is None:
            return
        epochs_done, self._epochs_done = self._epochs_done, None
        if self._over or (self._replay is None and self.loop.step and not self._look_around()):
            return
        try:
            engine.at_boundary(self.loop.step, epoch=epochs_done)
        except Preempted as leaving:
            self._leave(leaving)

    def _arrives(self, side: int) -> bool:
        """Whether the replay is at its end; then the state is in place."""
        replay = self._replay
        if replay is None or not replay.is_here(side, self.trace):
            return False
        assert self.host is not None
        self.busy = True  # workers of loaders are started
        try:
            self._checked(replay.arrive, self.loop, self.trace)
        finally:
            self.busy = False
        self._files.arrive()
        self._replay, self.replaying = None, False
        self._looked = self.registry.version
        self._several = len(self.registry.alive("optimizer")) > 1
        self.fetched = False
        self.loop.note(side)
        self.host.session.journal.record("replayed", step=self.loop.step)
        surroundings().replayed()
        return True

    def _checked(self, check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except StateError as error:
            raise self._fail(error) from error.__cause__

    def _fail(self, error: StateError) -> StateError:
        self._failure = error
        return error


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return -1
