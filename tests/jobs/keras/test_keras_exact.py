"""Keras scripts that know nothing of holdfast, interrupted three times, end with the same bits as undisturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from tests.jobs.keras.checks import Case, moments
from tests.jobs.keras.drill import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

THRICE = [moments("batch_end:5"), moments("batch_begin:9"), moments("batch_end:7")]
KINDS = {
    "dataset-callbacks-validation": ["--callbacks", "--validate", "--epochs", "4"],
    "arrays-cosine": ["--data", "arrays", "--cosine"],
    "sequence-validation": ["--data", "sequence", "--validate"],
    "repeat-unbuilt": ["--data", "repeat", "--steps-per-epoch", "10", "--model", "unbuilt"],
    "generator": ["--data", "generator", "--steps-per-epoch", "10"],
    "unknown-size": ["--data", "unknown"],
    "five-steps-per-execution": ["--steps-per-execution", "5", "--epochs", "10"],
}


@pytest.fixture(scope="module")
def keras() -> Iterator[Server]:
    server = Server("tensorflow", "keras", "tf_keras")
    yield server
    server.close()


@pytest.mark.core(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["keras", "tf_keras"])
@pytest.mark.share(5)
def test_three_preemptions_change_no_bit(keras: Server, tmp_path: Path, module: str, kind: str) -> None:
    Case(keras, tmp_path, "keras_train.py", *KINDS[kind], KERAS_KIND=module).check(*THRICE)


@pytest.mark.parametrize("how", ["--jit", "--eager"])
@pytest.mark.share(2)
def test_compiled_and_eager_training_too(keras: Server, tmp_path: Path, how: str) -> None:
    Case(keras, tmp_path, "keras_train.py", how).check(moments("batch_end:17"))


@pytest.mark.core
@pytest.mark.parametrize("kind", [["gan"], ["vae"], ["call"], ["gan", "--eager"]], ids=str)
@pytest.mark.parametrize("module", ["keras", "tf_keras"])
@pytest.mark.share(4)
def test_a_model_with_a_step_of_its_own(keras: Server, tmp_path: Path, module: str, kind: list[str]) -> None:
    """Without ``call``, or with several optimizers: only its step makes all variables."""
    case = Case(keras, tmp_path, "keras_own_step.py", *kind, KERAS_KIND=module)
    case.check(moments("batch:17"), moments("epoch:1"))


@pytest.mark.parametrize("module", ["keras", "tf_keras"])
@pytest.mark.parametrize("data", ["dataset", "arrays"])
@pytest.mark.share(3)
def test_without_a_seed_every_epoch_sees_every_sample_once(
    keras: Server, tmp_path: Path, module: str, data: str
) -> None:
    case = Case(keras, tmp_path, "keras_counts.py", "--data", data, KERAS_KIND=module)
    last = case.interrupted(["--interrupt", "5"], ["--interrupt", "14"])
    assert last.code == 0, last.log
    assert last.result is not None
    assert set(last.result["counts"]) == {3.0}
    assert "without a seed" not in last.log


@pytest.mark.share(0)
def test_the_torch_backend(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    server = Server("torch", "keras", KERAS_BACKEND="torch")
    try:
        Case(server, tmp_path, "keras_train.py", "--data", "arrays", "--validate").check(*THRICE[:2])
    finally:
        server.close()
