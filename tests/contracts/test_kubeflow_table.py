"""A Kubeflow SDK that lacks a name of the table stays as it is, and no TransformersTrainer is made with it."""

from __future__ import annotations

import pytest

pytest.importorskip("kubeflow.trainer")
from kubeflow.trainer import CustomTrainer

from holdfast.base.patching import MARK, MissingTargetsError
from holdfast.kubeflow import TransformersTrainer
from holdfast.kubeflow.patches import KUBEFLOW, TABLES
from tests.contracts.tables import differences, snapshot, without


def train() -> None:
    pass


@pytest.fixture(autouse=True)
def untouched():
    KUBEFLOW.undo()
    yield
    KUBEFLOW.undo()


@pytest.mark.parametrize("target", KUBEFLOW.required)
def test_whichever_name_is_missing_nothing_is_touched_and_the_trainer_says_so(target) -> None:
    with without(target):
        before = snapshot(TABLES)
        with pytest.raises(MissingTargetsError, match=f"kubeflow {KUBEFLOW.version()} lacks {target}; tested with"):
            TransformersTrainer(func=train)
        CustomTrainer(func=train)
        assert differences(before, snapshot(TABLES)) == []


def test_the_first_trainer_replaces_every_name_once_and_undone_all_is_as_before() -> None:
    before = snapshot(TABLES)
    CustomTrainer(func=train)
    assert differences(before, snapshot(TABLES)) == []
    TransformersTrainer(func=train)
    once = snapshot(TABLES)
    TransformersTrainer(func=train)
    assert differences(once, snapshot(TABLES)) == []
    changed = differences(before, once)
    assert changed == sorted(patch.target for patch in KUBEFLOW.patches)
    assert [getattr(once[name], MARK) for name in changed] == changed
    KUBEFLOW.undo()
    assert differences(before, snapshot(TABLES)) == []
