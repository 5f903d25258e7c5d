"""Plain PyTorch loops that know nothing of holdfast: followed as they run, and replayed, not retrained, on resume.

:class:`Follower` looks at a loop from outside: what it makes, which batches it fetches, when its optimizers step.
A checkpoint holds the state at a *point* of the loop, and how the loop came there. On resume the script runs again;
until that point loaders hand out one and the same batch, modules answer without computing, and what the script
reads out of tensors is what it read before (see :mod:`~holdfast.adapters.replay_seen`); there, the state is loaded,
and from there on everything is real. So the script's own variables, its counters, its open files, come out right.

Where a point is: before a fetch that follows an optimizer step, and before a pass over a loader begins. What the
loop does after a step, such as an evaluation, is done by then. Loops without a loader have points after their steps.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from holdfast.adapters import rng
from holdfast.adapters.blackbox import BlackBox
from holdfast.adapters.claim import claimed_by
from holdfast.adapters.data import _set_generators
from holdfast.adapters.host import Host
from holdfast.adapters.place import torch_place
from holdfast.adapters.replay_hooks import Hooks
from holdfast.adapters.replay_loop import VERSION, Followed, Pass
from holdfast.adapters.replay_objects import Registry
from holdfast.adapters.replay_outputs import Outputs
from holdfast.adapters.replay_passes import Samples, Watched
from holdfast.adapters.replay_seen import Reading, Seen
from holdfast.adapters.replay_trace import AFTER, BEFORE, Recorded, Trace, astray
from holdfast.adapters.restore import Contents
from holdfast.adapters.session import Place
from holdfast.adapters.state import RUN, tree_of
from holdfast.config import Settings
from holdfast.errors import HoldfastError, Preempted, StateError
from holdfast.notice import NoticeSource
from holdfast.progress import Progress
from holdfast.store.checkpoints import Checkpoint

log = logging.getLogger("holdfast")

_current: Follower | None = None


def current() -> Follower | None:
    """Who follows in this process."""
    return _current


class Follower:
    """Follows one training loop of this process, in one thread."""

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
        self._place, self._sources, self._on_preempted = place, sources, on_preempted
        self._hooks = Hooks(self)
        self._process = os.getpid()
        self._thread = 0
        self._following = False
        self._over = False
        self._failure: StateError | None = None
        self._outputs = Outputs()
        self._samples = Samples()
        self._depth = 0
        self._scaling = False
        self._fetched = False
        """Whether a batch was fetched since the last step."""
        self._unsettled = False
        """With several optimizers: whether one has stepped since the last point."""
        self._stepped: dict[int, int] = {}
        """Optimizers that have stepped, in the order of their first time: identity and number."""
        self._trained: dict[int, Any] = {}
        self._evaluated: dict[int, Any] = {}
        self._main: torch.nn.Module | None = None
        self._adopted = False
        self._told = False
        self._began = 0.0

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
        self._over = False
        self._hooks.begin()

    def finish(self) -> None:
        """The script or function ended well: commit the end. Raises if it ended during the replay."""
        if self._failure is not None:
            raise self._failure
        if not self._following or self._over:
            return
        if self.replaying:
            raise self._fail(astray(f"it has ended after {self.trace.steps} optimizer steps, before step {self.step}"))
        assert self.host is not None
        if self._unsettled:
            self._settle()
        self.loop.over = True
        self._refresh()
        self.host.engine.finish(self.loop.step)

    def crashed(self, error: BaseException) -> None:
        """The script or function ended with an error: save the last point if the state is still that."""
        if not self._following or self._over or self.host is None or isinstance(error, Preempted):
            return
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

    def close(self) -> None:
        """Take the hooks away and let go of the location."""
        global _current
        if _current is self:
            _current = None
        if self._over:
            return
        self._over = True
        self._hooks.end()
        if not self._following:
            return
        self._reading.end()
        if self.replaying:
            self._outputs.end()
        self.loop.unhook()
        for one in self.loop.open_passes():
            if one.batches is not None:
                one.batches.close()
        assert self.host is not None
        self.host.close()
        if self.host.saved_all(self.loop.step):
            self.loop.remove_traces()

    # ------------------------------------------------------------------ the first training act

    def _may_act(self) -> bool:
        """Whether the loop of this thread is followed."""
        if self._following:
            if self._failure is not None and not self._over:
                raise self._failure
            return not self._over and not self.busy and threading.get_ident() == self._thread
        return False

    def first_act(self) -> bool:
        """Something trains, or is about to. Returns whether it is followed, or never will be."""
        if self._following or self._over:
            return True
        if claimed_by() is not None or os.getpid() != self._process or not self.registry.alive("optimizer"):
            return False
        if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 and not (dist.is_available() and dist.is_initialized()):
            return False
        self._open()
        return True

    def _open(self) -> None:
        """Meet the other ranks, and find out whether this attempt goes on from a checkpoint."""
        self._hooks.forget_first_call()
        self._thread = threading.get_ident()
        host = self.host = Host(self.settings, self._place())
        box = host.box_path()
        self._seen = Seen(f"{box}.seen" if box is not None else None)
        self.loop = Followed(
            self.registry,
            self.trace,
            self._seen,
            BlackBox(box, host.rank),
            host.rank,
            rescue=self.settings.rescue,
            incremental=self.settings.save_type == "incremental",
        )
        contents: list[Contents] = []

        def load(checkpoint: Checkpoint) -> None:
            contents[:] = [Contents(checkpoint, host.rank, host.session.world)]

        if host.resume(load) is not None:
            self._prepare_replay(contents[0])
        else:
            self.loop.start = rng.capture()
            for order in self.registry.orders():
                order.watch()
        self._following = True
        self._began = time.monotonic()
        self.loop.engine = host.start(self.loop, self._look, sources=self._sources)
        self.loop.saver = host.saver
        self._reading = Reading(self._seen)
        self._reading.begin()
        if self.replaying:
            self._outputs.begin()
        else:
            self.loop.note(AFTER)

    def _prepare_replay(self, contents: Contents) -> None:
        assert self.host is not None
        checkpoint = contents.checkpoint
        mine = contents.mine()
        if mine is None:
            raise StateError(
                f"{checkpoint.location} was saved by {checkpoint.manifest.world_size} ranks, and this is a job of "
                f"{self.host.session.world}: a loop that is replayed goes on with as many as before. holdfast.Run can "
                f"change their number"
            )
        run = tree_of(contents.loaded, RUN)["run"]
        if mine.get("follow", {}).get("version") != VERSION or "follow" not in run:
            raise StateError(
                f"{checkpoint.location} was not saved by a loop that holdfast followed by itself, but by holdfast.Run, "
                f"a framework or another version of holdfast: name another place with HOLDFAST_DIR"
            )
        self._contents, self._mine, self._run = contents, mine, run
        self._recorded = Recorded(mine["follow"])
        self.replaying = True
        self.loop.step = run["step"]
        self.loop.place = (run["epoch"], 0, {})
        self.loop.start = mine["follow"]["start"]
        self._seen.recall(mine["follow"]["seen"])
        rng.restore(self.loop.start)
        if self.host.rank == 0:
            ending = ", which is complete (HOLDFAST_RESUME=never starts it anew)" if checkpoint.manifest.complete else ""
            log.warning(
                "replaying the loop up to step %d%s: what it prints until then it printed before", run["step"], ending
            )

    # ------------------------------------------------------------------ told by the hooks

    def made_module(self, module: torch.nn.Module) -> None:
        self.registry.note_module(module)

    def made(self, kind: str, thing: Any) -> None:
        self.registry.note(kind, thing)
        if kind == "optimizer" and not self._following and not self._over:
            self._hooks.watch_loaders()
            self._hooks.watch_first_call()

    def made_ddp(self, module: Any) -> None:
        """All ranks are here together: a good moment to meet."""
        order = self.registry.note_order(module)
        if self._following:
            if not self.replaying:
                order.watch()
        elif not self._over and claimed_by() is None and os.getpid() == self._process:
            self._open()

    def iterate(self, loader: Any, real: Callable[[Any], Any]) -> Any:
        """``iter(loader)``."""
        if not self._following and not self._over and not self.busy:
            self.first_act()
        if not self._may_act():
            return real(loader)
        total = _length(loader)
        if self.replaying:
            self._attend()
            if not self._arrives(BEFORE):
                number = len(self.trace.table)
                self._check(self._recorded.check_open, number, total)
                self.trace.open(total)
                self._check(self._recorded.check_ahead, self.trace)
                one = Watched(self, loader, number)
                self.loop.begin_pass(one)
                return one
        loop = self.loop
        if loop.pending or self._unsettled:
            if self._unsettled:
                self._settle()
            loop.note(BEFORE)
            self._attend()
        number = self.trace.open(total)
        one = Watched(self, loader, number)
        one.open()
        loop.begin_pass(one)
        return one

    def before_fetch(self, one: Pass) -> None:
        """A real fetch that may be a boundary."""
        if self._unsettled:
            self._settle()
        loop = self.loop
        # A step is in flight from here on, unless this is an evaluation: then the state stays as it is.
        loop.pending = loop.resting = self._evaluates(one)
        loop.note(BEFORE)
        if not self._told:
            self._tell_training()
        self._attend()

    def after_end(self, one: Pass) -> None:
        """A pass has come to its end."""
        self.trace.end(one.number)
        self.loop.end_pass(one)
        if id(one.loader) not in self._trained:
            self._evaluated[id(one.loader)] = one.loader
            return
        loop = self.loop
        epoch, passes, _ = loop.place
        loop.place = (epoch + 1, passes, {})
        if not self._unsettled:
            loop.pending = loop.resting = True
            loop.note(AFTER)
            self._attend(epochs_done=epoch + 1)

    def replayed_fetch(self, one: Watched) -> Any:
        self._may_act()
        self._attend()
        if self._arrives(BEFORE):
            return None
        trace = self.trace
        if not self._check(self._recorded.check_fetch, one.number, one.delivered):
            trace.end(one.number)
            self.loop.end_pass(one)
            if id(one.loader) in self._trained:
                epoch, passes, _ = self.loop.place
                self.loop.place = (epoch + 1, passes, {})
            self._check(self._recorded.check_ahead, trace)
            self._arrives(AFTER)
            raise StopIteration
        self.busy = True
        try:
            batch = self._samples.of(one.loader, DataLoaderIter)
        finally:
            self.busy = False
        trace.fetch(one.number)
        one.delivered += 1
        self.loop.latest = one.reference
        self._fetched = True
        self._check(self._recorded.check_ahead, trace)
        return batch
