"""Where a PyTorch loop is, and its state as files, whichever thread asks.

The hot path is ``Run.step``, ``Run.batches`` and :meth:`Loop.boundary`: one record in the black box and one comparison.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from holdfast.engine.engine import Engine
from holdfast.engine.saving import Adopted, Files, Saver
from holdfast.recorder.blackbox import BlackBox, Record, read_box
from holdfast.recorder.boxes import BOUNDARY, IN_FLIGHT
from holdfast.recorder.buffers import KeptBuffers, read_kept
from holdfast.recorder.shared import read_left
from holdfast.staging.arena import Arena
from holdfast.staging.images import TensorImage
from holdfast.store.manifest import Manifest
from holdfast.torch import rng
from holdfast.torch.backward import BeforeBackward
from holdfast.torch.data.batches import Batches
from holdfast.torch.state import Objects, rank_file, read_tree, total_bytes, tree_image, write_tree
from holdfast.torch.unchanged import Comparison, Memory

Place = tuple[int, int, dict[str, Batches]]


class _NoBatches:
    delivered = 0


class Loop:
    """The position of a training loop. One thread trains and writes it; others read."""

    def __init__(self, objects: Objects, box: BlackBox, rank: int, *, rescue: bool) -> None:
        self.objects = objects
        self.box = box
        self._note = box.note
        self._tracked = objects.tracked
        self.rank = rank
        self.step = 0
        self.place = (0, 0, {})
        self.pending = True
        """The boundary of the last step is still ahead. The first fetch is one too: a notice then need not wait."""
        self.dirty = False
        """Training is between an optimizer's step and the end of that step: model, optimizer and scheduler disagree."""
        self.frozen = False
        self.over = False
        self.engine: Engine | None = None
        self.saver: Saver | None = None
        self._arena = Arena()
        self._memory = Memory()
        self._rescue = rescue
        # Known from the start, so that no other thread need ask a model that is just computing: FSDP2's state_dict
        # frees what its forward pass has gathered. An optimizer holds about two more values for each parameter.
        self._size = 3 * sum(_bytes(model) for model in objects.models.values())
        self._buffers: KeptBuffers | None = None
        self._versions: dict[int, int] = {}
        self._hooks: list[Any] = []

    @property
    def place(self) -> Place:
        """Epoch, passes begun, and the passes that are open; replaced as one, so that readers see them agree."""
        return self._place

    @place.setter
    def place(self, place: Place) -> None:
        self._place = place
        # For the training thread alone, which sets them too: quicker to look at.
        self._epoch, self._passes, active = place
        self.opened = tuple(active.values())
        self._latest: Batches | type[_NoBatches] = self.opened[-1] if active else _NoBatches

    # ------------------------------------------------------------------ called by the training thread

    def hook(self, *, backward: bool) -> None:
        """Learn when the optimizers step, and where a backward pass begins."""
        for optimizer in self.objects.optimizers.values():
            self._hooks.append(optimizer.register_step_pre_hook(self._before_optimizer))
        if backward:
            self._hooks.append(BeforeBackward(self._before_backward))

    def unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def boundary(self, epochs_done: int | None = None) -> None:
        """What the loop does after the step is done too. In steady state: one record and one comparison."""
        self.pending = False
        step = self.step
        self._note(BOUNDARY, step, self._epoch, self._passes, self._latest.delivered)
        if self._buffers is not None:
            self._buffers.keep(step)
        if self._tracked:
            self.objects.note_boundary()
        engine = self.engine
        if engine is not None and (step >= engine.next_stop or epochs_done is not None):
            engine.at_boundary(step, epoch=epochs_done)

    def _before_optimizer(self, *_: Any) -> None:
        self._begin_change()
        self._note_in_flight()

    def _begin_change(self) -> None:
        # The order matters: a thread that freezes sets its flag first and looks at ours second.
        self.dirty = True
        while self.frozen:
            self.dirty = False
            time.sleep(0.05)
            self.dirty = True

    def _before_backward(self) -> None:
        if not self.pending:  # else an evaluation, which belongs to the step before
            self._note_in_flight()

    def _note_in_flight(self) -> None:
        self._note(IN_FLIGHT, self.step + 1, self._epoch, self._passes, self._latest.delivered)
        if self._buffers is not None and self.rank == 0:
            self._buffers.keep(self.step + 1)

    def open_pass(self, name: str, batches: Batches) -> None:
        """A pass over a loader begins, or goes on. This is a boundary too: making the iterator drew random numbers."""
        epoch, passes, active = self.place
        self.place = (epoch, passes + 1, {**active, name: batches})
        self._leave_base(name)
        self.box.note(BOUNDARY, self.step, epoch, passes + 1, batches.delivered)

    def on_first_batch(self, name: str) -> None:
        """The order of the pass is known now."""
        self._leave_base(name)
        self.watch_buffers()

    def _leave_base(self, name: str) -> None:
        """Leave beside the black box what does not change until the end of the pass."""
        if self.box.path is not None:
            epoch, passes, active = self.place
            base = {"epoch": epoch, "passes": passes, "name": name, "position": active[name].pass_start()}
            self.box.leave("position", write_tree(base))

    def watch_buffers(self) -> None:
        """Find the buffers that a forward pass changes: a save from inside a step needs them as they were before it."""
        if not self._rescue:
            return
        moving = []
        for model in self.objects.models.values():
            for module in model.modules():
                running = getattr(module, "track_running_stats", False)
                for buffer in module._buffers.values():
                    if buffer is None:
                        continue
                    seen = self._versions.setdefault(id(buffer), buffer._version)
                    if running or buffer._version != seen:
                        moving.append(buffer)
        if len(moving) != (len(self._buffers.tensors) if self._buffers is not None else 0):
            if self._buffers is not None and not moving:  # those of a model that the script has dropped
                self._buffers.remove()
                self._buffers = None
                return
            self._buffers = KeptBuffers(moving, f"{self.box.path}.buffers" if self.box.path else None)
            self._buffers.keep(self.step)

    # ------------------------------------------------------------------ asked by the engine, from any thread

    def soonest(self) -> int:
        # At its end a rank stops nowhere any more: the others come to theirs too, or all would save different places.
        return self.step if self.pending and not self.over else self.step + 1

    def last_boundary(self) -> int:
        return self.step

    def epoch(self) -> int:
        return self.place[0]

    def freeze(self, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while True:
            self.frozen = True
            if not self.dirty:
                return True
            self.frozen = False
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)

    def size(self) -> int:
        return self._size

    def prepare(self) -> None:
        shared = self.objects.shared_images({}, {}, at_boundary=True) if self.rank == 0 else []
        self._arena.prepare([*self.objects.own_images(), *shared])

    def files(self, *, live: bool, at_boundary: bool) -> Files:
        step = self.step
        objects_now = at_boundary or self._rests()
        record = None if at_boundary else _record_of(self.box.records(), step)
        tree = self._own_tree(record)
        inexact: list[str] = []

        def own() -> list[Any]:
            return [*self.objects.own_images(), tree_image(rank_file(self.rank), tree)]

        def shared() -> list[Any]:
            run = self._run_tree(step, tree)
            buffers = self._buffers_at(step, at_boundary, inexact)
            images = self.objects.shared_images(run, buffers, at_boundary=objects_now)
            self._size = total_bytes(images)
            return images

        if live:
            return Files(
                own=own,
                shared=lambda: Comparison(shared(), self._committed(), self._memory).parts(),
                of=lambda rank: self._part_of(rank, step),
                inexact=inexact,
            )
        own_staged = self._stage(own())
        if self.rank:
            return Files(own=lambda: own_staged, shared=list)
        comparison = Comparison(shared(), self._committed(), self._memory, self._stage)
        shared_staged = comparison.parts()
        return Files(own=lambda: own_staged, shared=lambda: shared_staged, settle=comparison.settle)

    def _rests(self) -> bool:
        """Whether the objects are those of the last step, and what was kept of them at a boundary those of the one
        before: in an evaluation, say."""
        return self.pending

    def _committed(self) -> Manifest | None:
        return self.saver.committed if self.saver is not None else None

    def _own_tree(self, record: Record | None) -> dict[str, Any]:
        """What belongs to this rank: as it is now, or as ``record`` has it."""
        epoch, passes, active = self.place
        if record is not None and record.passes != passes:
            # Another pass, or epoch, was just being opened: what the record knows is the boundary before that.
            epoch, passes, active = record.epoch, record.passes, {}
        return {
            "random": rng.capture() if record is None else record.random,
            "positions": {name: batches.position() for name, batches in active.items()},
            "epoch": epoch,
            "passes": passes,
        }

    def _run_tree(self, step: int, own: dict[str, Any]) -> dict[str, Any]:
        """What is the same on all ranks, beside the objects."""
        orders = {name: ddp.order for name, ddp in self.objects.gradient_orders.items()}
        return {"step": step, "epoch": own["epoch"], "passes": own["passes"], "gradient_orders": orders}

    def _buffers_at(self, step: int, at_boundary: bool, inexact: list[str]) -> dict[int, torch.Tensor]:
        """By id, what to save instead of live buffers: their values at the boundary, and rank 0's where it is dead."""
        if self._buffers is None:
            return {}
        values = None if at_boundary else self._buffers.at(step)
        if self.rank != 0:
            of_leader = read_kept(f"{self._box_of(0)}.buffers", self._buffers.tensors, step)
            values = of_leader or values
            if of_leader is None:
                inexact.append(f"running statistics are those of rank {self.rank} instead of rank 0")
        return {id(live): value for live, value in zip(self._buffers.tensors, values or (), strict=False)}

    def _box_of(self, rank: int) -> str:
        assert self.box.path is not None
        return os.path.join(os.path.dirname(self.box.path), f"rank-{rank}")

    def remove_traces(self) -> None:
        """What was kept for survivors is not needed any more."""
        if self._buffers is not None:
            self._buffers.remove()
        self.box.remove()

    def _stage(self, images: list[Any]) -> list[Any]:
        copied = iter(self._arena.stage([image for image in images if not isinstance(image, Adopted)]))
        return [image if isinstance(image, Adopted) else next(copied) for image in images]

    def _part_of(self, rank: int, step: int) -> list[TensorImage] | None:
        """Another rank's part, from its black box on this machine."""
        tree = self._tree_of(rank, step)
        return None if tree is None else [tree_image(rank_file(rank), tree)]

    def _tree_of(self, rank: int, step: int) -> dict[str, Any] | None:
        path = self._box_of(rank)
        try:
            record = _record_of(read_box(path)[2], step, self.place[1])
        except (OSError, ValueError):
            return None
        if record is None or (record.kind == IN_FLIGHT and self._draws_after(step, record.passes)):
            return None
        try:
            base = read_tree(bytearray(read_left(f"{path}.position")))
        except FileNotFoundError:
            base = {"passes": 0}
        except (OSError, ValueError):
            return None
        positions = {}
        if base["passes"] == record.passes and base["epoch"] == record.epoch == self.place[0]:
            position = base["position"]
            if any(state is not None for state in position.get("workers", ())):
                return None  # its loader workers had a random state of their own, which died with them
            if record.delivered and position["first"] is None:
                return None
            if "skip" in position:
                position["skip"] += record.delivered - position["delivered"]
            position["delivered"] = record.delivered
            positions[base["name"]] = position
        return {"random": record.random, "positions": positions, "epoch": record.epoch, "passes": record.passes}

    def _draws_after(self, step: int, passes: int) -> bool:
        """Whether the code between a step and the next pass draws random numbers, which a rank that died did not."""
        mine = [record for record in self.box.records() if record.step == step and record.passes == passes]
        inside = [record.random["torch"] for record in mine if record.kind == IN_FLIGHT]
        after = [record.random["torch"] for record in mine if record.kind == BOUNDARY]
        if after and not inside:
            return True  # it is not known any more
        return any(not torch.equal(state, inside[-1]) for state in after)


def _record_of(records: list[Record], step: int, passes: int | None = None) -> Record | None:
    """The record of the end of ``step``; one from inside the step where its boundary left none.

    ``passes``: begun by the rank that saves. One that is ahead of it has drawn random numbers to open its next pass.
    """
    of_step = [record for record in records if record.step == step]
    boundaries = [record for record in of_step if record.kind == BOUNDARY]
    not_ahead = [record for record in boundaries if passes is None or record.passes <= passes]
    return (not_ahead or boundaries or of_step)[-1] if of_step else None


def _bytes(model: torch.nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in (*model.parameters(), *model.buffers()))
