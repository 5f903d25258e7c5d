"""What the tests of the command line share: checkpoints without torch, and processes to run and look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.launch import procs
from holdfast.store.local import LocalBackend
from holdfast.store.manifest import FileEntry, Manifest, checkpoint_name
from holdfast.store.pipeline import ChunkPool, FileWriter

HERE = Path(__file__).parent
TRAINING = str(HERE / "tiny_training.py")
PRETEND = str(HERE / "pretend_training.py")
HOLDFAST = [sys.executable, "-m", "holdfast.cli"]


@dataclass
class Bytes:
    """A file of a checkpoint."""

    path: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def chunks(self, pool: ChunkPool) -> Iterator[memoryview]:
        yield memoryview(self.data)


def make_checkpoint(
    location: str | Path,
    step: int,
    *,
    reason: str = "periodic",
    run: str = "test",
    attempt: int = 1,
    complete: bool = False,
    size: int = 5000,
    write_s: float = 0.01,
) -> None:
    backend = LocalBackend(str(location))
    name = checkpoint_name(step)
    backend.begin(name)
    writer = FileWriter()
    entries: list[FileEntry] = [
        writer.write(Bytes(path, bytes([step % 251]) * size), lambda path, size: backend.create(name, path, size))
        for path in ("model.safetensors", "rank-00000.safetensors")
    ]
    writer.join()
    manifest = Manifest(
        step=step,
        reason=reason,
        epoch=step // 10,
        world_size=1,
        files=tuple(entries),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        run=run,
        attempt=attempt,
        complete=complete,
        timings={"before_write_s": 0.0, "write_s": write_s, "gather_s": 0.0},
    )
    backend.commit(name, manifest.encode())


def environ(**changes: str) -> dict[str, str]:
    """This environment without what decides about runs, in colours or not."""
    ours = ("HOLDFAST_", "CHECKPOINT_", "TORCH_ELASTIC", "OMP_NUM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "NO_COLOR": "1", **changes}


def holdfast(*arguments: str | Path, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOLDFAST, *map(str, arguments)],
        cwd=cwd,
        env=environ(**changes),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def json_of(*arguments: str | Path, code: int = 0, **options: Any) -> Any:
    """What a command prints with ``--json``, after looking at its exit code."""
    done = holdfast(*arguments, "--json", **options)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def start(*arguments: str | Path, output: Path, **changes: str) -> subprocess.Popen[bytes]:
    """A command in the background."""
    with output.open("ab") as file:
        return subprocess.Popen(
            [*HOLDFAST, *map(str, arguments)],
            env=environ(**changes),
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
        )


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true answer."""
    until = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)
    return answer


def events(location: Path, name: str) -> list[dict[str, Any]]:
    path = location / ".holdfast" / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def processes_about(text: str) -> list[int]:
    """Processes whose command line holds ``text``, such as a test's own folder."""
    return [pid for pid in procs.table() if text in " ".join(procs.command_of(pid)) and pid != os.getpid()]
