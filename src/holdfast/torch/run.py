"""A PyTorch loop that survives preemption.

::

    with holdfast.Run("checkpoints", model=model, optimizer=optimizer, scheduler=scheduler, save_every="5m") as run:
        for epoch in run.epochs(3):
            for batch in run.batches(loader):
                loss = model(batch).mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.step(loss=loss)

A step is saved at the *next fetch* of a batch, not inside :meth:`Run.step`: what the loop does after a
step, such as an evaluation every hundred steps, then belongs to that step and is not skipped on resume.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from holdfast.config import Settings
from holdfast.errors import Preempted
from holdfast.progress import Progress
from holdfast.recorder.blackbox import BlackBox
from holdfast.runtime.host import Host
from holdfast.runtime.ownership import claim
from holdfast.store.checkpoints import Checkpoint
from holdfast.torch import rng
from holdfast.torch.data.batches import Batches
from holdfast.torch.data.workers import Stamped
from holdfast.torch.loop import Loop
from holdfast.torch.ranks import torch_place, torch_rank
from holdfast.torch.restore import Contents, restore
from holdfast.torch.state import Objects

log = logging.getLogger("holdfast")


class Run:
    """One attempt of a training run, to be used as a context manager."""

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        save_every: str | int | None = None,
        keep: int | None = None,
        fallback: str | os.PathLike[str] | None = None,
        total_steps: int | None = None,
        settings: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> None:
        """Restore the newest whole checkpoint, if there is one, and listen for notices.

        ``dir``, ``save_every``, ``keep`` and ``fallback`` are the settings of these names; ``settings`` takes any
        other. ``objects``: everything that has a state, each under a name: models, optimizers, schedulers, scalers,
        ``torch.Generator``, dicts of your own counters, anything with ``state_dict`` and ``load_state_dict``.
        """
        named = {"dir": dir, "save_every": save_every, "keep": keep, "fallback": fallback}
        given = {**(settings or {}), **{name: value for name, value in named.items() if value is not None}}
        self.settings = Settings.load(**given)
        self.rank, self.world = torch_rank()
        self.resumed_from: str | None = None
        """Name of the checkpoint that this attempt goes on from; None: it started from scratch."""
        self._objects = Objects(objects, self.rank, incremental=self.settings.save_type == "incremental")
        self._total_steps = total_steps
        self._total_epochs: int | None = None
        self._expected: int | None = None
        self._in_epochs = False
        self._complete = False
        self._random: dict[str, Any] | None = None
        self._positions: dict[str, Any] = {}
        self._report_every = self.settings.progress_every
        self._loss: Any = None
        self._metrics: dict[str, Any] = {}
        self._steps_at_epoch = 0
        self._iterating = 0
        self._trained = False
        self._host: Host | None = None
        self._in_charge = contextlib.ExitStack()
        if self.settings.enabled:
            self._objects.check()
            with contextlib.ExitStack() as stack:
                stack.enter_context(claim("run"))
                self._host = Host(self.settings, torch_place())
                self._start(self._host)
                self._in_charge = stack.pop_all()
        else:
            self._loop = Loop(self._objects, BlackBox(None, self.rank), self.rank, rescue=False)

    # ------------------------------------------------------------------ the loop

    @property
    def steps(self) -> int:
        """Optimizer steps completed, over all attempts."""
        return self._loop.step

    @property
    def epoch(self) -> int:
        """The epoch that the run is in, from 0."""
        return self._loop.place[0]

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are left of ``total``; first the one that was interrupted."""
        self._total_epochs = total
        self._in_epochs = True
        for epoch in range(self.epoch, total):
            self._steps_at_epoch = self._loop.step
            if self._random is not None:
                rng.restore(self._random)
            yield epoch
            _, passes, active = self._loop.place
            self._loop.place = (epoch + 1, passes, {})
            self._positions.clear()
            self._random = None
            self._loop.boundary(epochs_done=epoch + 1)
            for batches in active.values():
                batches.close(keep_persistent=True)

    def batches(self, loader: Any, name: str = "train") -> Iterator[Any]:
        """The batches of a pass over ``loader`` that are left. Loaders that are used side by side need names."""
        if self._host is None:
            yield from loader
            return
        if self._complete and not self._in_epochs:
            return
        loop = self._loop
        batches = self._open_pass(loader, name)
        self._iterating += 1
        first = True
        try:
            while True:
                if loop.pending:
                    loop.boundary()
                fetch = batches.fetch
                try:
                    batch = fetch()
                except StopIteration:
                    batches.end()
                    return
                except Exception:
                    batches.skip()
                    raise
                batches.delivered += 1
                if type(batch) is Stamped:
                    batch = batches.unwrap(batch)
                if first:
                    first = False
                    self._on_first_batch(name)
                yield batch
        finally:
            self._iterating -= 1

    def _open_pass(self, loader: Any, name: str) -> Batches:
        position = self._positions.pop(name, None)
        batches = Batches(loader, position)
        if position is not None and self._random is not None:
            # Making the iterator has drawn random numbers; the loop goes on with those of the boundary.
            rng.restore(self._random)
            if not self._positions:
                self._random = None
        self._loop.open_pass(name, batches)
        return batches

    def _on_first_batch(self, name: str) -> None:
        self._loop.on_first_batch(name)
        if not self._trained:
            self._trained = True
            assert self._host is not None
            self._host.tell_training(self._loop.step)

    def step(self, loss: Any = None, **metrics: Any) -> None:
        """An optimizer step is complete.

        ``loss`` and ``metrics`` (``accuracy``, ``validation_loss``, ``validation_accuracy``, ``learning_rate``) are
        for the progress file; a tensor is read by another thread, so that handing it over does not wait for it.
        """
        # The hot path: what would be methods of the loop and of its passes is written out here.
        loop = self._loop
        step = loop.step = loop.step + 1
        for batches in loop.opened:
            batches.last_mark = (batches.delivered, batches.worker_rng)
        loop.pending = True
        loop.dirty = False
        self._loss = loss
        if metrics:
            self._metrics.update(metrics)
        host = self._host
        if host is not None:
            if self._report_every and step % self._report_every == 0:
                host.poke()
            if not self._iterating:
                loop.boundary()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """For an evaluation in the middle of an epoch: it leaves the random state as it found it.

        A preemption inside it does not wait for its end, and going on without it is still exact.
        """
        state = rng.capture()
        try:
            yield
        finally:
            rng.restore(state)

    # ------------------------------------------------------------------ start and end

    def _start(self, host: Host) -> None:
        loop = Loop(self._objects, BlackBox(host.box_path(), self.rank), self.rank, rescue=self.settings.rescue)
        self._loop = loop  # before the host starts: from then on its reporter asks for the progress
        loaded: list[tuple[dict[str, Any], dict[str, Any]]] = []

        def load(checkpoint: Checkpoint) -> Callable[[], None] | None:
            contents = Contents(checkpoint, self.rank, self.world)

            def put() -> None:
                loaded[:] = [restore(contents, self._objects)]

            if not self._objects.sharded:
                return put
            put()  # shards are checked while they are loaded, by all ranks together
            return None

        checkpoint = host.resume(load)
        if checkpoint is not None:
            self._go_on(loop, checkpoint, *loaded[0])
        else:
            for ddp in self._objects.gradient_orders.values():
                ddp.watch()
        loop.engine = host.start(loop, self._progress, replicated=not self._objects.sharded)
        loop.saver = host.saver
        loop.hook(backward=self.world > 1 and self.settings.rescue)
        if self._complete and self.rank == 0:
            log.warning("this run is complete at step %d; HOLDFAST_RESUME=never starts it anew", loop.step)

    def _go_on(self, loop: Loop, checkpoint: Checkpoint, run: dict[str, Any], mine: dict[str, Any]) -> None:
        self.resumed_from = checkpoint.name
        self._complete = checkpoint.manifest.complete and (self._total_steps or 0) <= run["step"]
        loop.step = run["step"]
        loop.place = (run["epoch"], run["passes"], {})
        for name, ddp in self._objects.gradient_orders.items():
            ddp.repeat(run["gradient_orders"].get(name, []))
        self._positions = dict(mine["positions"])
        self._random = mine["random"]
        if self._random is not None:
            rng.restore(self._random)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._host is None:
            return
        engine = self._host.engine
        self._loop.over = True
        try:
            if error is None:
                if self._loop.pending and self._loop.step:
                    self._loop.boundary()
                engine.finish(self._loop.step)
                self._complete = True
            elif not isinstance(error, Preempted):
                engine.crashed(error)
        finally:
            self._close()

    def _close(self) -> None:
        assert self._host is not None
        self._in_charge.close()
        self._loop.unhook()
        for batches in self._loop.place[2].values():
            batches.close()
        self._host.close()
        if self._host.saved_all(self._loop.step):
            self._loop.remove_traces()

    # ------------------------------------------------------------------ progress

    def _progress(self) -> Progress:
        assert self._host is not None
        loop = self._loop
        total = self._total_steps or self._expected_steps()
        known = {"accuracy", "validation_loss", "validation_accuracy", "learning_rate"}
        metrics = {name: _number(value) for name, value in self._metrics.items() if name in known}
        if "learning_rate" not in metrics:
            metrics["learning_rate"] = self._learning_rate()
        return Progress(
            epoch=min(loop.epoch() + 1, self._total_epochs) if self._total_epochs else None,
            total_epochs=self._total_epochs,
            step=loop.step,
            total_steps=total,
            loss=_number(self._loss),
            resumed_from=self.resumed_from,
            checkpointing=self._host.checkpointing(),
            **metrics,
        )

    def _expected_steps(self) -> int | None:
        """Steps of the whole run, from the loader's length and how many batches a step has taken so far."""
        epoch, _, active = self._loop.place
        batches = next(iter(active.values()), None)
        if self._complete:
            self._expected = self._loop.step
        elif self._total_epochs is not None and batches is not None and self._loop.step:
            with contextlib.suppress(TypeError):  # a loader without a length
                a_pass = len(batches)
                a_step = max(1, round((epoch * a_pass + batches.delivered) / self._loop.step))
                self._expected = math.ceil(a_pass / a_step) * self._total_epochs
        return self._expected

    def _learning_rate(self) -> float | None:
        for optimizer in self._objects.optimizers.values():
            return _number(optimizer.param_groups[0].get("lr"))
        return None


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(value.detach() if hasattr(value, "detach") else value)
