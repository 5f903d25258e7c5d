"""A Lightning that lacks a name of the table stays as it is: its fits run unprotected, or are refused."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")
import torch

from holdfast.adapters import registry
from holdfast.adapters.lightning.patches import LIGHTNING, TABLES, TORCHMETRICS
from holdfast.base.patching import MARK, PatchSet
from holdfast.errors import UnprotectedError
from tests.contracts.tables import differences, snapshot, warnings_of_holdfast, without

MODULES = {
    "lightning": "lightning.pytorch.trainer.trainer",
    "pytorch-lightning": "pytorch_lightning.trainer.trainer",
}
NAMES = [(table, target) for table in TABLES[:2] for target in (*table.required, *TORCHMETRICS.required)]


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("HOLDFAST_ENABLED", "1")
    monkeypatch.setenv("HOLDFAST_DIR", str(tmp_path / "holdfast"))
    for table in TABLES:
        table.undo()
    yield
    for table in TABLES:
        table.undo()


def patched(table: PatchSet) -> list[str]:
    """Targets whose replacement is in place."""
    found = {target: getattr(value, "__func__", value) for target, value in snapshot([table]).items()}
    return [patch.target for patch in table.patches if getattr(found.get(patch.target), MARK, None) == patch.target]


def install(framework: str) -> None:
    registry.install("lightning", importlib.import_module(MODULES[framework]))


@pytest.mark.parametrize(("table", "target"), NAMES, ids=[f"{table.framework}-{target}" for table, target in NAMES])
def test_whichever_name_is_missing_nothing_is_touched_and_one_warning_says_so(table, target) -> None:
    importlib.import_module(MODULES[table.framework])
    lacking = TORCHMETRICS if target.startswith("torchmetrics.") else table
    with without(target), warnings_of_holdfast() as heard:
        before = snapshot(TABLES)
        install(table.framework)
        assert differences(before, snapshot(TABLES)) == []
    (line,) = heard
    assert f"{lacking.framework} {lacking.version()} lacks {target}" in line
    assert f"tested with {lacking.framework} {lacking.oldest} to {lacking.newest}" in line
    assert patched(table) == []


@pytest.mark.parametrize("table", TABLES[:2], ids=list(MODULES))
def test_installed_it_replaces_every_name_once_and_undone_all_is_as_before(table) -> None:
    importlib.import_module(MODULES[table.framework])
    before = snapshot(TABLES)
    install(table.framework)
    install(table.framework)
    assert patched(table) == [patch.target for patch in table.patches]
    table.undo()
    assert differences(before, snapshot(TABLES)) == []


# ---------------------------------------------------------------------- fits


def fit(out: Path, strategy: Any = "auto") -> dict[str, Any]:
    """A small training run: its steps, and the weights at its end."""
    import lightning.pytorch as pl

    pl.seed_everything(3, verbose=False)

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            steps.append(self.global_step)
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    steps: list[int] = []
    net = Net()
    loader = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4, shuffle=True)
    trainer = pl.Trainer(
        default_root_dir=out,
        max_epochs=2,
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    error = None
    try:
        trainer.fit(net, loader)
    except UnprotectedError as refused:
        error = str(refused)
    content = b"".join(value.detach().numpy().tobytes() for value in net.state_dict().values())
    return {"steps": steps, "weights": hashlib.sha256(content).hexdigest(), "error": error}


GONE = "lightning.pytorch.trainer.call:_interrupt"


def test_a_fit_with_a_lightning_that_lacks_a_name_runs_as_without_holdfast(tmp_path) -> None:
    wanted = fit(tmp_path)
    with without(GONE), warnings_of_holdfast() as heard:
        install("lightning")
        found = fit(tmp_path)
    assert found == wanted
    assert found["steps"] == [*range(6)]
    assert not (tmp_path / "holdfast").exists()
    (line,) = heard
    assert GONE in line
    install("lightning")
    assert fit(tmp_path)["weights"] == wanted["weights"]
    assert list((tmp_path / "holdfast").glob("checkpoint-*"))


def test_with_require_the_fit_is_refused_before_its_first_step(tmp_path, monkeypatch) -> None:
    from lightning.pytorch import Trainer

    monkeypatch.setenv("HOLDFAST_ENABLED", "require")
    monkeypatch.setattr(Trainer, "fit", Trainer.fit)  # put back afterwards
    with without(GONE):
        install("lightning")
        found = fit(tmp_path)
    assert found["steps"] == []
    assert f"lightning {LIGHTNING.version()} lacks {GONE}" in found["error"]
    assert "HOLDFAST_ENABLED=require refuses to train unprotected" in found["error"]
    assert not (tmp_path / "holdfast").exists()


def test_with_require_a_fit_that_cannot_be_protected_is_refused(tmp_path, monkeypatch) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class OwnStrategy(SingleDeviceStrategy):
        pass

    monkeypatch.setenv("HOLDFAST_ENABLED", "require")
    install("lightning")
    found = fit(tmp_path, strategy=OwnStrategy(device="cpu"))
    assert found["steps"] == []
    assert "the strategy OwnStrategy is not supported" in found["error"]
