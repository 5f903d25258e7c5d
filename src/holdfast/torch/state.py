"""The objects of a run that have a state, as files and back.

``model.safetensors``      the weights, named as in ``state_dict()``: any safetensors reader loads them
``optimizer.safetensors``  the optimizer's tensors; the rest of its state is JSON in the file's metadata
``run.safetensors``        everything small: schedulers, scalers, counters, the user's own objects
``rank-<n>.safetensors``   what belongs to one rank: random state and data position

Names come from the keywords under which the objects were handed over. With ``incremental``, a model is
split into files of like content (``model-00001-of-00007.safetensors`` with an index, the layout that
transformers reads too), frozen parameters and buffers apart from the others, so that unchanged files are
stored once.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, MutableMapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from holdfast.errors import StateError
from holdfast.staging.images import METADATA, BytesImage, TensorImage, flat_bytes, parse
from holdfast.torch import sharded
from holdfast.torch.codec import decode, encode
from holdfast.torch.ddp import GradientOrder

RUN = "run.safetensors"
GROUP_BYTES = 64 << 20
"""Most bytes of a file of an incremental checkpoint, unless one tensor alone has more."""

Loaded = MutableMapping[str, tuple[dict[str, torch.Tensor], dict[str, str]]]
"""By path: the tensors and the metadata of a file."""

_LINE = 64
_SMALL = 64 << 10


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside DDP, ``torch.compile`` and the like: weights keep their own names."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def tree_image(path: str, tree: Any) -> TensorImage:
    """A file for any state."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = encode(tree, "state", tensors)
    return TensorImage(path, tensors, {METADATA: json.dumps(skeleton)})


def write_tree(tree: Any) -> bytes:
    """A state as the bytes of such a file."""
    image = tree_image("", tree)
    return image.header + b"".join(flat_bytes(tensor).numpy().tobytes() for tensor in image.tensors)


def read_tree(data: bytearray) -> Any:
    """The inverse of :func:`write_tree`."""
    return _tree(*parse(memoryview(data)))


def tree_of(loaded: Loaded, path: str) -> Any:
    return _tree(*loaded[path])


