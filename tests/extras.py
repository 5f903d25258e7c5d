"""The wheel works in an empty environment with each extra alone: ``python -m tests.extras [EXTRA …]``.

Builds the wheel once. For each extra it makes a virtual environment, installs ``holdfast[EXTRA]`` into it with pip,
runs the commands that need no extra and a small piece that needs this one, and removes the environment. It prints a
table and exits with 1 if one of them fails. pip downloads what this machine does not have; ``--torch`` names the torch
that extras with torch get, so that pip takes the wheel at hand instead of the newest one with CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.compat.make_checkpoints import KINDS, PREEMPT_AT, PREEMPTED, start

ROOT = Path(__file__).parents[1]

UNWANTED = ("nvidia-", "cuda-", "triton")
"""Gigabytes that no check here needs."""
CHECK_LIMIT_S = 300.0

WITHOUT = """
import holdfast
try:
    holdfast.Run
except holdfast.MissingExtraError as error:
    assert "pip install 'holdfast[torch]'" in str(error), error
else:
    raise AssertionError("holdfast.Run without torch is not an error")
"""

S3 = """
import contextlib, obstore
from obstore.store import MemoryStore
from holdfast.store.checkpoints import verify, whole
from holdfast.store.manifest import Manifest
from holdfast.store.object import ObjectBackend

created = "2026-01-01T00:00:00Z"
manifest = Manifest(step=7, reason="jit", world_size=1, files=(), created=created, run="extras", attempt=1)
store = MemoryStore()
obstore.put(store, f"runs/{manifest.name}/holdfast.json", manifest.encode())
with contextlib.closing(ObjectBackend("s3://bucket/runs", store=store)) as backend:
    (found,) = whole([backend])
    assert found.step == 7 and verify(found) == []
"""

DATA = """
from torchdata.stateful_dataloader import StatefulDataLoader
import holdfast
with holdfast.Run("stateful", counters={"seen": 0}) as run:
    for batch in run.batches(StatefulDataLoader(range(8), batch_size=2)):
        run.step()
assert run.steps == 4
"""

OPERATOR = """
from holdfast.operator import app
app.Options
"""

KUBEFLOW = """
from kubeflow.trainer import CustomTrainer, LocalProcessBackendConfig, TrainerClient
from holdfast.kubeflow import Panel, PeriodicCheckpointConfig, TransformersTrainer, pause, progress, wait_for

def train():
    pass

config = PeriodicCheckpointConfig(save_strategy="steps", save_steps=5)
trainer = TransformersTrainer(func=train, num_nodes=1, output_dir="out", periodic_checkpoint_config=config)
assert isinstance(trainer, CustomTrainer)
TrainerClient(LocalProcessBackendConfig())
"""

RAY = """
import os
os.environ["RAY_TRAIN_JIT_CHECKPOINT_ENABLED"] = "1"
import ray, ray.train, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model

def train():
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = prepare_data_loader(torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4))
    for epoch in range(2):
        for inputs in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        ray.train.report({"epoch": epoch})

ray.init(num_cpus=2, include_dashboard=False)
config = RunConfig(name="extras", storage_path=os.path.abspath("results"))
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=1), run_config=config).fit()
assert [name for name in os.listdir("results/extras/holdfast") if name.startswith("checkpoint-")], "nothing is saved"
"""

DEMO = "import matplotlib.pyplot"


@dataclass(frozen=True)
class Extra:
    torch: bool = False
    """The environment gets the torch of ``--torch``."""
    program: str = ""
    """What only works with this extra."""
    kinds: tuple[str, ...] = ()
    """Runs of tests/compat that are preempted and resumed."""
    environment: dict[str, str] = field(default_factory=dict)


EXTRAS = {
    "none": Extra(program=WITHOUT),
    "torch": Extra(torch=True, kinds=("run", "replay")),
    "s3": Extra(program=S3),
    "data": Extra(torch=True, program=DATA, kinds=("run",)),
    "demo": Extra(program=DEMO),
    "keras": Extra(torch=True, kinds=("keras",), environment={"KERAS_BACKEND": "torch"}),
    "kubernetes": Extra(program=OPERATOR),
    "kubeflow": Extra(program=KUBEFLOW),
    "transformers": Extra(torch=True, kinds=("transformers",)),
    "lightning": Extra(torch=True, kinds=("lightning",)),
    "ray": Extra(torch=True, program=RAY, kinds=("run",)),
}


class CheckFailedError(Exception):
    """A command did not do what it should; the text is its output."""


class Environment:
    """A virtual environment with holdfast and one extra."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin/python"
        self.work = folder / "work"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.work.mkdir()

    def install(self, requirements: list[str]) -> int:
        """Install with pip; returns how many packages that are. Refuses the ones with CUDA before any download."""
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--no-compile"]
        report = self.folder / "plan.json"
        self.output([*pip, "--dry-run", "--report", str(report), *requirements])
        planned = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
        if unwanted := [name for name in planned if name.lower().startswith(UNWANTED)]:
            raise CheckFailedError(f"pip would install {', '.join(unwanted)}: name a torch without CUDA with --torch")
        self.output([*pip, *requirements])
        return len(planned)

    def output(self, command: list[str], *, codes: tuple[int, ...] = (0,), **more: str) -> str:
        """What a command prints; an error if its exit code is none of ``codes``."""
        done = subprocess.run(
            command, cwd=self.work, env={**os.environ, **more}, text=True, check=False, capture_output=True
        )
        text = done.stdout + done.stderr
        if done.returncode not in codes or "Traceback" in text:
            raise CheckFailedError(f"{' '.join(command[:4])} … exited with {done.returncode}:\n{text}")
        return text


