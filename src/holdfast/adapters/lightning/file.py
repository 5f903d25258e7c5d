"""Lightning's own checkpoint file, which is a pickle: written and read so that reading it runs no code.

It is read by torch's ``weights_only``, which makes tensors and plain values and refuses all else, unless the script
says ``fit(weights_only=False)``. Hyper-parameters can be anything, but a resume needs none: the script gives them
again. So those that would be refused are left out of the file.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import types
from typing import Any

import numpy as np
import torch

from holdfast.errors import StateError
from holdfast.store.pickled import LIGHTNING, refusal, refused, refused_in

_MULTIARRAY = np.zeros(1).__reduce__()[0]
_PLAIN = (
    np.ndarray,
    np.dtype,
    _MULTIARRAY,
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdFDgG"},
    *(frozenset, range, slice, pathlib.PosixPath, argparse.Namespace, types.SimpleNamespace),
    *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction),
)
"""Plain values besides those of torch: as in :mod:`holdfast.store.pickled`, which names them."""


def read_checkpoint(file: io.RawIOBase, location: str, *, trusting: bool) -> Any:
    """What lies in the file. Raises StateError if that could run code. ``trusting``: let it."""
    if trusting:
        return torch.load(file, map_location="cpu", weights_only=False)
    if names := _not_allowed(refused(LIGHTNING, io.BufferedReader(file))):
        raise StateError(
            f"{location}/{LIGHTNING} {refusal(names)}, unless the script allows it: a class by "
            f"torch.serialization.add_safe_globals([…]) before fit, everything by fit(weights_only=False)"
        )
    file.seek(0)
    try:
        known = torch.serialization.get_safe_globals()  # those stay allowed afterwards
        with torch.serialization.safe_globals([kind for kind in _PLAIN if kind not in known]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(f"{location}/{LIGHTNING} is refused: {error}") from error


def refused_of(value: Any) -> list[str]:
    """What a resume would refuse to read of this value, by name."""
    structure = io.BytesIO()
    try:
        _Structure(structure, protocol=2).dump(value)
    except Exception as error:  # whatever the pickling of a stranger's object raises
        return [f"what cannot be pickled ({error})"]
    structure.seek(0)
    return _not_allowed(refused_in(LIGHTNING, structure))


def drop_hyper_parameters(content: dict[str, Any]) -> None:
    """Leave out of a checkpoint those that would be refused."""
    for prefix in ("", "datamodule_"):
        key = f"{prefix}hyper_parameters"
        values = content.get(key)
        if type(values) is dict:
            content[key] = {name: value for name, value in values.items() if not refused_of(value)}
        elif values is not None:  # a container of omegaconf
            for name in (key, f"{prefix}hparams_name", f"{prefix}hparams_type"):
                content.pop(name, None)


def put_hyper_parameters(content: dict[str, Any], trainer: Any) -> None:
    """Put those of the script in the places of the ones that were left out: its hooks may look at them."""
    for key, thing in (("", trainer.lightning_module), ("datamodule_", trainer.datamodule)):
        given = getattr(thing, "hparams", None)
        if given:
            content[f"{key}hyper_parameters"] = {**given, **content.get(f"{key}hyper_parameters", {})}


class _Structure(pickle.Pickler):
    """Pickles a value without the content of its tensors."""

    def persistent_id(self, value: Any) -> Any:
        return "tensor" if type(value) in (torch.Tensor, torch.nn.Parameter) else None


def _not_allowed(names: list[str]) -> list[str]:
    """Without what the script has allowed."""
    allowed = {
        one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}"
        for one in torch.serialization.get_safe_globals()
    }
    return [name for name in names if name not in allowed]
