"""What ``torch.distributed.checkpoint`` reads while a sharded Trainer trains: without running code.

Its ``.metadata`` is a pickle, and so is each value of its shards that is no tensor. Both are read restricted here, from
the very bytes that were checked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from holdfast.errors import StateError
from holdfast.store.pickled import may_describe_shards, refusal, refused_value


class RestrictedPickle:
    """Stands in for the module :mod:`pickle` where DCP reads its metadata."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    @staticmethod
    def load(file: Any) -> Any:
        return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not may_describe_shards(module, name):
            raise StateError(f"the checkpoint's .metadata {refusal([f'{module}.{name}'])}")
        return super().find_class(module, name)


class Readers:
    """Wrappers of the patch table's scope ``SHARDS``."""

    pickle = RestrictedPickle

    @staticmethod
    def load_bytes(original: Callable[..., None]) -> Callable[..., None]:
        def load_bytes(planner: Any, read_item: Any, value: io.BytesIO) -> None:
            if names := refused_value(value):
                raise StateError(f"a shard of the checkpoint {refusal(names)}")
            value.seek(0)
            original(planner, read_item, value)

        return load_bytes
