"""Signals that come after the save, on the way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import atexit, os, signal, sys, threading, time
import torch, holdfast

folder, place = sys.argv[1:]

def pause(mkdir=os.mkdir, sleep=time.sleep, path=f"{folder}/leaving"):  # names are gone when modules are
    mkdir(path)
    sleep(2)

class Slow:
    def __del__(self, pause=pause):
        pause()

if place == "atexit":
    atexit.register(pause)
elif place == "modules":
    torch.slow = Slow()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    with holdfast.Run(f"{folder}/run", model=model, optimizer=optimizer, settings={"kill_wait": 0.0}) as run:
        for step, _ in enumerate(run.batches([0] * 1000)):
            run.step()
            time.sleep(0.01)
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
finally:
    if place == "finally":
        pause()
    if place == "goes on":
        with holdfast.Run(f"{folder}/other", model=model, optimizer=optimizer, settings={"kill_wait": 0.0}) as run:
            for step, _ in enumerate(run.batches([0] * 1000)):
                run.step()
                time.sleep(0.01)
                if step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("place", ["finally", "atexit", "modules"])
def test_a_signal_on_the_way_out_changes_nothing_in_how_the_process_ends(tmp_path, place):
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), place])
    until = time.monotonic() + 60
    while not (tmp_path / "leaving").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 143


def test_a_process_that_goes_on_listens_again(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), "goes on"], timeout=60, check=False)
    assert done.returncode == 143
    assert list((tmp_path / "other").glob("checkpoint-*/holdfast.json"))
