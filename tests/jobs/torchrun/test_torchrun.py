"""What plain torchrun says at its end: a preemption is told from a crash."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
# Before the barrier: from there on a rank may leave, and torchrun tells the other one to stop.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if sys.argv[2] == "late":  # the other rank has left; this one is still writing
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), open(f"{sys.argv[1]}/written", "w"), sys.exit(143)))
dist.barrier()
open(f"{sys.argv[1]}/{rank}", "w").write(str(os.getpid()))
if sys.argv[2] == "late":
    time.sleep(0 if rank else 240)
    sys.exit(143)
sys.exit(int(sys.argv[2])) if rank and sys.argv[2] != "wait" else time.sleep(240)
"""


def torchrun(tmp_path: Path, what: str, **environ: str) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "CHECKPOINT_"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, str(tmp_path / "script.py"), str(tmp_path), what],
        env={**kept, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.core(2)
@pytest.mark.parametrize(
    ("environ", "what", "code"),
    [
        ({"HOLDFAST_ENABLED": "1"}, "143", 143),
        ({"HOLDFAST_ENABLED": "1"}, "1", 1),
        ({"HOLDFAST_ENABLED": "1"}, "137", 1),
        ({"HOLDFAST_ENABLED": "1", "HOLDFAST_EXIT_CODE": "75"}, "75", 75),
        ({"HOLDFAST_ENABLED": "0"}, "143", 1),
        ({}, "143", 1),
    ],
)
def test_the_exit_code_of_a_preempted_rank_is_torchruns_own(tmp_path, environ, what, code):
    process = torchrun(tmp_path, what, **environ)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output


def test_torchrun_that_is_told_to_stop_says_so(tmp_path):
    process = torchrun(tmp_path, "wait", HOLDFAST_ENABLED="1")
    until = time.monotonic() + 240
    while not all((tmp_path / str(rank)).exists() for rank in (0, 1)):
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(0.2)
    process.terminate()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 143, output


def test_a_rank_that_still_writes_is_not_killed(tmp_path):
    process = torchrun(tmp_path, "late", HOLDFAST_ENABLED="1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 143, output
    assert (tmp_path / "written").exists()
