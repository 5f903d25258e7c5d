"""A transformers that lacks a name of the table stays as it is: its training runs unprotected, or is refused."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import torch

from holdfast.adapters import registry
from holdfast.adapters.transformers.patches import SET_TRAINER, TABLES, TRANSFORMERS
from holdfast.base.patching import MARK, PROCESS, PatchSet
from holdfast.errors import UnprotectedError
from holdfast.torch import patches as toolkit
from tests.contracts.tables import differences, owner_of, snapshot, warnings_of_holdfast, without

MODULE = "transformers.trainer"
EVERY = (*TABLES, *toolkit.TABLES)
COMPILED = "torch:Tensor._version"
"""Cannot be taken away from its class."""
NAMES = [(table, target) for table in EVERY for target in table.required if target != COMPILED]
GONE = "transformers.trainer:Trainer._run_epoch"


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    importlib.import_module(MODULE)
    importlib.import_module(SET_TRAINER.partition(":")[0])
    monkeypatch.setenv("HOLDFAST_ENABLED", "1")
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "holdfast"))
    TRANSFORMERS.undo()
    yield
    TRANSFORMERS.undo()


def install() -> None:
    registry.install("transformers", importlib.import_module(MODULE))


def in_place() -> list[str]:
    """Targets whose replacement is there for the process."""
    return [
        patch.target
        for patch in TRANSFORMERS.patches
        if patch.scope == PROCESS and getattr(getattr(*owner_of(patch.target)), MARK, None) == patch.target
    ]


@pytest.mark.parametrize(("table", "target"), NAMES, ids=[target for _, target in NAMES])
def test_whichever_name_is_missing_nothing_is_touched_and_one_warning_says_so(table: PatchSet, target: str) -> None:
    with without(target), warnings_of_holdfast() as heard:
        before = snapshot(EVERY)
        install()
        assert differences(before, snapshot(EVERY)) == []
    assert in_place() == []
    (line,) = heard
    assert f"{table.framework} {table.version()} lacks " in line
    assert target in line
    assert f"tested with {table.framework} {table.oldest} to {table.newest}" in line


def test_installed_it_replaces_every_name_once_and_undone_all_is_as_before() -> None:
    from transformers.trainer_utils import get_last_checkpoint

    before, code = snapshot(EVERY), get_last_checkpoint.__code__
    install()
    replaced = snapshot(EVERY)
    install()
    assert differences(replaced, snapshot(EVERY)) == []
    assert in_place() == [patch.target for patch in TRANSFORMERS.patches if patch.scope == PROCESS]
    assert get_last_checkpoint.__code__ is not code
    TRANSFORMERS.undo()
    assert differences(before, snapshot(EVERY)) == []
    assert get_last_checkpoint.__code__ is code


# ---------------------------------------------------------------------- training runs


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x)[:, 0] - labels).square().mean()}


def trainer_of(out: Path, *, kind: Any = None, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(3)
    rows = [{"x": torch.randn(4), "labels": torch.tensor(float(i))} for i in range(12)]
    args = TrainingArguments(
        output_dir=str(out),
        max_steps=6,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    return (kind or Trainer)(Net(), args, train_dataset=rows)


def train(out: Path) -> dict[str, Any]:
    """A small training run: its last step, and the weights at its end."""
    trainer = trainer_of(out)
    began = [value.clone() for value in trainer.model.parameters()]
    error = None
    try:
        trainer.train()
    except UnprotectedError as refused:
        error = str(refused)
    content = b"".join(value.detach().numpy().tobytes() for value in trainer.model.state_dict().values())
    moved = any(not torch.equal(*pair) for pair in zip(began, trainer.model.parameters(), strict=True))
    return {
        "step": trainer.state.global_step,
        "weights": hashlib.sha256(content).hexdigest(),
        "error": error,
        "moved": moved,
    }


def test_a_training_run_with_a_transformers_that_lacks_a_name_runs_as_without_holdfast(tmp_path) -> None:
    wanted = train(tmp_path / "out")
    target = "transformers.trainer:Trainer.get_test_dataloader"  # which this training does not need
    with without(target), warnings_of_holdfast() as heard:
        install()
        found = train(tmp_path / "out")
    assert found == wanted
    assert found["step"] == 6
    assert not (tmp_path / "holdfast").exists()
    (line,) = heard
    assert target in line
    install()
    assert train(tmp_path / "out")["weights"] == wanted["weights"]
    assert list((tmp_path / "holdfast").glob("checkpoint-*"))


def test_with_require_the_training_run_is_refused_before_its_first_step(tmp_path, monkeypatch) -> None:
    from transformers import Trainer

    monkeypatch.setenv("HOLDFAST_ENABLED", "require")
    monkeypatch.setattr(Trainer, "train", Trainer.train)  # put back afterwards
    with without(GONE):
        install()
        found = train(tmp_path / "out")
    assert (found["step"], found["moved"]) == (0, False)
    assert f"transformers {TRANSFORMERS.version()} lacks {GONE}" in found["error"]
    assert "HOLDFAST_ENABLED=require refuses to train unprotected" in found["error"]
    assert not (tmp_path / "holdfast").exists()


def test_what_cannot_be_protected_is_refused_too_and_named(tmp_path, monkeypatch) -> None:
    install()
    trainer = trainer_of(tmp_path / "out")
    trainer.is_distributed_loading_by_transformers = True
    monkeypatch.setenv("HOLDFAST_ENABLED", "require")
    with pytest.raises(UnprotectedError, match="its model was sharded while it was loaded"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_handler_of_transformers_itself_works_where_a_name_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("HOLDFAST_ENABLED")
    before = signal.getsignal(signal.SIGTERM)
    try:
        with without(GONE):
            install()
            trainer_of(tmp_path / "out", enable_jit_checkpoint=True)
            theirs = signal.getsignal(signal.SIGTERM)
        assert theirs.__module__ == SET_TRAINER.partition(":")[0]
        signal.signal(signal.SIGTERM, before)
        install()
        trainer_of(tmp_path / "out", enable_jit_checkpoint=True)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_after_a_training_run_the_trainer_and_its_loaders_are_as_before(tmp_path) -> None:
    install()
    trainer = trainer_of(tmp_path / "out")
    methods, before = set(vars(trainer)), snapshot(EVERY)
    args = trainer.args
    kept = dict(vars(args))
    trainer.train()
    assert differences(before, snapshot(EVERY)) == []
    assert trainer.args is args
    assert vars(args) == kept
    wrapped = {name for name in set(vars(trainer)) - methods if hasattr(vars(trainer)[name], MARK)}
    assert wrapped == set()
    assert list((tmp_path / "holdfast").glob("checkpoint-*"))


def test_what_a_script_wrapped_while_it_trained_stays_and_holdfast_is_silent(tmp_path) -> None:
    from transformers import TrainerCallback

    called = []

    class Wrap(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 1:
                ours = trainer.compute_loss

                def theirs(*args: Any, **kwargs: Any) -> Any:
                    called.append(args)
                    return ours(*args, **kwargs)

                trainer.compute_loss = theirs

    install()
    trainer = trainer_of(tmp_path / "out")
    trainer.add_callback(Wrap())
    trainer.train()
    assert len(called) == 5
    batch = {"x": torch.ones(1, 4), "labels": torch.ones(1)}
    assert trainer.compute_loss(trainer.model, batch).item() >= 0
    assert len(called) == 6


def test_a_save_that_is_captured_sees_another_output_folder_and_what_it_notes_in_the_arguments_stays(tmp_path) -> None:
    from transformers import Trainer

    seen = []

    class Mine(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            seen.append((self.args.output_dir, self._get_output_dir(trial), self.args.save_only_model))
            self.args.noted = len(seen)
            super()._save_checkpoint(model, trial)

    install()
    trainer = trainer_of(tmp_path / "out", kind=Mine, save_only_model=True)
    args = trainer.args
    trainer.train()
    ((output_dir, run_dir, only_model),) = seen
    assert output_dir == run_dir != args.output_dir == str(tmp_path / "out")
    assert only_model is False
    assert args.save_only_model
    assert trainer.args is args
    assert args.noted == 1
    (checkpoint,) = (tmp_path / "holdfast").glob("checkpoint-*")
    saved = torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert type(saved) is type(args)
    assert (saved.output_dir, saved.save_only_model) == (args.output_dir, True)


def test_a_trainer_that_is_left_alone_is_not_followed_as_a_plain_loop_either(tmp_path: Path) -> None:
    """In a process of its own, with all adapters: its one warning is true, and nothing is written."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    package = Path(importlib.util.find_spec("transformers").origin).parent
    other = tmp_path / "other/transformers"
    ignored = shutil.ignore_patterns("__pycache__", "trainer.py")
    shutil.copytree(package, other, copy_function=os.symlink, ignore=ignored)
    (other / "trainer.py").write_text((package / "trainer.py").read_text().replace("_run_epoch", "_train_one_epoch"))
    variables = {**os.environ, "PYTHONPATH": str(other.parent), "HF_HUB_OFFLINE": "1"}
    outputs = {}
    for switch in ("0", "1"):
        done = subprocess.run(
            [sys.executable, script, tmp_path / f"out-{switch}"],
            env=variables | {"HOLDFAST_ENABLED": switch},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        outputs[switch] = done.stdout.splitlines()[-1]
        if switch == "1":
            (warning,) = (line for line in done.stderr.splitlines() if "holdfast" in line)
            assert "lacks transformers.trainer:Trainer._run_epoch" in warning
    assert outputs["0"] == outputs["1"]
    assert not (tmp_path / "holdfast-runs").exists()
    assert not list(tmp_path.glob("out-1/checkpoint-*"))


SCRIPT = """
import sys
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        out = self.layer(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

torch.manual_seed(0)
data = [{"x": x, "labels": x.sum()} for x in torch.randn(32, 4)]
arguments = TrainingArguments(
    sys.argv[1], max_steps=12, per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=data)
trainer.train()
print(trainer.state.global_step, trainer.model.layer.weight.tolist())
"""
