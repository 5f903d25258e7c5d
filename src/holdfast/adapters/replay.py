"""Plain PyTorch loops that know nothing of holdfast: followed as they run, and replayed, not retrained, on resume.

:class:`Follower` looks at a loop from outside: what it makes, which batches it fetches, when its optimizers step.
A checkpoint holds the state at a *point* of the loop, and how the loop came there. On resume the script runs again;
until that point loaders hand out one and the same batch, modules answer without computing, and what the script
reads out of tensors is what it read before. There the state is loaded, and from there on everything is real: the
script's own variables, its counters, its open files have come out right by themselves.

Where a point is: before a fetch that follows an optimizer step, and before a pass over a loader begins. What the
loop does after a step, such as an evaluation, is done by then. Loops without a loader have points after their steps.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from holdfast.adapters import rng
from holdfast.adapters.blackbox import BlackBox
from holdfast.adapters.claim import claimed_by, tell_no_more, tell_of_claims
from holdfast.adapters.codec import encode
from holdfast.adapters.host import Host
from holdfast.adapters.place import torch_place
from holdfast.adapters.replay_birth import Birth
from holdfast.adapters.replay_hooks import Hooks
from holdfast.adapters.replay_loop import Followed, Pass
from holdfast.adapters.replay_objects import Registry
from holdfast.adapters.replay_passes import Watched
from holdfast.adapters.replay_resume import Replay
from holdfast.adapters.replay_seen import Reading, Seen
from holdfast.adapters.replay_trace import AFTER, BEFORE, Trace, astray
from holdfast.adapters.restore import Contents
from holdfast.adapters.session import Place
from holdfast.adapters.state import _has_state
from holdfast.config import Settings
from holdfast.errors import HoldfastError, Preempted, StateError
from holdfast.notice import NoticeSource
from holdfast.progress import Progress
from holdfast.store.checkpoints import Checkpoint

log = logging.getLogger("holdfast")

_EARLY_STEPS = 3
"""In its first steps a loop is looked at more closely: what it has made, and which buffers move."""

_current: Follower | None = None


def current() -> Follower | None:
    """Who follows in this process."""
    return _current


class Follower:
    """Follows one training loop of this process, in one thread."""

    loop: Followed

    def __init__(
        self,
        settings: Settings,
        *,
        place: Callable[[], Place] = torch_place,
        sources: Sequence[NoticeSource] = (),
        on_preempted: Callable[[Preempted], NoReturn] | None = None,
        name: str = "torch",
    ) -> None:
        """``place`` is called at the first training act. ``on_preempted``: instead of raising out of the boundary."""
        self.settings = settings
        self.name = name
        self.replaying = False
        """While the loop is replayed up to the point that it was saved at: what it does now was done already."""
        self.host: Host | None = None
        """None until the first training act, when the other ranks are met and the checkpoint is found."""
        self.registry = Registry()
        self.trace = Trace()
        self.busy = False
        """While a loader works for us: what it does inside is not the script's."""
        self.fetched = False
        """Whether a batch was fetched since the last step, but for evaluations."""
        self._place, self._sources, self._on_preempted = place, sources, on_preempted
        self._hooks = Hooks(self)
        self._process = os.getpid()
        self._thread = 0
        self._following = False
        self._over = False
        self._failure: StateError | None = None
        self._replay: Replay | None = None
        self._refusal: HoldfastError | None = None
        self._depth = 0
        self._scaling = False
        self._scaled: torch.optim.Optimizer | None = None
        self._several = False
        self._unsettled = False
        """With several optimizers: one has stepped since the last point."""
        self._firsts: list[int] = []
        """Optimizers in the order of their first steps."""
        self._numbers: dict[int, int] = {}
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._evaluated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._looked = -1
        self._epochs_done: int | None = None
        """Told at the next boundary."""
        self._early = _EARLY_STEPS
        self._told = False

    @property
    def step(self) -> int:
        """Optimizer steps completed, over all attempts."""
        return self.loop.step if self._following else 0

    # ------------------------------------------------------------------ start and end

    def start(self) -> None:
        """From here on what is constructed is noted, and training acts are followed."""
        global _current
        if _current is not None and _current is not self:
            _current.close()
        _current = self
        self._birth = Birth(self.settings)
        self._hooks.begin()
        tell_of_claims(self.stand_back)

    def finish(self) -> None:
        """The script or function ended well: commit the end. Raises StateError if it ended during the replay."""
        if self._failure is not None:
            raise self._failure
        if not self._following or self._over:
            return
        if self.replaying:
            raise self._fail(astray(f"it ends after {self.trace.steps} optimizer steps, before step {self.step}"))
        assert self.host is not None
        if self._unsettled:
            self._settle()
        self.loop.over = True
        if self.loop.step:
            self._look_around()
        elif any(parameter.grad is not None for root in self.registry.roots() for parameter in root.parameters()):
            log.warning(
                "this script has trained without a torch.optim.Optimizer that steps, so there was nothing to follow "
                "and nothing was saved; with holdfast.Run(model=…) a loop says itself what a step is"
            )
        self.host.engine.finish(self.loop.step)

    def crashed(self, error: BaseException) -> None:
        """The script or function ended with an error: save the last point if the state is still that."""
        if not self._following or self._over or isinstance(error, Preempted):
            return
        assert self.host is not None
        if self.replaying and error is not self._failure:
            log.error(
                "the script failed while its loop was replayed, where modules do not compute: %s. Nothing is lost, the "
                "checkpoint of step %d stays. holdfast.Run needs no replay; HOLDFAST_RESUME=never starts anew",
                error,
                self.step,
            )
        traceback = error.__traceback__
        while traceback is not None:
            self.loop.broken = traceback.tb_frame
            traceback = traceback.tb_next
        self.host.engine.crashed(error)

    def stay_behind(self) -> None:
        """In a child process: the loop that is followed is its parent's. One that is not yet, may become its own."""
        if self._following:
            self._over = True
            self.loop.seen.thread = 0
            self._hooks.end()
        else:
            self._process = os.getpid()

    def close(self) -> None:
        """Take the hooks away and let go of the location."""
        global _current
        if _current is self:
            _current = None
        if self._over:
            return
        self._over = True
        self._hooks.end()
        tell_no_more(self.stand_back)
        if not self._following:
            if self.host is not None:
                self.host.close()
            return
        self._reading.end()
        if self._replay is not None:
            self._replay.end()
        self.loop.unhook()
        for one in self.loop.open_passes():
            if one.batches is not None:
                one.batches.close()
        assert self.host is not None
        self.host.close()
        if self.host.saved_all(self.loop.step):
            self.loop.remove_traces()

    # ------------------------------------------------------------------ the first training act

    def first_act(self) -> bool:
        """Something trains, or is about to. Returns whether there is nothing more to wait for."""
        if self._following or self._over:
            return True
        if not self.registry.alive("optimizer") or not self._is_ours():
            return False
        if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 and not (dist.is_available() and dist.is_initialized()):
            return False
        self._meet()
        self._follow()
        return True

    def _is_ours(self) -> bool:
        return claimed_by() is None and os.getpid() == self._process

    def _acts(self) -> bool:
        """Whether what this thread does now is to be followed."""
        if not self._following or self._over or self.busy or threading.get_ident() != self._thread:
            return False
        if claimed_by() is not None:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def _meet(self) -> None:
        """Meet the other ranks, and find the checkpoint to go on from. What goes wrong is told when the loop begins:
        until then it may turn out to be another's."""
        if self.host is not None or self._refusal is not None:
            return
        self._place_now = self._place()
        try:
            self.host = Host(self.settings, self._place_now)
            self.host.resume(self._load)
        except HoldfastError as error:
            self._refusal = error

    def _load(self, checkpoint: Checkpoint) -> None:
        self._replay = None
        self._replay = Replay(Contents(checkpoint, self._place_now.rank, self._place_now.world))

    def stand_back(self) -> None:
        """Somebody else is in charge of the training that is about to begin."""
        if not self._following and self.host is not None:
            self.host.close()
            self.host = self._replay = self._refusal = None

    def _follow(self) -> None:
        """The loop begins."""
        if self._refusal is not None:
            raise self._refusal
        self._hooks.forget_first_call()
        host, place = self.host, self._place_now
        assert host is not None
        box = BlackBox(host.box_path(), host.rank)
        seen = Seen(f"{box.path}.seen" if box.path is not None and place.world > 1 else None)
        self.loop = Followed(self.registry, self.trace, seen, box, place, self.settings)
        if self._replay is not None:
            self._replay.begin(self.loop, self._birth)
            self.replaying = True
        else:
            self.loop.start = rng.capture()
            self.loop.birth = self._birth.content(self.loop.start)
            self._birth.leave()
            for order in self.registry.orders():
                order.watch()
        self.loop.engine = host.start(self.loop, self._progress, sources=self._sources)
        self.loop.saver = host.saver
        self._thread = threading.get_ident()
        self._following = True
        self._reading = Reading(seen)
        self._reading.begin()
        if self._replay is None:
            self.loop.note(AFTER)
        elif host.rank == 0:
            complete = ", where it is complete (HOLDFAST_RESUME=never starts it anew)" if self._replay.complete else ""
            log.warning(
                "replaying the loop up to step %d%s; what it prints until then it printed before", self.step, complete
            )

    # ------------------------------------------------------------------ told by the hooks

    def made_module(self, module: torch.nn.Module) -> None:
        self.registry.note_module(module)

    def made(self, kind: str, thing: Any) -> None:
        self.registry.note(kind, thing)
        if kind == "optimizer" and not self._following and not self._over:
            self._hooks.watch_loaders()
            self._hooks.watch_first_call()

    def loads(self, file: Any) -> None:
        """``torch.load``."""
        if not self._following:
            self._birth.note_load(file)

    def made_ddp(self, module: Any) -> None:
        """All ranks are here together: a good moment to meet."""
        order = self.registry.note_order(module)
        if self._following:
            if not self.replaying:
                order.watch()
        elif not self._over and self._is_ours():
            self._meet()

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
                watched = Watched(self, loader, number)
                loop.begin_pass(watched)
                return watched
        if self._unsettled:
            self._settle()
        if loop.pending:
            loop.note(BEFORE, rarely=True)
            self._attend()
        watched = Watched(self, loader, self.trace.open(total))
        watched.open()
        loop.begin_pass(watched)
        return watched

    def before_fetch(self, one: Pass) -> None:
        """A real fetch after a step, which is a point, or in an evaluation."""
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
        if one.trains or one.loader in self._trained:
            return False
        main = self.loop.main
        return (main is not None and not main.training) or (bool(self._trained) and one.loader in self._evaluated)

    def after_end(self, one: Pass) -> None:
        """A pass has come to its end."""
        self.trace.end(one.number)
        loop = self.loop
        loop.end_pass(one)
        if not one.trains:
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
        self.fetched = True
        self._checked(replay.check_ahead, trace)
        return batch

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._following and not self._over:
            self.first_act()
        if not self._acts():
            return
        self._depth += 1
        if self._depth > 1 or self._scaling:
            return
        if self._replay is not None:
            self._replay.before_step(optimizer)
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        if self._early:
            self._look_around()
        if not self._unsettled:
            self.loop._before_optimizer()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._depth == 0 or not self._acts():
            return
        self._depth -= 1
        if self._depth or self._scaling:
            return
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

    # ------------------------------------------------------------------ steps

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        number = self._numbers.get(id(optimizer))
        if number is None:
            number = self._numbers[id(optimizer)] = self.registry.number(optimizer)
            self._firsts.append(number)
        self.trace.step(number)
        latest = self.loop.latest() if self.loop.latest is not None else None
        if self.trace.steps <= 2:
            self.loop.count_fetches(latest)
        if latest is not None and not latest.trains:
            latest.trains = True
            self._trained.add(latest.loader)

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
            loop.complete_step()
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
        return len(self._firsts) == len(self.registry.alive("optimizer")) and (
            self._firsts[-1] == self._numbers[id(optimizer)]
        )

    def _settle(self) -> None:
        self._unsettled = self.fetched = False
        self.loop.complete_step()

    def _look_around(self) -> None:
        """See what the script has made. What cannot be saved is said now, and not at a preemption."""
        if self._early:
            self._early -= 1
            self.loop.watch_buffers()
            self.loop.frames.note_constants(sys._getframe())
        if self._looked == self.registry.version:
            return
        try:
            self.loop.adopt()
        except StateError as error:
            log.error("this loop goes on unprotected, since its state cannot be saved: %s", error)
            self.close()
            return
        self._looked = self.registry.version
        self._several = len(self.registry.alive("optimizer")) > 1

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
        if self._replay is None and self.loop.step:
            self._look_around()
        try:
            engine.at_boundary(self.loop.step, epoch=epochs_done)
        except Preempted as leaving:
            self.close()
            if self._on_preempted is not None:
                self._on_preempted(leaving)
            raise

    def _arrives(self, side: int) -> bool:
        """Whether the replay is at its end; then the state is in place."""
        replay = self._replay
        if replay is None or not replay.is_here(side, self.trace):
            return False
        assert self.host is not None
        self._checked(replay.arrive, self.loop, self.trace)
        self._replay, self.replaying = None, False
        self._looked = self.registry.version
        self._several = len(self.registry.alive("optimizer")) > 1
        self.fetched = False
        self.loop.note(side)
        self.host.session.journal.record("replayed", step=self.loop.step)
        return True

    def _checked(self, check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except StateError as error:
            raise self._fail(error) from error.__cause__

    def _fail(self, error: StateError) -> StateError:
        self._failure = error
        return error

    def track(self, value: Any, frame: FrameType | None) -> Any:
        """See :func:`holdfast.track`."""
        if isinstance(value, torch.Generator | MutableMapping) or _has_state(value):
            self.registry.track(value)
            return value
        encode(value, "tracked", {})  # raises StateError for what cannot be saved, now and not at a preemption
        if not self._acts():
            return value
        return self.loop.seen.read(value, "track", lambda same: same, frame)

    def _progress(self) -> Progress:
        assert self.host is not None
        optimizers = self.registry.alive("optimizer")
        rate = optimizers[0].param_groups[0].get("lr") if optimizers else None
        return Progress(
            epoch=self.loop.epoch() + 1 if self._trained else None,
            step=self.loop.step,
            learning_rate=float(rate) if isinstance(rate, int | float) else None,
            resumed_from=self.host.resumed_from,
            checkpointing=self.host.checkpointing(),
        )


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return -1


def install(module: ModuleType) -> None:
    """Follow this process's script if nobody else does."""
    from holdfast.adapters.replay_script import follow_script

    follow_script()
