"""Trainers that are made from transformers' own: TRL's SFTTrainer, of all weights and of an adapter."""

from __future__ import annotations

import pytest

from tests.jobs.transformers import drill
from tests.jobs.transformers.checks import SAVE, fault, interrupt_and_resume, steps_in

SCRIPT = str(drill.SCRIPTS / "transformers_sft.py")


@pytest.fixture
def server() -> drill.Server:
    return drill.shared()


@pytest.mark.slow
def test_sft_of_all_weights_with_its_own_metrics(server, tmp_path):
    spec = drill.Spec(str(tmp_path / "run"), script=SCRIPT, args=SAVE, faults=[fault("forward", 7)])
    interrupt_and_resume(server, spec)
    assert (tmp_path / "run/README.md").exists()
    for step in steps_in(spec.dir):
        assert (tmp_path / f"run/checkpoint-{step}/tokenizer.json").exists()


@pytest.mark.core
@pytest.mark.slow
def test_sft_of_an_adapter(server, tmp_path):
    spec = drill.Spec(
        str(tmp_path / "run"), script=SCRIPT, options=["--lora"], args=SAVE, faults=[fault("optimizer", 7)]
    )
    interrupt_and_resume(server, spec)
    folder = tmp_path / f"run/checkpoint-{steps_in(spec.dir)[-1]}"
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.share(0)
def test_sft_on_two_ranks(server, tmp_path):
    interrupt_and_resume(
        server, drill.Spec(str(tmp_path / "run"), world=2, script=SCRIPT, faults=[fault("forward", 5, 1)])
    )
