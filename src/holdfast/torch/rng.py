"""The random state of a process: Python, NumPy's legacy generator, torch on CPU and on its CUDA devices.

``capture`` returns plain values and tensors that a checkpoint can hold without running code on load;
``restore`` puts them back exactly.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The random state of this process, now."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        legacy = numpy.random.get_state(legacy=False)
        if legacy["bit_generator"] == "MT19937":
            state["numpy"] = {
                "key": torch.from_numpy(legacy["state"]["key"].astype("int64")),
                "pos": int(legacy["state"]["pos"]),
                "has_gauss": int(legacy["has_gauss"]),
                "gauss": float(legacy["gauss"]),
            }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Make this process continue the random streams of ``state``."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].to(torch.uint8))
    if "numpy" in state:
        import numpy

        saved = state["numpy"]
        numpy.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": saved["key"].numpy().astype("uint32"), "pos": saved["pos"]},
                "has_gauss": saved["has_gauss"],
                "gauss": saved["gauss"],
            }
        )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].to(torch.uint8))
