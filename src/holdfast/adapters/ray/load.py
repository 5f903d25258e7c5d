"""For training functions that load a just-in-time checkpoint themselves."""

from __future__ import annotations

from typing import Any

from holdfast.adapters.ray.storage import uri_of
from holdfast.errors import CheckpointNotFoundError
from holdfast.store import open_backend
from holdfast.store.checkpoints import open_checkpoint


def load(checkpoint: Any, **objects: Any) -> int:
    """Put a just-in-time checkpoint, which ``ray.train.get_checkpoint()`` gave, into ``objects``.

    ``model=``, ``optimizer=``, ``scheduler=`` and so on: what the training function had made when it was saved, in that
    order; a second one of a kind is ``model_2=``. Returns how many optimizer steps it holds. Every byte is checked.
    Raises :class:`~holdfast.errors.CheckpointNotFoundError` if it is no just-in-time checkpoint.
    """
    import torch.distributed as dist

    from holdfast.torch.restore import Contents
    from holdfast.torch.state import Objects

    location, _, name = uri_of(checkpoint).rpartition("/")
    found = open_checkpoint(open_backend(location), name) if name.startswith("checkpoint-") else None
    if found is None:
        raise CheckpointNotFoundError(f"{location}/{name} is not a just-in-time checkpoint")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    Contents(found, rank, world).put_into(Objects(objects, rank, incremental=False))
    return found.step
