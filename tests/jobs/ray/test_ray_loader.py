"""A pass over a loader of Ray's is continued exactly, the batch that it holds included."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("ray")

import torch
from ray.train.torch.train_loop_utils import _WrappedDataLoader
from torch.utils.data import DataLoader, Dataset

from holdfast.adapters.ray.loader import Prefetching
from holdfast.torch import rng
from holdfast.torch.state import read_tree, write_tree


class Noisy(Dataset[Any]):
    """Draws random numbers where it is loaded."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.randn(2) + index, "names": f"sample {index}"}


def loader(workers: int) -> Any:
    inside = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
    return _WrappedDataLoader(inside, torch.device("cpu"), True)


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


def train(batch: dict[str, Any]) -> list[Any]:
    """Draws random numbers, as dropout would."""
    return [batch["x"].tolist(), list(batch["names"]), torch.rand(1).item()]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("marked", [0, 1, 4, 5])
def test_a_pass_goes_on_with_the_batch_that_was_held(workers: int, marked: int) -> None:
    seed()
    undisturbed = [train(batch) for batch in loader(workers)]
    seed()
    first = Prefetching(loader(workers))
    seen = [train(next(first)) for _ in range(marked)]
    first.mark()
    saved, random_state = write_tree(first.position()), rng.capture()
    seen_later = [train(batch) for batch in first]
    first.close()
    assert seen + seen_later == undisturbed
    seed()
    again = Prefetching(loader(workers), read_tree(bytearray(saved)))
    rng.restore(random_state)
    assert (again.delivered, len(again)) == (marked, 5)
    assert seen + [train(batch) for batch in again] == undisturbed
    again.close()


def test_what_a_dead_rank_left_is_enough_where_nothing_is_drawn() -> None:
    """Of such a rank the number of batches is known, and not what it held."""

    def plain() -> Any:
        return _WrappedDataLoader(DataLoader(list(range(10)), batch_size=2, shuffle=True), torch.device("cpu"), True)

    seed()
    undisturbed = [batch.tolist() for batch in plain()]
    seed()
    first = Prefetching(plain())
    next(first)
    left = {**first.pass_start(), "delivered": 3}
    again = Prefetching(plain(), left)
    assert [batch.tolist() for batch in again] == undisturbed[3:]
