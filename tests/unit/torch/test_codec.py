"""Any state as JSON and tensors, and back, without pickle."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.errors import StateError
from holdfast.torch.codec import decode, encode
from holdfast.torch.state import Objects, read_tree, write_tree

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=40)
    | arrays(np.float32, st.integers(0, 5)).map(torch.from_numpy)
    | arrays(np.int16, (2, 3))
)
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and _bits(left) == _bits(right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return type(right) is dict and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def _bits(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.numpy().tobytes()


@given(TREES)
def test_what_goes_in_comes_out_with_its_types(tree):
    assert same(tree, read_tree(bytearray(write_tree(tree))))


def test_paths_that_read_alike_do_not_overwrite_each_other():
    tree = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "list": [torch.ones(1)], "list.0": torch.zeros(1)}
    assert same(tree, read_tree(bytearray(write_tree(tree))))


def test_numbers_that_json_does_not_have():
    tree = {"nan": math.nan, "inf": math.inf, "tiny": 5e-324, "third": 1 / 3}
    out = decode(json.loads(json.dumps(encode(tree, "state", {}))), {})
    assert math.isnan(out["nan"])
    assert (out["inf"], out["tiny"], out["third"]) == (math.inf, 5e-324, 1 / 3)


def test_optimizer_and_scheduler_states_survive():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    for state in (optimizer.state_dict(), scheduler.state_dict()):
        assert same(state, read_tree(bytearray(write_tree(state))))


def test_what_cannot_be_saved_is_refused_with_its_path_and_type():
    with pytest.raises(StateError, match=r"state\.a\.1 is a builtins\.object"):
        encode({"a": [1, object()]}, "state", {})


def test_a_run_refuses_at_its_start_what_it_could_not_save_at_its_end(tmp_path):
    import holdfast

    class Odd:
        def state_dict(self):
            return {"callback": print}

        def load_state_dict(self, state):
            pass

    with pytest.raises(StateError, match="odd"):
        holdfast.Run(tmp_path / "run", model=torch.nn.Linear(1, 1), odd=Odd())


def test_an_object_without_a_state_is_refused_by_name():
    with pytest.raises(StateError, match="clock is a float"):
        Objects({"clock": 1.0}, 0, incremental=False)


def test_loading_a_checkpoint_runs_no_code(tmp_path):
    """A tampered file cannot name a class: what is no known kind of value is refused."""
    with pytest.raises(StateError, match="no kind of value"):
        decode({"$": "posix.system", "items": ["true"]}, {})
