"""The replay of one loop: what stands in for real work until the point that was saved, and the state put back there."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import torch

from holdfast.adapters.replay.frames import Variables
from holdfast.adapters.replay.loop import VERSION, Followed
from holdfast.adapters.replay.outputs import Outputs
from holdfast.adapters.replay.passes import Samples, Watched
from holdfast.adapters.replay.provenance import Birth
from holdfast.adapters.replay.trace import Recorded, Trace, astray
from holdfast.adapters.replay.views import plain_view
from holdfast.errors import StateError, StoreError
from holdfast.torch import rng
from holdfast.torch.data.batches import _set_generators
from holdfast.torch.data.idle import IdleWorkers
from holdfast.torch.restore import DIED_WITH_IT, Contents
from holdfast.torch.state import RUN, Objects, tree_of

log = logging.getLogger("holdfast")


def _of_another(contents: Contents, step: int) -> dict[str, Any] | None:
    """Another rank's part, which is as good as one's own but for what that rank alone has read or held."""
    mine = contents.of_another(step)
    follow = mine.get("follow") if mine is not None else None
    if follow:
        follow["exact"] = False
        follow["seen"]["partial"] = follow["seen"]["foreign"] = True
    return mine


class Replay:
    """From a checkpoint to a loop that is where it was."""

    def __init__(self, contents: Contents) -> None:
        """Raises StateError if the checkpoint is none of a loop that was followed, or of another number of ranks, and
        StoreError if an older checkpoint may be better."""
        checkpoint = contents.checkpoint
        mine = contents.mine()
        if checkpoint.manifest.world_size != contents.world:
            raise StateError(
                f"{checkpoint.location} was saved by {checkpoint.manifest.world_size} ranks, and this job has "
                f"{contents.world}: a loop is replayed by as many ranks as before. holdfast.Run can change their number"
            )
        self.run: dict[str, Any] = tree_of(contents.loaded, RUN)["run"]
        if mine is None:
            log.warning(DIED_WITH_IT, checkpoint.name, contents.rank)
            mine = _of_another(contents, self.run["step"])
        if mine is None:
            raise StoreError(f"{checkpoint.name} holds no position of any rank")
        self.saved: dict[str, Any] = mine.get("follow", {})
        if self.saved.get("version") != VERSION or "follow" not in self.run:
            raise StateError(
                f"{checkpoint.location} was not saved by a loop that holdfast followed by itself, but by holdfast.Run, "
                f"by a framework or by another version of holdfast: name another place with HOLDFAST_DIR"
            )
        self.step: int = self.run["step"]
        self.complete = checkpoint.manifest.complete
        self.run_name = checkpoint.manifest.run
        self._contents, self._mine = contents, mine
        self._recorded = Recorded(self.saved)
        self._outputs = Outputs()
        self._samples = Samples()
        self._began = time.monotonic()

    def begin(self, loop: Followed, birth: Birth) -> None:
        """The loop is at its start."""
        self._loop = loop
        saved = self.saved["birth"]
        loaded = next((name for name in birth.loads if name not in saved["loads"]), None)
        if loaded is not None:
            raise StateError(
                f"the script has loaded {loaded} before its loop, which it had not when the run began: it goes on from "
                f"a checkpoint of its own, and step {self.step} in {self._contents.checkpoint.location} is of a run "
                f"that began without it. To go on from that step, start the script so that it does not load its own; "
                f"to go on from its own, set HOLDFAST_RESUME=never"
            )
        if different := birth.differences(saved, self.saved["start"]):
            log.warning(
                "the script draws from %s before its loop, and begins with other numbers than the first time: if they "
                "decide on its data, it is not the same. Seed them",
                " and ".join({"python": "random", "numpy": "numpy.random"}.get(kind, kind) for kind in different),
            )
        if lost := self.saved["seen"]["lost"]:
            log.warning(
                "not all that the script read out of tensors is known (%s): what it does with the rest may come out "
                "otherwise than the first time. holdfast.track makes the outcome known",
                lost,
            )
        checkpoint = self._contents.checkpoint
        if checkpoint.manifest.inexact and loop.rank == 0:
            log.warning("%s is not exact: %s", checkpoint.name, "; ".join(checkpoint.manifest.inexact))
        loop.birth = saved
        loop.recalled = self.saved.get("notes", {})
        loop.fetches = self.saved["fetches"]
        self._ahead = loop.ahead()
        loop.step = self.step
        loop.place = (self.run["epoch"], 0, {})
        loop.start = self.saved["start"]
        loop.seen.recall(self.saved["seen"])
        rng.restore(loop.start)
        self._outputs.begin()

    def end(self) -> None:
        self._outputs.end()

    # ------------------------------------------------------------------ on the way

    def is_here(self, side: int, trace: Trace) -> bool:
        point = self._recorded.point
        return point.side == side and trace.events == point.events

    def check_open(self, number: int, total: int) -> None:
        self._recorded.check_open(number, total)

    def check_ahead(self, trace: Trace) -> None:
        self._recorded.check_ahead(trace)

    def has_next(self, one: Watched) -> bool:
        return self._recorded.check_fetch(one.number, one.delivered)

    def batch(self, one: Watched) -> Any:
        one.delivered += 1
        position = self._mine["positions"].get(str(one.number))
        if position is not None and one.delivered == position["delivered"]:
            held = self.saved["held"].get(str(one.number))
            if held is not None:
                return held
            if self._ahead and not any(state is not None for state in position.get("workers", ())):
                return self._last_batch(one, position)
        return self._samples.of(one.loader)

    def _last_batch(self, one: Watched, position: dict[str, Any]) -> Any:
        """The last batch before the point, fetched again: a loader that is ahead has yet to hand it to the script."""
        before = {**position, "delivered": position["delivered"] - 1}
        if position.get("skip", 1) < 1 or "ahead" in position:
            return self._samples.of(one.loader)
        if "skip" in before:
            before["skip"] -= 1
        self._loop.feeds.put_start(self.saved.get("feeds", {}), one.number)
        one.open(before)
        assert one.batches is not None
        if not before["delivered"] and position["first"] is not None:
            rng.restore(position["first"])
        return next(one.batches)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._outputs.before_step(optimizer)

    def after_step(self) -> None:
        self._outputs.after_step()

    # ------------------------------------------------------------------ there

    def arrive(self, loop: Followed, trace: Trace) -> None:
        """Put the state in place. All ranks do this at their points of one step."""
        self._recorded.check_arrival(trace)
        self.end()
        loop.seen.arrive(self.saved["point"]["seen"])
        loop.adopt()
        self._load(loop.objects, loop.rank)
        loop.put_attributes(self.run["follow"]["attributes"])
        self._put_gradients(loop.objects)
        feeds, closed = loop.feeds, loop.closed_loaders()
        for number, states in self.saved["generators"].items():
            if int(number) in closed:
                _set_generators(closed[int(number)], states)
        for number, workers in self.saved.get("idle", {}).items():
            if int(number) in closed:
                IdleWorkers.put_back(plain_view(closed[int(number)]), workers)
        passes = {str(one.number): one for one in loop.open_passes()}
        positions = self._mine["positions"]
        missing = sorted(positions.keys() - passes.keys(), key=int)
        if missing:
            raise astray(f"pass {int(missing[0]) + 1} over a loader, which was going on, is not going on now")
        lost = sorted(passes.keys() - positions.keys(), key=int)
        if lost:
            raise StateError(
                f"where pass {int(lost[0]) + 1} over a loader was is not known: it died with this rank. "
                f"HOLDFAST_RESUME=never starts anew; another checkpoint may be left, see holdfast ls"
            )
        for number, position in positions.items():
            one = passes[number]
            assert isinstance(one, Watched)
            if one.batches is None:
                feeds.put_start(self.saved.get("feeds", {}), one.number)
                one.open(position)
        variables = Variables.of(self.saved)
        if variables.cut:
            log.warning(
                "the checkpoint lacks variables of the script, which are now what the replay made of them: %s. If they "
                "matter, holdfast.track keeps them",
                "; ".join(variables.cut),
            )
        strange = loop.frames.put_back(sys._getframe(), variables)
        if strange and self.saved["exact"]:
            names = ", ".join(sorted({path.split(" ", 1)[1].replace(" ", ": ") for path in strange})[:5])
            log.warning("these variables could not be given what they held: %s. If they matter, holdfast.track", names)
        feeds.put_now(self.saved.get("feeds", {}))
        for name, order in loop.objects.gradient_orders.items():
            order.repeat(self.run["gradient_orders"].get(name, []))
        rng.restore(self._mine["random"])
        if loop.rank == 0:
            seconds = time.monotonic() - self._began
            log.info("replayed %d steps in %.1f s, training goes on", self.step, seconds)

    def _load(self, objects: Objects, rank: int) -> None:
        names = sorted((*objects.models, *objects.optimizers, *objects.small))
        before = sorted(self.run["follow"]["names"])
        copies = self._copies(objects, set(names) ^ set(before), rank)
        if names != before and not copies:
            raise astray(f"it has made {', '.join(names)} up to here, and the run had made {', '.join(before)}")
        # Saved elsewhere than at the point, schedulers and what they set may be further than the point is. The replay
        # has brought them there.
        settings: dict[str, list[dict[str, Any]]] = {}
        small, models = dict(objects.small), dict(objects.models)
        objects.models = {name: model for name, model in models.items() if name not in copies}
        if not self.saved["exact"]:
            schedulers = torch.optim.lr_scheduler.LRScheduler
            objects.small = {name: one for name, one in objects.small.items() if not isinstance(one, schedulers)}
            for name, optimizer in objects.optimizers.items():
                settings[name] = [
                    {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
                ]
        try:
            self._contents.put_into(objects)
        except (StateError, ValueError, RuntimeError, KeyError) as error:
            raise astray(f"what it has made does not fit what was saved ({error})") from error
        finally:
            objects.small, objects.models = small, models
        for name, groups in settings.items():
            for group, values in zip(objects.optimizers[name].param_groups, groups, strict=True):
                group.update(values)

    def _copies(self, objects: Objects, different: set[str], rank: int) -> set[str]:
        """Models that this rank, or rank 0, which saves them for all, has beside those that are trained; none if more
        than these is different.

        Copies that were made or dropped after the point are made by what follows it and runs again."""
        if (self.saved["exact"] and rank == 0) or not all(name.startswith("model_") for name in different):
            return set()
        trained = {
            id(parameter)
            for optimizer in objects.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        mine = sorted(different & objects.models.keys())
        if any(id(parameter) in trained for name in mine for parameter in objects.models[name].parameters()):
            return set()
        if mine and self.saved["exact"]:
            log.warning(
                "rank %d has %s, and rank 0, which saves models for all, had not: what was in it is lost",
                rank,
                " and ".join(mine),
            )
        return different

    def _put_gradients(self, objects: Objects) -> None:
        """None, or what they were. Those that no checkpoint holds become zeros: the script is about to clear them."""
        for name, there in self.run["follow"]["gradients"].items():
            optimizer = objects.optimizers[name]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            values = self.saved.get("gradients", {}).get(name) or [None] * len(parameters)
            for parameter, flag, value in zip(parameters, there, values, strict=True):
                parameter.grad = torch.zeros_like(parameter) if flag == "1" else None
                if parameter.grad is not None and value is not None:
                    parameter.grad.copy_(value)
