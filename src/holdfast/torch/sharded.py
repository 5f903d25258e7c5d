"""State that is spread over the ranks: FSDP2 and other DTensors.

Each rank writes the shards that it holds, with their place in the whole, as safetensors files that
``torch.distributed.checkpoint.HuggingFaceStorageReader`` reads without holdfast. Saving needs no
collective, so no rank can hang in it. Loading is torch.distributed.checkpoint's: any world size.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from holdfast.staging.images import TensorImage

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def is_sharded(module: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def model_tensors(model: torch.nn.Module) -> dict[str, Any]:
    return dict(get_model_state_dict(model))


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], Any]:
    """Tensors by name, and the rest of the state."""
    state = get_optimizer_state_dict(model, optimizer)
    tensors: dict[str, Any] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{parameter}.{name}"] = value
            else:
                rest.setdefault(parameter, {})[name] = value
    return tensors, {"param_groups": state["param_groups"], "rest": rest}


def shard_image(folder: str, tensors: dict[str, Any], rank: int) -> TensorImage:
    """The file with this rank's shards of ``tensors``."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local: dict[str, torch.Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            coordinate = mesh.get_coordinate() or []
            if any(place.is_replicate() and index for place, index in zip(placements, coordinate, strict=False)):
                continue  # another rank holds the same shard and writes it
            _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
            shard = tensor.to_local()
            if not shard.numel() and tensor.numel():
                continue
        elif rank == 0:
            shard, offset = tensor, (0,) * tensor.dim()
        else:
            continue
        local[name] = shard.detach()
        offsets[name] = {_OFFSETS: list(offset)}
    return TensorImage(f"{folder}/shard-{rank:05d}.safetensors", local, {_SHARDING: json.dumps(offsets)})


def load_model(model: torch.nn.Module, folder: str) -> None:
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    set_model_state_dict(model, state)


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str, rest: Any) -> None:
    state = get_optimizer_state_dict(model, optimizer)
    flat = {
        f"{parameter}.{name}": value
        for parameter, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    dcp.load(flat, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    for parameter, entries in state["state"].items():
        for name in entries:
            if f"{parameter}.{name}" in flat:
                entries[name] = flat[f"{parameter}.{name}"]
        entries.update(rest["rest"].get(parameter, {}))
    state["param_groups"] = rest["param_groups"]
    set_optimizer_state_dict(model, optimizer, state)
