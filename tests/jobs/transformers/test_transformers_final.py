"""``final/`` of models with adapters, of one that is spread over the ranks, and of one that wrote nothing."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.adapters.transformers.final import write_final
from holdfast.base.run_directory import home_of
from holdfast.store import Backend, open_backend
from tests.jobs.transformers import drill

SHARDED = drill.SCRIPTS / "transformers_fsdp.py"
WITH_ADAPTERS = f"""
import os, runpy, sys
import peft, torch, transformers

made, trained = transformers.GPT2LMHeadModel, transformers.Trainer.train

def with_adapters(config):
    adapter = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False)
    if os.environ["ADAPTERS"] == "peft":
        return peft.get_peft_model(made(config), adapter)
    model = made(config)
    model.add_adapter(adapter)
    return model

def train(self, **given):
    output = trained(self, **given)
    state = self.accelerator.get_state_dict(self.model)
    if self.args.should_save:
        torch.save(state, self.args.output_dir + ".state")
    return output

transformers.GPT2LMHeadModel, transformers.Trainer.train = with_adapters, train
runpy.run_path({str(SHARDED)!r}, run_name="__main__")
"""


def sharded(tmp_path: Path, script: Path, kind: str) -> drill.Spec:
    config = {"fsdp_version": 2, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    args = {"fsdp": "full_shard", "fsdp_config": config, "max_steps": 3}
    env = {"HOLDFAST_FINAL_MODEL": "1"}
    return drill.Spec(str(tmp_path / "run"), world=2, script=str(script), args=args, env=env)


def final_of(spec: drill.Spec) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    outcome = drill.shared().run(spec)
    assert outcome.codes == [0, 0], outcome.log
    assert "the trained model is in" in outcome.log
    return dict(AutoModelForCausalLM.from_pretrained(f"{spec.dir}/final").state_dict())


def test_shards_of_all_ranks_become_one_model(tmp_path: Path) -> None:
    spec = sharded(tmp_path, SHARDED, "SHARDED_STATE_DICT")
    digest = hashlib.sha256()
    for name, value in sorted(final_of(spec).items()):
        digest.update(name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    result = json.loads(Path(f"{spec.dir}.out/result.json").read_text())
    assert digest.hexdigest() == result["model"]


@pytest.mark.parametrize(("kind", "prefix"), [("peft", "base_model.model."), ("native", "")])
def test_adapters_in_shards_are_merged(tmp_path: Path, kind: str, prefix: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITH_ADAPTERS)
    spec = sharded(tmp_path, script, "FULL_STATE_DICT")
    spec.env["ADAPTERS"] = kind
    final = final_of(spec)
    state = torch.load(f"{spec.dir}.state")
    assert [name for name in state if "lora_A" in name]
    for name, value in final.items():
        whole = f"{prefix}{name}"
        if not name.endswith("c_attn.weight"):
            assert torch.equal(value, state[whole.replace("c_attn.", "c_attn.base_layer.")]), name
            continue
        module = whole.removesuffix(".weight")
        adapter = (f"{module}.lora_{letter}.default.weight" for letter in "BA")
        added = torch.mm(*(state[key] for key in adapter)).T * (8 / 4)
        assert torch.allclose(value, state[f"{module}.base_layer.weight"] + added, atol=1e-6), name


def test_a_model_that_wrote_no_weights_leaves_the_older_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Model:
        def __init__(self, file: str) -> None:
            self.file = file

        def save_pretrained(self, folder: str) -> None:
            Path(folder, self.file).write_text("{}")

    backend = open_backend(str(tmp_path / "run"))
    for step, file in ((1, "model.safetensors"), (2, "config.json")):
        written(Model(file), backend, step)
    assert "no file of weights was written, only config.json" in caplog.text
    assert "model.safetensors" in backend.sizes("final")


def written(model: Any, backend: Backend, step: int) -> None:
    """``final/`` of a model that one process has trained."""
    home = home_of(backend.uri)
    session = SimpleNamespace(backends=[backend], home=home, world=1, run="a", attempt=1)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    trainer = SimpleNamespace(
        args=SimpleNamespace(should_save=True), accelerator=accelerator, model=model, processing_class=None
    )
    write_final(trainer, session, step, sharded=False)
    assert not os.path.isdir(home) or not os.listdir(home), "nothing is left of the way there"


def tiny() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2))


def test_adapters_that_the_model_itself_has_added_are_merged(tmp_path: Path) -> None:
    import peft
    from transformers import GPT2LMHeadModel

    model = tiny()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], init_lora_weights=False))
    model.eval()
    rows = torch.arange(16)[None]
    expected = model(rows).logits
    written(model, open_backend(str(tmp_path / "run")), 1)
    final, report = GPT2LMHeadModel.from_pretrained(tmp_path / "run/final", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.allclose(final.eval()(rows).logits, expected, atol=1e-5)
    assert not torch.allclose(tiny().eval()(rows).logits, expected, atol=1e-2)
    assert torch.equal(model(rows).logits, expected), "the model that was trained is as it was"
    assert model.active_adapters() == ["default"]


def test_an_adapter_that_cannot_be_merged_is_no_final_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import peft

    backend = open_backend(str(tmp_path / "run"))
    written(tiny(), backend, 1)
    prompt = peft.get_peft_model(tiny(), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    written(prompt, backend, 2)
    assert "the adapter cannot be merged, and adapter_model.safetensors is no model by itself" in caplog.text
    assert caplog.text.count("the trained model is in") == 1
    assert "model.safetensors" in backend.sizes("final")