def check(environment: Environment, extra: Extra) -> None:
    holdfast = str(environment.folder / "bin/holdfast")
    version = environment.output([holdfast, "--version"])
    if not re.search(r"\d+\.\d+\.\d+", version):
        raise CheckFailedError(f"holdfast --version prints {version!r}")
    for enabled in ("", "1"):  # 1: warnings, such as a grace period that is not known
        environment.output([holdfast, "doctor"], codes=(0, 1), HOLDFAST_ENABLED=enabled)
    if extra.program:
        program = environment.work / "program.py"  # in a file: a function that is sent elsewhere travels as its source
        program.write_text(extra.program)
        environment.output([str(environment.python), str(program)], **extra.environment)
    for kind in extra.kinds:
        preempt_and_resume(environment, kind, extra)


def preempt_and_resume(environment: Environment, name: str, extra: Extra) -> None:
    kind = KINDS[name]
    folder = environment.work / name
    folder.mkdir()
    for preempt_at, code in ((PREEMPT_AT, PREEMPTED), (0, 0)):
        with start(kind, folder, python=environment.python, PREEMPT_AT=str(preempt_at), **extra.environment) as process:
            try:
                output, _ = process.communicate(timeout=CHECK_LIMIT_S)
            finally:
                process.kill()
        if process.returncode != code:
            raise CheckFailedError(f"{name}: exit code {process.returncode} instead of {code}\n{output}")
    if f"checkpoint-{PREEMPT_AT}, step {PREEMPT_AT}" not in output:
        raise CheckFailedError(f"{name} does not say that it resumes from step {PREEMPT_AT}:\n{output}")


def build(folder: Path) -> Path:
    """The wheel, from a copy of the sources: a build leaves files beside them."""
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    ]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@contextmanager
def working_folder(parent: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-extras-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the environment is removed
    parser = argparse.ArgumentParser(description="Install the wheel with each extra alone, and use it.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"which: {', '.join(EXTRAS)} (default: all)")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement for extras with torch")
    parser.add_argument("--folder", help="where the environments are made, one at a time: 3 GB (default: $TMPDIR)")
    options = parser.parse_args()
    if unknown := set(options.extras) - set(EXTRAS):
        parser.error(f"no such extra: {', '.join(sorted(unknown))}")
    for name in [name for name in os.environ if name.startswith(("HOLDFAST_", "CHECKPOINT_", "RAY_", "PYTHON"))]:
        del os.environ[name]
    failed = 0
    with working_folder(options.folder) as folder:
        wheel = build(folder)
        print(f"{'extra':14} {'packages':>8} {'install':>9} {'check':>9}", flush=True)
        for name in options.extras or EXTRAS:
            failed += not tried(name, wheel, folder / name, options.torch)
    return min(failed, 1)


def tried(name: str, wheel: Path, folder: Path, torch: str) -> bool:
    """One line of the table; whether all is well."""
    extra = EXTRAS[name]
    requirements = [*([torch] if extra.torch else []), f"{wheel}[{name}]" if name != "none" else str(wheel)]
    try:
        environment = Environment(folder)
        began = time.monotonic()
        packages = environment.install(requirements)
        installed = time.monotonic()
        print(f"{name:14} {packages:8} {installed - began:7.0f} s", end=" ", flush=True)
        check(environment, extra)
        print(f"{time.monotonic() - installed:7.0f} s   ok", flush=True)
    except CheckFailedError as error:
        print(f"   {name} failed\n{error}", flush=True)
        return False
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