def _tree(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Any:
    # Copies: torch's generators misread a state that is a view.
    return decode(json.loads(metadata[METADATA]), {name: tensor.clone() for name, tensor in tensors.items()})


def _taken(loaded: Loaded, path: str) -> Any:
    """The state in a file, for somebody who keeps its tensors and writes to them: no one else has them from now on.

    Large ones are not copied. They lie where torch would have put them, on whole cache lines.
    """
    tensors, metadata = loaded.pop(path)
    own = {
        name: tensor.clone() if tensor.nbytes < _SMALL or tensor.data_ptr() % _LINE else tensor
        for name, tensor in tensors.items()
    }
    return decode(json.loads(metadata[METADATA]), own)


class Objects:
    """What was handed over to a run, by name."""

    def __init__(self, objects: Mapping[str, Any], rank: int, *, incremental: bool) -> None:
        self.models: dict[str, torch.nn.Module] = {}
        self.gradient_orders: dict[str, GradientOrder] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.small: dict[str, Any] = {}
        self.loaders: dict[str, Any] = {}
        self._rank = rank
        self._incremental = incremental
        self._snapshots: dict[str, Any] = {}
        for name, value in objects.items():
            if value is None:
                continue
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in ("run", "rank"):
                raise StateError(
                    f"{name!r} cannot be the name of an object: use letters, digits and _, not run or rank"
                )
            self._sort_in(name, value)
        self.sharded = any(sharded.is_sharded(model) for model in self.models.values())
        self.tracked = {name: value for name, value in self.small.items() if _changes_inside_a_step(value)}

    def _sort_in(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module) and not isinstance(value, torch.nn.modules.loss._Loss):
            self.models[name] = unwrap(value)
            wrapper = getattr(value, "_orig_mod", value)
            if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
                self.gradient_orders[name] = GradientOrder(wrapper)
        elif isinstance(value, torch.optim.Optimizer):
            if type(value).__name__ == "ZeroRedundancyOptimizer":
                raise StateError(f"{name}: ZeroRedundancyOptimizer holds a part of the state only; use FSDP2 instead")
            self.optimizers[name] = value
        elif isinstance(value, torch.utils.data.DataLoader):
            self.loaders[name] = value
        elif isinstance(value, torch.Generator | MutableMapping) or _has_state(value):
            self.small[name] = value
        else:
            raise StateError(
                f"{name} is a {type(value).__qualname__}, which has no state_dict() and load_state_dict(); accepted "
                f"are objects that have both, torch.Generator, dicts of plain values, and data loaders"
            )

    # ------------------------------------------------------------------ saving

    def check(self) -> None:
        """Refuse now what could not be saved later."""
        tree_image(RUN, self.small_state())
        for name, optimizer in self.optimizers.items():
            encode(optimizer.state_dict(), name, {})
        for name, model in self.models.items():
            for key, value in model.state_dict().items():
                if not isinstance(value, torch.Tensor):
                    raise StateError(
                        f"{name}: the state_dict entry {key!r} is a {type(value).__qualname__}, not a tensor"
                    )

    def note_boundary(self) -> None:
        """Keep what may change before the next boundary."""
        for name, value in self.tracked.items():
            self._snapshots[name] = copy.deepcopy(_state_of(value))

    def small_state(self, *, at_boundary: bool = True) -> dict[str, Any]:
        return {
            name: _state_of(value) if at_boundary or name not in self._snapshots else self._snapshots[name]
            for name, value in self.small.items()
        }

    def shared_images(self, extra: Any, buffers: Mapping[int, torch.Tensor], *, at_boundary: bool) -> list[Any]:
        """What one rank writes for all. ``buffers``: by id, what to write instead of tensors that have moved on."""
        images: list[Any] = []
        rest: dict[str, Any] = {}
        if not self.sharded:
            for name, model in self.models.items():
                state = {key: buffers.get(id(value), value) for key, value in model.state_dict(keep_vars=True).items()}
                images += self._model_images(name, state)
            for name, optimizer in self.optimizers.items():
                images.append(tree_image(f"{name}.safetensors", optimizer.state_dict()))
        else:
            for name, optimizer in self.optimizers.items():
                rest[name] = sharded.optimizer_tensors(self._model_of(optimizer), optimizer)[1]
        small = self.small_state(at_boundary=at_boundary)
        images.append(tree_image(RUN, {"objects": small, "sharded": rest, "run": extra}))
        return images

    def own_images(self) -> list[TensorImage]:
        """This rank's shards."""
        if not self.sharded:
            return []
        images = [sharded.shard_image(name, sharded.model_tensors(m), self._rank) for name, m in self.models.items()]
        for name, optimizer in self.optimizers.items():
            tensors, _ = sharded.optimizer_tensors(self._model_of(optimizer), optimizer)
            images.append(sharded.shard_image(name, tensors, self._rank))
        return images

    def _model_images(self, name: str, state: Mapping[str, torch.Tensor]) -> list[Any]:
        if not self._incremental:
            return [TensorImage(f"{name}.safetensors", {key: value.detach() for key, value in state.items()})]
        groups: list[tuple[int, dict[str, torch.Tensor]]] = []
        total = used = 0
        for kind, key, value in sorted(((_kind(value), key, value) for key, value in state.items()), key=_KIND):
            size = value.nbytes
            if not groups or groups[-1][0] != kind or used + size > GROUP_BYTES:
                groups.append((kind, {}))
                used = 0
            groups[-1][1][key] = value.detach()
            used += size
            total += size
        images: list[Any] = []
        weight_map: dict[str, str] = {}
        for index, (kind, tensors) in enumerate(groups, 1):
            path = f"{name}-{index:05d}-of-{len(groups):05d}.safetensors"
            images.append(TensorImage(path, tensors, volatile=kind == _TRAINED))
            weight_map.update(dict.fromkeys(tensors, path))
        index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
        images.append(BytesImage(f"{name}.safetensors.index.json", json.dumps(index_file).encode()))
        return images

    def _model_of(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self.models.values():
            if any(id(parameter) in ids for parameter in model.parameters()):
                return model
        raise StateError("an optimizer's parameters belong to none of the models that were handed over")

    # ------------------------------------------------------------------ restoring

    def load(self, loaded: Loaded, folder: str | None) -> Any:
        """Put a saved state back; returns what was saved beside it. ``folder``: where the files lie, for shards."""
        tree = tree_of(loaded, RUN)
        missing = sorted(self.small.keys() - tree["objects"].keys())
        if missing:
            raise StateError(
                f"the checkpoint holds no state for {missing[0]!r}, only for "
                f"{', '.join(sorted(tree['objects'])) or 'none'}. Hand over the same objects as in the run that saved"
            )
        if tree["sharded"] or self.sharded:
            assert folder is not None
            for name, model in self.models.items():
                sharded.load_model(model, f"{folder}/{name}")
            for name, optimizer in self.optimizers.items():
                rest = tree["sharded"][name]
                sharded.load_optimizer(self._model_of(optimizer), optimizer, f"{folder}/{name}", rest)
        else:
            for name, model in self.models.items():
                _load_model(name, model, _model_tensors(name, loaded))
            for name, optimizer in self.optimizers.items():
                _load_optimizer(optimizer, _taken(loaded, f"{name}.safetensors"))
        for name, value in self.small.items():
            _restore(value, tree["objects"][name])
        return tree["run"]


_FROZEN, _BUFFER, _TRAINED = range(3)
_KIND = itemgetter(0)


def _kind(value: torch.Tensor) -> int:
    """What is saved together: running statistics, which change, must not take frozen weights along."""
    if value.requires_grad:
        return _TRAINED
    return _FROZEN if isinstance(value, torch.nn.Parameter) else _BUFFER


def _model_tensors(name: str, loaded: Loaded) -> dict[str, torch.Tensor]:
    if f"{name}.safetensors" in loaded:
        return loaded[f"{name}.safetensors"][0]
    parts = [path for path in loaded if re.fullmatch(rf"{re.escape(name)}-\d+-of-\d+\.safetensors", path)]
    if not parts:
        raise StateError(f"the checkpoint holds no {name}; it has {', '.join(sorted(loaded))}")
    return {key: value for path in parts for key, value in loaded[path][0].items()}


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore its state. Groups keep the order of their options, and options that are unchanged stay the same objects:
    what the script pickles is the same to the byte."""
    before = optimizer.param_groups
    optimizer.load_state_dict(state)
    for group, was in zip(optimizer.param_groups, before, strict=True):
        loaded = dict(group)
        group.clear()
        for key in dict.fromkeys([*was, *loaded]):
            if key in loaded:
                unchanged = type(was.get(key)) is type(loaded[key]) in _OPTIONS and was[key] == loaded[key]
                group[key] = was[key] if unchanged else loaded[key]


_OPTIONS = (bool, int, float, str, tuple)


def _load_model(name: str, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise StateError(f"{name}: the checkpoint is of another model. {error}") from error


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _changes_inside_a_step(value: Any) -> bool:
    """Schedulers and scalers change between the optimizer's step and the boundary alone; of others nothing is known."""
    return not isinstance(value, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler)


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if _has_state(value):
        return value.state_dict()
    return dict(value)


def _restore(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif _has_state(value):
        value.load_state_dict(state)
    else:
        value.clear()
        value.update(state)


def total_bytes(images: Sequence[Any]) -> int:
    return sum(image.size for image in images)
