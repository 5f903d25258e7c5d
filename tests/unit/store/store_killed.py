"""Kills a process that saves, again and again, and looks at what is left. Run by test_store_kill.py.

    python store_killed.py FOLDER KILLS SEED

Each victim is a fork of this small process. It takes the location, cleans up, goes on from the newest checkpoint
and saves until it is killed, at a random moment after it said that it begins a save.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

from holdfast.base.process import Owner
from holdfast.store.checkpoints import clean, retain, unfinished, verify, whole
from holdfast.store.local import LocalBackend
from holdfast.testing.backend_contract import read_back, sample, save_checkpoint

KEEP = 2
LATEST_KILL_S = 0.06


BLOCK = sample("block", 1 << 20)


def files(step: int) -> dict[str, bytes]:
    """What the checkpoint of a step holds: some MB, part of which never changes. Cheap, so that victims mostly save."""
    turn = step * 4099 % len(BLOCK)
    turned = BLOCK[turn:] + BLOCK[:turn]
    return {
        "frozen/embedding.bin": BLOCK,
        "model.bin": b"model of %d" % step + turned,
        "optimizer/rank-0.bin": b"optimizer of %d" % step + turned[: 1 << 19],
        "rng.bin": b"rng of %d" % step + turned[:5000],
        "empty": b"",
    }


def victim(folder: str, tell: int, incremental: bool) -> None:
    backend = LocalBackend(folder)
    backend.acquire(Owner("killed"), wait_s=5.0)
    clean(backend)
    assert unfinished(backend) == []
    newest = next(whole([backend]), None)
    base = newest.manifest if newest is not None else None
    step = base.step if base is not None else 0
    while True:
        step += 1
        content = files(step)
        os.write(tell, b"b%d\n" % step)
        base = save_checkpoint(backend, step, content, unchanged_since=base if incremental else None)
        os.write(tell, b"c%d\n" % step)
        retain(backend, KEEP)


def main(folder: str, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    committed = 0
    during_save = 0
    began = time.monotonic()
    for number in range(kills):
        ear, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ear)
                victim(folder, tell, incremental=number % 2 == 1)
            except BaseException as error:
                os.write(tell, f"e{error!r}\n".encode())
            os._exit(1)
        os.close(tell)
        said = b""
        while b"b" not in said:
            piece = os.read(ear, 65536)
            assert piece.startswith((b"b", b"c")), f"kill {number}: the victim failed: {said + piece!r}"
            said += piece
        time.sleep(chance.uniform(0.0, LATEST_KILL_S))
        os.kill(pid, signal.SIGKILL)
        while piece := os.read(ear, 65536):
            said += piece
        os.close(ear)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL, said
        lines = said.decode().split()
        during_save += lines[-1].startswith("b")
        committed = max([committed, *(int(line[1:]) for line in lines if line.startswith("c"))])
        committed = check(folder, number, committed)
    print(
        json.dumps(
            {
                "kills": kills,
                "during_save": during_save,
                "committed": committed,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )


def check(folder: str, number: int, committed: int) -> int:
    """All that is visible is whole, and what was committed is there; returns the newest."""
    backend = LocalBackend(folder)
    found = {checkpoint.step: checkpoint for checkpoint in whole([backend])}
    visible = [name for name in backend.names() if backend.read_manifest(name) is not None]
    assert len(visible) == len(found), f"kill {number}: {visible} are visible, {sorted(found)} can be opened"
    for step, checkpoint in found.items():
        assert verify(checkpoint) == [], f"kill {number}: checkpoint {step} is damaged: {verify(checkpoint)}"
        assert read_back(backend, checkpoint.manifest) == files(step), f"kill {number}: {step} holds other bytes"
    # The last that was reported is there, or one whose report the kill cut off; and the one before it.
    newest = max(found, default=0)
    assert newest in (committed, committed + 1), f"kill {number}: {committed} is lost: {sorted(found)}"
    expected = range(max(1, newest - KEEP + 1), newest + 1)
    assert set(expected) <= set(found), f"kill {number}: {sorted(found)} are left of {list(expected)}"
    return newest


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
