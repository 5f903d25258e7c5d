"""Records the weights of a training run step by step, and preempts the run at one step. Each script here uses it.

``RESULT`` names the file it writes. ``PREEMPT_AT`` is the step after which the process gets a real SIGTERM.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterable
from typing import Any

NOTICED_S = 1.0
"""Training pauses this long after the signal, so that the notice is known at the next step boundary."""


class Record:
    def __init__(self) -> None:
        self.before: dict[int, str] = {}
        """By step, the digest of the weights that the step starts from."""

    def begin(self, step: int, weights: Iterable[Any]) -> None:
        self.before[step] = digest_of(weights)

    def end(self, step: int, weights: Iterable[Any]) -> None:
        if step == int(os.environ.get("PREEMPT_AT", "0")):
            write({"step": step, "weights": digest_of(weights)})
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(NOTICED_S)

    def close(self, weights: Iterable[Any]) -> None:
        arrays = list(weights)
        numbers = [float(number) for array in arrays for number in array.reshape(-1)]
        write({"before": self.before, "weights": digest_of(arrays), "numbers": numbers})


def of_torch(model: Any) -> list[Any]:
    return [value.detach().cpu().numpy() for value in model.state_dict().values()]


def digest_of(weights: Iterable[Any]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest()


def write(result: dict[str, Any]) -> None:
    with open(os.environ["RESULT"], "w", encoding="utf-8") as file:
        json.dump(result, file)
