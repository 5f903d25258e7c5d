"""Scripts that call ``fit`` many times: each call comes back as it was left, is trained again, or is trained anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from tests.jobs.keras.checks import Case, moments
from tests.jobs.keras.drill import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def keras() -> Iterator[Server]:
    server = Server("tensorflow", "keras")
    yield server
    server.close()


def check(case: Case, *attempts: str) -> str:
    """Result and files are those of a script without holdfast, which ran in a folder of its own."""
    undisturbed = Case(case.server, case.folder / "undisturbed", case.script, *case.arguments).uninterrupted()
    for moment in attempts:
        first = case.run("--interrupt", moment)
        assert first.code == 143, first.log
    last = case.run()
    assert last.code == 0, last.log
    assert last.result == undisturbed.result, last.log
    return last.log


@pytest.mark.core
def test_what_all_calls_have_left_is_there_in_the_last(keras: Server, tmp_path: Path) -> None:
    """More of them than checkpoints are kept; twelve steps each."""
    log = check(Case(keras, tmp_path, "keras_folds.py", "--folds", "7"), "batch:98")
    assert "trained again" not in log


@pytest.mark.share(0)
def test_twenty_folds(keras: Server, tmp_path: Path) -> None:
    check(Case(keras, tmp_path, "keras_folds.py", "--folds", "20"), "batch:345", "batch:2")


@pytest.mark.core
@pytest.mark.parametrize("kind", ["--skip", "--search"])
def test_a_script_that_leaves_out_what_is_finished(keras: Server, tmp_path: Path, kind: str) -> None:
    """Its first call of fit is then another one than that of the start before."""
    check(Case(keras, tmp_path, "keras_folds.py", kind), "batch:44", "batch:6")


def test_what_is_lost_is_trained_again(keras: Server, tmp_path: Path) -> None:
    case = Case(keras, tmp_path, "keras_folds.py")
    assert case.run("--interrupt", "batch:50").code == 143
    file = tmp_path / "run/checkpoint-50/fits/2.model.weights.h5"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "what fit 2 had left was not kept: such a fit is trained again" in check(case)


def test_another_model_is_trained_from_its_beginning(keras: Server, tmp_path: Path) -> None:
    assert Case(keras, tmp_path, "keras_folds.py").run("--interrupt", "batch:50").code == 143
    log = check(Case(keras, tmp_path, "keras_folds.py", "--width", "9"))
    assert "fit 1 is not what was saved as fit 1, since its model, variables differs" in log


@pytest.mark.parametrize(
    ("kind", "moments"),
    [("count", ["noted:1"]), ("count", ["batch:21"]), ("name", ["noted:1"]), ("name", ["noted:2", "batch:3"])],
    ids=["count, after one", "count, in the third", "name, after one", "name, after two and in the third"],
)
def test_calls_that_differ_only_in_who_makes_them(keras: Server, tmp_path: Path, kind: str, moments: list[str]) -> None:
    """None gets what a finished one of before has left that the script no longer makes."""
    check(Case(keras, tmp_path, "keras_trials.py", kind), *moments)


def test_a_script_that_trains_the_epochs_that_are_left(keras: Server, tmp_path: Path) -> None:
    """It begins with the weights it has saved itself, and its epochs are counted from there."""
    log = check(Case(keras, tmp_path, "keras_trials.py", "left"), "batch:14")
    assert "fit 1 is not what was saved as fit 1, since its epochs differs" in log


@pytest.mark.parametrize("module", ["keras", "tf_keras"])
@pytest.mark.parametrize(("kind", "moment"), [("endless", "batch:22"), ("twice", "batch:40"), ("twice", "batch:124")])
@pytest.mark.share(3)
def test_data_that_is_repeated_after_it_was_shuffled(
    keras: Server, tmp_path: Path, module: str, kind: str, moment: str
) -> None:
    """It is in another order each time: the next pass, and the next call, must find it in the one that is due."""
    Case(keras, tmp_path, "keras_repeated.py", kind, KERAS_KIND=module).check(moments(moment))
