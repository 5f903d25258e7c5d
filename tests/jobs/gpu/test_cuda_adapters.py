"""Unchanged scripts on a GPU: transformers' Trainer and a plain loop."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.checks import assert_whole

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU and a CUDA build of torch", allow_module_level=True)

JOBS = ROOT / "tests/jobs"
# As holdfast.pth does it, also where the package is not installed.
START = (
    "import sys, runpy, _holdfast_startup as s; s.started or s.start(); sys.argv.pop(0);"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)

PLAIN = """
import hashlib, sys, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Dropout(0.2), torch.nn.Linear(256, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
data = torch.utils.data.TensorDataset(torch.randn(160, 32), torch.randn(160, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(3):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        time.sleep(0.1)
    print(f"epoch {epoch} loss {loss.item():.9f}", flush=True)
print("END", hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


def start(*command: str, **changes: str) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "HOLDFAST_ENABLED": "1",
        "HOLDFAST_KILL_WAIT": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **changes,
    }
    return subprocess.Popen(
        [sys.executable, "-c", START, *command],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def interrupt(process: subprocess.Popen[str], progress: Path, step: int) -> str:
    """SIGTERM once so many steps are done."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit and process.poll() is None:
        try:
            if json.loads(progress.read_text()).get("step", 0) >= step:
                break
        except (OSError, ValueError):
            pass
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    return output


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs: pip install transformers")
def test_a_trainer_on_a_gpu_is_saved_and_goes_on_exactly(tmp_path):
    more = {
        "use_cpu": False,
        "save_strategy": "steps",
        "save_steps": 7,
        "num_train_epochs": 40,
        "full_determinism": True,
    }

    def command(name: str) -> list[str]:
        script = str(JOBS / "transformers/scripts/transformers_train.py")
        out, result = str(tmp_path / name), str(tmp_path / f"{name}.json")
        return [script, "--out", out, "--result", result, "--args", json.dumps(more)]

    alone = start(*command("alone"), HOLDFAST_ENABLED="0")
    output, _ = alone.communicate(timeout=200)
    assert alone.returncode == 0, output
    interrupt(start(*command("run")), tmp_path / "run" / "training_progress.json", 30)
    newest = assert_whole(str(tmp_path / "run"))
    assert newest.manifest.reason == "jit"
    again = start(*command("run"))
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    expected, got = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "run"))
    assert got["digest"] == expected["digest"], output


def test_a_plain_loop_on_a_gpu_is_saved_and_goes_on_exactly(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    alone = start(str(script), HOLDFAST_ENABLED="0")
    expected, _ = alone.communicate(timeout=120)
    assert "END" in expected, expected
    where = {"HOLDFAST_DIR": str(tmp_path / "run")}
    interrupt(start(str(script), **where), tmp_path / "run" / "training_progress.json", 25)
    assert assert_whole(str(tmp_path / "run")).manifest.reason == "jit"
    again = start(str(script), **where)
    output, _ = again.communicate(timeout=120)
    assert [line for line in output.splitlines() if line.startswith(("END", "epoch"))] == [
        line for line in expected.splitlines() if line.startswith(("END", "epoch"))
    ], output
