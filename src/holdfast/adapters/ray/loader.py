"""The loaders that ``ray.train.torch.prepare_data_loader`` makes: they fetch one batch ahead of the script.

A pass over such a loader is where the script is in it, not where the loader inside is: that one is a batch ahead, and
what it fetched was drawn from the random state of that moment. So the batch that is held belongs to the position.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.train.torch.train_loop_utils import _WrappedDataLoader

from holdfast.adapters.ray.patches import RAY
from holdfast.adapters.replay.loaders import register_loader
from holdfast.adapters.replay.loop import fits
from holdfast.adapters.replay.views import plain_view
from holdfast.torch import rng
from holdfast.torch.data.batches import Batches, Mark

log = logging.getLogger("holdfast")


def register() -> None:
    """Let loops over them be followed, before the follower starts."""
    register_loader(_WrappedDataLoader, Prefetching, owner="ray", table=RAY)


class Prefetching(Batches):
    """One pass over a loader of Ray's, in the same order of fetches as Ray's own iterator."""

    def __init__(self, loader: Any, position: dict[str, Any] | None = None) -> None:
        self._outer: Any = loader
        self._held: Any = None
        self.delivered = position["delivered"] if position else 0
        inner = dict(position) if position else None
        ahead = inner.pop("ahead") if inner is not None else None
        known = ahead is not None and ahead["delivered"] == self.delivered
        if inner is not None and ahead is not None:
            if known and (ahead["held"] is not None or ahead["over"]):
                inner["delivered"] = ahead["inner"]
            elif "skip" in inner:
                inner["skip"] = max(0, inner["skip"] - (ahead["inner"] - ahead["delivered"]))
        self._inner = Batches(plain_view(loader._dataloader), inner)
        if known and ahead is not None and (ahead["held"] is not None or ahead["over"]):
            self._held = loader._move_to_device(ahead["held"])
        else:
            before = rng.capture() if position else None
            self._prefetch()
            if before is not None and _moved(before):
                log.warning(
                    "the batch that was fetched ahead is fetched again, and its dataset draws random numbers in this "
                    "process: it may differ from that of an uninterrupted run"
                )
        self.mark()

    def __len__(self) -> int:
        return len(self._outer)

    def __next__(self) -> Any:
        held = self._held
        if held is None:
            raise StopIteration
        self._outer._wait_for_batch(held)
        self._prefetch()
        self.delivered += 1
        return held

    def _prefetch(self) -> None:
        self._held = self._outer._move_to_device(next(self._inner, None))

    def mark(self) -> Mark:
        # One tuple, so that another thread sees values that agree.
        self._marked = (self.delivered, self._inner.mark(), self._held)
        return self.delivered, self._marked[1][1]

    def position(self, mark: Mark | None = None) -> dict[str, Any]:
        delivered, inner, held = self._marked
        return self._with_ahead(self._inner.position(inner), delivered, inner[0], held)

    def pass_start(self) -> dict[str, Any]:
        delivered, inner, _ = self._marked
        return self._with_ahead(self._inner.pass_start(), delivered, inner[0], None)

    @staticmethod
    def _with_ahead(position: dict[str, Any], delivered: int, inner: int, held: Any) -> dict[str, Any]:
        over = held is None and inner == delivered
        return {
            **position,
            "delivered": delivered,
            "ahead": {"delivered": delivered, "inner": inner, "held": held if fits(held) else None, "over": over},
        }

    def close(self, *, keep_persistent: bool = False) -> None:
        self._held = None
        self._inner.close(keep_persistent=keep_persistent)

    @staticmethod
    def adapt(loader: Any, batch: Any) -> Any:
        """A batch of the loader inside, as this one hands it out."""
        return loader._move_to_device(batch)


def _moved(before: dict[str, Any]) -> bool:
    """Whether random numbers were drawn since."""
    now = rng.capture()
    pairs = ((now["torch"], before["torch"]), (now["python"]["words"], before["python"]["words"]))
    return any(bool((one != other).any()) for one, other in pairs)
