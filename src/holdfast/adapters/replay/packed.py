"""Many small tensors as few: those of one kind in one stack, with their names in one piece of text.

A replay buffer may hold a hundred thousand of them, and a file has a line for each of its entries.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

_SMALL = 64 << 10
_MANY = 16
"""Tensors of one kind from which on they are stacked."""

Content = dict[str, Any]


def pack(content: Content) -> tuple[Content, list[dict[str, Any]]]:
    """What of ``content`` stays as it is, and the stacks of the rest."""
    kinds: dict[Any, list[str]] = {}
    for name, value in content.items():
        if type(value) is torch.Tensor and value.nbytes <= _SMALL and value.layout == torch.strided:
            kinds.setdefault((value.dtype, value.device, value.shape), []).append(name)
    stacks = []
    rest = dict(content)
    for names in kinds.values():
        if len(names) >= _MANY:
            stacks.append({"names": pack_names(names), "values": torch.stack([rest.pop(name) for name in names])})
    return rest, stacks


def unpack(rest: Content, stacks: list[dict[str, Any]]) -> Content:
    """The inverse of :func:`pack`."""
    content = dict(rest)
    for stack in stacks:
        content |= zip(unpack_names(stack["names"]), stack["values"].unbind(0), strict=True)
    return content


def pack_names(names: list[str]) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.compress("\0".join(names).encode(), 1)), dtype=torch.uint8)


def unpack_names(text: torch.Tensor) -> list[str]:
    return zlib.decompress(text.numpy().tobytes()).decode().split("\0")
