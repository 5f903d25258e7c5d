"""Where a followed loop is, and its state as files.

A *point* is a moment at which another process can go on: before a fetch, before a pass over a loader begins, after
an optimizer step. Points are noted as they come, which costs about what a boundary of :class:`Run` costs; a save
is of the last one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from holdfast.adapters.replay.feeds import Feeds
from holdfast.adapters.replay.frames import LIMIT, Frames, Noted, Variables
from holdfast.adapters.replay.objects import Registry
from holdfast.adapters.replay.reads import Seen, read_mirror
from holdfast.adapters.replay.trace import AFTER, Trace, table_of
from holdfast.adapters.replay.views import idle_workers
from holdfast.adapters.replay.walk import addresses
from holdfast.config import Settings
from holdfast.engine.saving import Files
from holdfast.errors import StateError
from holdfast.recorder.blackbox import BlackBox, Record, read_box
from holdfast.recorder.boxes import BOUNDARY, IN_FLIGHT
from holdfast.recorder.shared import read_left
from holdfast.runtime.session import Place
from holdfast.staging.images import TensorImage
from holdfast.torch import rng
from holdfast.torch.backward import BeforeBackward
from holdfast.torch.codec import encode
from holdfast.torch.data.batches import Batches, _generators
from holdfast.torch.loop import Loop, _record_of
from holdfast.torch.state import Objects, rank_file, read_tree, tree_image, write_tree

log = logging.getLogger("holdfast")

_ABSENT = object()
_MOST_GRADIENTS = 64 << 20
"""Bytes of gradients that a checkpoint holds for each rank: of those that the script has not cleared yet."""
_LARGEST = 256 << 20
"""Bytes of a batch that a checkpoint holds for each rank. A larger one is fetched again."""

VERSION = 1
"""Of what a checkpoint holds for a replay."""


class Pass:
    """One pass over a loader, as far as a checkpoint must know it."""

    def __init__(self, loader: Any, number: int) -> None:
        self.loader = loader
        self.number = number
        self.batches: Batches | None = None
        """None while the pass is replayed."""
        self.last: Any = None
        """The last batch that the script got,"""
        self.held: Any = None
        """and the one before the last point: loaders that fetch ahead hold it back."""
        self.ended = False
        self.fresh = False
        """Whether a batch was fetched since the last step, but for evaluations."""
        self.trains = False
        """Whether an optimizer has stepped since its last batch was fetched, ever."""


class Followed(Loop):
    """The position of a loop that is followed from outside."""

    def __init__(
        self, registry: Registry, trace: Trace, seen: Seen, box: BlackBox, place: Place, settings: Settings
    ) -> None:
        rank, incremental = place.rank, settings.save_type == "incremental"
        super().__init__(Objects({}, rank, incremental=incremental), box, rank, rescue=settings.rescue)
        self.registry = registry
        self.trace = trace
        self.seen = seen
        self.frames = Frames()
        self.feeds = Feeds()
        self.thread = threading.get_ident()
        self.passes: list[weakref.ref[Pass]] = []
        """Those that are open."""
        self.loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The number of the last pass over each loader."""
        self.latest: weakref.ref[Pass] | None = None
        """The one that gave the last batch."""
        self.start: dict[str, Any] = {}
        """The random state as the loop began,"""
        self.birth: dict[str, Any] = {}
        """and how the script came there."""
        self.main: torch.nn.Module | None = None
        """The model that is trained, or the first of them."""
        self._incremental = incremental
        self._alone = place.world == 1
        self.broken: FrameType | None = None
        """Where the script was when it was thrown out of its loop."""
        self.resting = False
        """Whether what the loop does now belongs to the step that is complete."""
        self.lost: list[str] = []
        """What the save that is under way cannot hold exactly."""
        self.notes: Callable[[], dict[str, Any]] = dict
        """What whoever runs the script wants to know again when the loop is replayed, at a save,"""
        self.saves: Callable[[], None] = lambda: None
        """Called as a save begins."""
        self.recalled: dict[str, Any] = {}
        """and what it said at the save that this process goes on from."""
        self._unknown_workers = False
        """Whether the last save could not tell the random state of workers that wait for a pass."""
        self._cut: list[str] = []
        """Variables of the script that the last save could not hold, in words."""
        self.behind = False
        """Whether the last point is not where the loop is now."""
        self._version = -1
        """Of the registry, as the script's objects were looked at."""
        self._baseline: dict[str, Any] | None = None
        self._point = (AFTER, 0, 0, 0, 0, 0)
        """Side, events and their digest, step, reads and passes."""
        self._exact = True
        """Whether the save that is under way is made at its point."""
        self._variables: Noted | None = None
        self.fetches: list[int] = []
        """Batches that came before the first two steps, each."""
        self._since: dict[int, tuple[Batches, Any]] = {}
        """Passes that have ended since."""

    # ------------------------------------------------------------------ called by the training thread

    def adopt(self) -> None:
        """Look at what the script has made so far: from now on that is the state."""
        dirty = self.dirty
        self._begin_change()
        try:
            self._adopt()
        finally:
            self.dirty = dirty

    def _adopt(self) -> None:
        self._version = self.registry.version
        self._forget_copies()
        self.objects = self.registry.objects(self.rank, incremental=self._incremental)
        self.objects.check()
        self._tracked = self.objects.tracked
        if self.saver is not None:
            self.saver.replicated = not self.objects.sharded
        models = self.objects.models.values()
        self.main = next(iter(models), None)
        if self._rescue and not self._alone and not self._hooks:
            self._hooks.append(BeforeBackward(self._before_backward))
        self.watch_buffers()
        if self._baseline is None:
            self._baseline = self._plain()
        self._size = 3 * sum(value.nbytes for model in models for value in (*model.parameters(), *model.buffers()))

    def _forget_copies(self) -> None:
        """Let go of models that nobody else holds, such as the best one before there was a better one, and of an
        optimizer that the script has replaced: how many there are must be as in a replay, which does not hold them.
        DDP's are in cycles."""
        objects = self.objects
        objects.optimizers, objects.small = {}, {}
        trained = {name: model for name, model in objects.models.items() if self.registry.is_trained(model)}
        objects.models, self.main = trained, None
        objects.gradient_orders = {name: one for name, one in objects.gradient_orders.items() if name in trained}
        if not all(self.registry.is_trained(root) for root in self.registry.roots()):
            gc.collect()

    def note(self, side: int, *, rarely: bool = False, random: bool = True) -> None:
        """This is a point. ``rarely``: one at which the script may stay for long, an evaluation say. ``random``: note
        the random state too; not needed where another point follows at once."""
        trace = self.trace
        self._variables = self.frames.note(sys._getframe(), self._known_memory()) if rarely else None
        delivered = 0
        for ref in self.passes:
            one = ref()
            if one is not None and one.batches is not None:
                one.batches.mark()
                one.held = one.last
                delivered = one.batches.delivered
        passes = len(trace.table)
        self._point = (side, trace.events, trace.digest, self.step, len(self.seen.values), passes)
        if random:
            self._note(BOUNDARY, self.step, trace.events * 2 + side, passes, delivered)
            if not self._alone:
                self.seen.mark(trace.events)
        self.feeds.note()
        self.frames.note_generators()
        if self._since:
            self._since.clear()
        if self._buffers is not None:
            self._buffers.keep(self.step)
        if self._tracked:
            self.objects.note_boundary()

    def complete_step(self, *, random: bool = True) -> None:
        """The optimizers have stepped: this is a point too, before all that the script does next."""
        self.step += 1
        self.pending = True
        self.resting = True
        self.note(AFTER, random=random)
        self.dirty = False

    def _note_in_flight(self) -> None:
        if self._alone:
            return
        # The point that this becomes if all goes well: after the step, which is one more event.
        delivered = 0
        latest = self.latest() if self.latest is not None else None
        if latest is not None and latest.batches is not None:
            delivered = latest.batches.delivered
        trace = self.trace
        self._note(IN_FLIGHT, self.step + 1, (trace.events + 1) * 2 + AFTER, len(trace.table), delivered)
        if self._buffers is not None and self.rank == 0:
            self._buffers.keep(self.step + 1)

    def count_fetches(self, one: Pass | None) -> None:
        """A step: how many batches came before it tells whether the loader is ahead of the script."""
        if len(self.fetches) < 2 and one is not None and one.batches is not None:
            self.fetches.append(one.batches.delivered - sum(self.fetches))

    def ahead(self) -> bool:
        """Whether the script may not have got what its loaders have given: more came before its first step."""
        return len(self.fetches) < 2 or self.fetches[0] != self.fetches[1]

    def open_passes(self) -> list[Pass]:
        return [one for ref in self.passes if (one := ref()) is not None]

    def closed_loaders(self) -> dict[int, Any]:
        """Loaders that no pass is open of, by the number of their last one: their generators go on later."""
        open_now = {one.number for one in self.open_passes()}
        return {number: loader for loader, number in list(self.loaders.items()) if number not in open_now}

    def prepare_pass(self, loader: Any, number: int) -> None:
        """A pass is about to begin: what feeds it has not been asked yet."""
        self.feeds.begin_pass(loader, number, {*self._since, *(one.number for one in self.open_passes())})

    def _closed_states(self) -> dict[str, Any]:
        """What loaders that no pass is open of keep for their next one: their generators, and persistent workers."""
        closed = {str(number): loader for number, loader in self.closed_loaders().items()}
        workers = {number: idle for number, loader in closed.items() if (idle := idle_workers(loader)) is not None}
        if not all(idle.known for idle in workers.values()):
            self._unknown_workers = True
        return {
            "generators": {
                number: [generator.get_state() for generator in _generators(loader)]
                for number, loader in closed.items()
            },
            "idle": {number: idle.tree() for number, idle in workers.items()},
        }

    def begin_pass(self, one: Pass) -> None:
        self.loaders[one.loader] = one.number
        self.passes = [*(ref for ref in self.passes if ref() is not None), weakref.ref(one)]
        self.leave_base()

    def end_pass(self, one: Pass) -> None:
        self.passes = [ref for ref in self.passes if ref() not in (None, one)]
        one.ended = True
        self.forget(one)

    def forget(self, one: Pass) -> None:
        """The script has no more use for this pass; but the last point may be inside it."""
        if one.batches is not None:
            self._since[one.number] = (one.batches, one.held)

    def leave_base(self) -> None:
        """Leave beside the black box what does not change until another pass begins."""
        if self.box.path is None:
            return
        positions = {str(one.number): one.batches.pass_start() for one in self.open_passes() if one.batches is not None}
        base = {
            "positions": positions,
            "table": table_of(self.trace.table),
            "start": self.start,
            "birth": self.birth,
            **self._closed_states(),
        }
        self.box.leave("position", write_tree(base))

    # ------------------------------------------------------------------ asked by the engine, from any thread

    def soonest(self) -> int:
        # Alone, a loop without a loader may be stopped inside an evaluation: there is nobody to agree with.
        return self.step if self._alone and self._evaluates() else super().soonest()

    def rests_at(self, step: int) -> bool:
        # What runs again must find the script's tensors as they were: before an evaluation they were noted. In what
        # else follows a step they were not, so its end is waited for.
        noted = self.resting and self._variables is not None
        return self.step == step and (noted or (self._alone and self._evaluates()))

    def _evaluates(self) -> bool:
        return self.main is not None and not self.main.training and not self.dirty and self.step > 0

    def _own_tree(self, record: Record | None) -> dict[str, Any]:
        side, events, digest, step, seen, passes = self._point
        self._unknown_workers = False
        closed = self._closed_states()
        open_now = {one.number: (one.batches, one.held) for one in self.open_passes() if one.batches is not None}
        variables = self._variables_now()
        self._tell_what_is_cut(variables.cut)
        going_on = {number: one for number, one in {**self._since, **open_now}.items() if number < passes}
        return {
            "random": rng.capture() if record is None else record.random,
            "positions": {str(number): batches.position() for number, (batches, _) in going_on.items()},
            "epoch": self.place[0],
            "passes": passes,
            "follow": {
                "version": VERSION,
                "point": {"side": side, "events": events, "digest": digest, "step": step, "seen": seen},
                "table": table_of(self.trace.table[:passes]),
                "seen": self.seen.content(),
                **variables.tree(),
                "gradients": self._gradients(),
                "fetches": self.fetches,
                "held": {str(number): held for number, (_, held) in going_on.items() if self.ahead() and fits(held)},
                **closed,
                "feeds": self.feeds.tree(going_on),
                "start": self.start,
                "birth": self.birth,
                "exact": self._exact,
                "notes": self.notes(),
            },
        }

    def files(self, *, live: bool, at_boundary: bool) -> Files:
        # At the end of a run the last point is behind: what comes after it runs again if the run is started again.
        self.saves()
        self._exact = at_boundary and not self.over and not self.behind
        if not self._exact and self._version not in (-1, self.registry.version):
            with contextlib.suppress(StateError):
                self._adopt()  # the script has copied a model since; it does not train now, or another thread saves
        files = super().files(live=live, at_boundary=self._exact)
        self.lost = files.inexact if isinstance(files.inexact, list) else []
        behind = self.resting and self._variables is None and self.broken is None
        if not self._exact and behind and self._variables_now().content:
            self.lost.append(
                f"tensors of the script may have changed since step {self.step}, and what followed it runs again"
            )
        own_inexact = [f"variables of rank {self.rank}: {what}" for what in self._cut]
        if self._unknown_workers:
            own_inexact.append(f"how far idle persistent workers of rank {self.rank} have drawn is unknown")
        own_inexact += [f"what DDP's communication hook keeps is not saved ({state})" for state in self.hook_states()]
        return dataclasses.replace(files, own_inexact=own_inexact)

    def hook_states(self) -> list[str]:
        """What communication hooks keep from step to step."""
        return [state for order in self.registry.orders() if (state := order.hook_state())]

    def _rests(self) -> bool:
        return False  # what comes after the last point runs again

    def _variables_now(self) -> Variables:
        limit = max(LIMIT, self._size)
        if not self._exact and self._variables is not None:
            return self.frames.content_of(self._variables, limit)
        return self.frames.content(self._frame(), self._known_memory(), limit, exact=self._exact)

    def _tell_what_is_cut(self, cut: list[str]) -> None:
        # At the end of a run nothing is lost; a start of the complete run says what its checkpoint lacks.
        if cut and cut != self._cut and not self.over:
            log.warning(
                "the checkpoint of step %d lacks variables of the script: %s. holdfast.track keeps what matters",
                self.step,
                "; ".join(cut),
            )
        self._cut = cut

    def _frame(self) -> Any:
        if self.broken is not None:
            return self.broken
        if threading.get_ident() == self.thread:
            return sys._getframe()
        return sys._current_frames().get(self.thread)

    def _known_memory(self) -> set[int]:
        def tensors() -> Any:
            for model in self.objects.models.values():
                yield from model.parameters()
                yield from model.buffers()
            for optimizer in self.objects.optimizers.values():
                for group in optimizer.param_groups:
                    yield from group["params"]
                for state in optimizer.state.values():
                    if isinstance(state, dict):
                        yield from (value for value in state.values() if isinstance(value, torch.Tensor))

        return addresses(tensors())

    def _run_tree(self, step: int, own: dict[str, Any]) -> dict[str, Any]:
        gradients = {
            name: "".join(
                "0" if parameter.grad is None else "1"
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
            for name, optimizer in self.objects.optimizers.items()
        }
        names = [*self.objects.models, *self.objects.optimizers, *self.objects.small]
        follow = {"version": VERSION, "gradients": gradients, "names": names, "attributes": self._attributes()}
        return {**super()._run_tree(step, own), "follow": follow}

    def _gradients(self) -> dict[str, list[torch.Tensor | None]]:
        """Gradients as they are at the point, by optimizer, for a script that reads them or adds to them after it."""
        if not self._exact:
            return {}
        found = {
            name: [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            for name, optimizer in self.objects.optimizers.items()
        }
        there = [grad for grads in found.values() for grad in grads if grad is not None]
        if any(type(grad) is not torch.Tensor or grad.layout != torch.strided for grad in there):
            return {}
        return found if sum(grad.nbytes for grad in there) <= _MOST_GRADIENTS else {}

    def _attributes(self) -> dict[str, Any]:
        """Plain attributes of modules that have changed, such as a count of calls: a replay does not call them."""
        baseline = self._baseline or {}
        return {path: value for path, value in self._plain().items() if baseline.get(path, _ABSENT) != value}

    def _plain(self) -> dict[str, Any]:
        return {
            f"{model}/{path}/{key}": value
            for model, root in self.objects.models.items()
            for path, module in root.named_modules()
            for key, value in vars(module).items()
            if type(value) in (int, float, bool, str) and key != "training"
        }

    def put_attributes(self, attributes: dict[str, Any]) -> None:
        for where, value in attributes.items():
            model, path, key = where.split("/", 2)
            if model in self.objects.models:
                vars(self.objects.models[model].get_submodule(path))[key] = value

    def _part_of(self, rank: int, step: int) -> list[TensorImage] | None:
        """Another rank's part, from what it left on this machine. What died with it is named in ``lost``."""
        path = self._box_of(rank)
        try:
            record = _record_of(read_box(path)[2], step)
            base = read_tree(bytearray(read_left(f"{path}.position")))
        except (OSError, ValueError):
            return None
        if record is None or len(base["table"]) < record.passes:
            return None
        inside = record.kind == IN_FLIGHT
        table = base["table"][: record.passes].clone()
        positions = {name: one for name, one in base["positions"].items() if int(name) < record.passes}
        if len(positions) > 1 or any(record.delivered and one["first"] is None for one in positions.values()):
            return None  # one count of batches is known, and the order of a pass from its first batch on
        for number, position in positions.items():
            if any(state is not None for state in position.get("workers", ())):
                position["workers"] = [None] * len(position["workers"])
                self.lost.append(f"the random state of the loader's workers of rank {rank} is lost")
            elif self.ahead() and not position.get("workers"):
                self.lost.append(f"a batch that rank {rank} had fetched ahead is drawn again")
            if "skip" in position:
                position["skip"] += record.delivered - position["delivered"]
            position["delivered"] = record.delivered
            table[int(number), 1] = record.delivered
        events, side = divmod(record.epoch, 2)
        seen = read_mirror(f"{path}.seen", events)
        if seen is None:
            seen = {**Seen().content(), "lost": "it died with this rank"}
            self.lost.append(f"what the script of rank {rank} read out of tensors is lost")
        if not record.passes and self._variables_now().content:
            self.lost.append(f"tensors that variables of rank {rank} held are lost")
        if self.feeds.changed:
            self.lost.append(f"what datasets and samplers of rank {rank} kept for themselves is lost")
        if inside:
            seen["partial"] = True
            self.lost.append(f"values of step {step} that the script of rank {rank} had not yet read are lost")
            if self._draws_after(step, record.passes):
                self.lost.append(f"random numbers that rank {rank} had not yet drawn after step {step} are lost")
        tree = {
            "random": record.random,
            "positions": positions,
            "epoch": self.place[0],
            "passes": record.passes,
            "follow": {
                "version": VERSION,
                "point": {
                    "side": side,
                    "events": events,
                    "digest": None,
                    "step": step,
                    "seen": len(seen["values"]),
                },
                "table": table,
                "seen": seen,
                "variables": {},
                "fetches": self.fetches,
                "held": {},
                "generators": base["generators"],
                "idle": base["idle"],
                "start": base["start"],
                "birth": base["birth"],
                "exact": False,
            },
        }
        return [tree_image(rank_file(rank), tree)]

    def remove_traces(self) -> None:
        self.seen.remove()
        super().remove_traces()


def fits(batch: Any) -> bool:
    """Whether a checkpoint can hold it."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        encode(batch, "batch", tensors)
    except StateError:
        return False
    return bool(sum(tensor.nbytes for tensor in tensors.values()) <= _LARGEST)
