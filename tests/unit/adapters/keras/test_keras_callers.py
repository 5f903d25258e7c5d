"""Which variables of the functions that call ``fit`` tell one call from the next."""

from __future__ import annotations

import sys
import time
import uuid
from pathlib import Path

import numpy as np

from holdfast.adapters.keras import callers


def fit(epochs=3):
    found = callers.described(sys._getframe(1), {"epochs": epochs}, is_frameworks=lambda name: name == "pytest")
    return {name: value for name, value in found.items() if name.endswith((" in script", " in train"))}


def test_a_while_loop_has_what_it_sets_and_counts():
    def script():
        trial, done, names, seen = 0, 5, ["a", "b"], []
        while names:
            name = names.pop(0)  # noqa: F841
            seen.append(fit())
            score = len(seen)
            trial = trial + 1
            done += score
        return seen

    assert script() == [
        {"name in script": "a", "trial in script": 0, "done in script": 5},
        {"name in script": "b", "trial in script": 1, "done in script": 6},
    ]


def test_of_for_loops_those_around_the_call_count():
    def script():
        seen = []
        for left in ("over",):  # noqa: B007
            pass
        for seed, (rate, folder) in zip(np.arange(2), ((0.5, Path("a")), (0.1, Path("b"))), strict=True):  # noqa: B007
            seen.append(fit())
        return seen

    assert script() == [
        {"seed in script": 0, "rate in script": 0.5, "folder in script": "a"},
        {"seed in script": 1, "rate in script": 0.1, "folder in script": "b"},
    ]


def test_of_parameters_no_numbers_with_a_fraction_and_no_lists():
    def train(name, options, score, results, epochs, dated, unique):
        return fit(epochs)

    found = train(
        "b", {"seed": 3, "time": 1.5}, 0.25, [1], 3, time.strftime("run-%Y%m%d-%H%M%S"), f"run-{uuid.uuid4()}"
    )
    assert found.pop("dated in train") == "run-########-######"
    assert found == {"name in train": "b", "options in train": {"seed": 3}, "unique in train": "run-"}
