"""Make the checkpoints below data/VERSION/ with the holdfast of the Python that runs this: see README.md.

``python -m tests.compat.make_checkpoints VERSION [KIND …]``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
DATA = HERE / "data"
PREEMPT_AT = 17
"""In the middle of the second epoch of twelve steps."""
PREEMPTED = 143


@dataclass(frozen=True)
class Kind:
    """A way to train, and the script that trains that way."""

    script: str
    folder: str
    """The folder of the run, as seen from where the script is started."""
    needs: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


FOLLOWED = {"HOLDFAST_ENABLED": "1"}
KINDS = {
    "run": Kind("run.py", "checkpoints", ("torch",)),
    "replay": Kind("replay.py", "holdfast-runs/replay", ("torch",), FOLLOWED),
    "transformers": Kind("transformers_trainer.py", "checkpoints", ("transformers", "accelerate"), FOLLOWED),
    "lightning": Kind("lightning_trainer.py", "root/holdfast", ("lightning",), FOLLOWED),
    "keras": Kind("keras_fit.py", "holdfast-runs/keras_fit", ("keras", "tensorflow"), FOLLOWED),
    "tf-keras": Kind("keras_fit.py", "holdfast-runs/keras_fit", ("tf_keras",), {**FOLLOWED, "KERAS_KIND": "tf_keras"}),
}


def start(kind: Kind, folder: Path, *, python: str | Path = sys.executable, **more: str) -> subprocess.Popen[str]:
    """Start the script in ``folder``, where the run has or gets its checkpoints."""
    for path in (SCRIPTS / kind.script, SCRIPTS / "record.py"):
        shutil.copy(path, folder)
    ours = ("HOLDFAST_", "CHECKPOINT_", "RAY_TRAIN_", "TRAINING_PROGRESS_", "PREEMPT_AT", "KERAS_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"HOLDFAST_KILL_WAIT": "0", "RESULT": "result.json", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "HF_HUB_OFFLINE": "1"}
    environment |= kind.environment | more
    command = [python, kind.script]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def make(version: str, name: str) -> None:
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        process = start(kind, folder, PREEMPT_AT=str(PREEMPT_AT))
        output, _ = process.communicate()
        if process.returncode != PREEMPTED:
            sys.exit(f"{name}: exit code {process.returncode} instead of {PREEMPTED}\n{output}")
        target = DATA / version / name
        shutil.rmtree(target, ignore_errors=True)
        # What lies beside the checkpoints names the machine, its folders and the process; a run resumes without it.
        for checkpoint in folder.joinpath(kind.folder).glob("checkpoint-*"):
            shutil.copytree(checkpoint, target / "run" / checkpoint.name)
        result = json.loads((folder / "result.json").read_text())
        result["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
        (target / "expected.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}: {', '.join(sorted(path.name for path in (target / 'run').iterdir()))}")


if __name__ == "__main__":
    import holdfast

    version, *names = sys.argv[1:]
    if holdfast.__version__ != version:
        sys.exit(f"this is holdfast {holdfast.__version__}, not {version}")
    for name in names or KINDS:
        make(version, name)
