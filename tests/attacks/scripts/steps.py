"""A few steps of a run that needs no framework: python steps.py LOCATION STEPS [BOARD]

``BOARD``: a folder by which the ranks (``RANK``, ``WORLD_SIZE``) meet. The state is a number that each step changes.
Says each step. ``WAIT_AT=STEP:PATH`` waits for a file after that step, ``REMOVE_AT`` alike removes one then.
"""

import os
import struct
import sys
import threading
import time

from holdfast.agree import DirectoryBoard, LocalBoard
from holdfast.config import Settings
from holdfast.engine.saving import Files
from holdfast.progress import Progress
from holdfast.runtime.host import Host
from holdfast.runtime.session import Place
from holdfast.store.pipeline import read_checked
from tests.kit.checkpoints import Bytes

location, steps = sys.argv[1], int(sys.argv[2])
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Training:
    """What the engine knows of the loop below."""

    def __init__(self):
        self.step, self.state, self.changing = 0, 1, threading.Lock()

    def soonest(self):
        return self.step + 1

    def last_boundary(self):
        return self.step

    def epoch(self):
        return 0

    def freeze(self, wait_s):
        return self.changing.acquire(timeout=wait_s)

    def files(self, *, live, at_boundary):
        content = struct.pack("QQ", self.step, self.state) * 512
        return Files(
            own=lambda: [Bytes(f"rank-{rank}", content)],
            shared=lambda: [Bytes("model", content)],
            of=lambda other: [Bytes(f"rank-{other}", content)],
        )

    def size(self):
        return 16384

    def prepare(self):
        pass

    def load(self, checkpoint):
        entry = next(entry for entry in checkpoint.manifest.files if entry.path == "model")
        content = bytearray(entry.size)
        read_checked(checkpoint.backend, checkpoint.name, entry, into=memoryview(content))
        self.step, self.state = struct.unpack_from("QQ", content)


def asked(name: str) -> tuple[int, str]:
    step, _, path = os.environ.get(name, "0:").partition(":")
    return int(step), path


training, wait_at, remove_at = Training(), asked("WAIT_AT"), asked("REMOVE_AT")
board = DirectoryBoard(sys.argv[3], poll_s=0.02) if world > 1 else LocalBoard()
host = Host(Settings.load(dir=location), Place(rank, world, board))
checkpoint = host.resume(training.load)
print("from", checkpoint.name if checkpoint is not None else None, flush=True)
engine = host.start(training, lambda: Progress(step=training.step))
while training.step < steps:
    with training.changing:
        training.step, training.state = training.step + 1, (training.state * 6364136223846793005 + 1) % (1 << 64)
    print("step", training.step, flush=True)
    while training.step == wait_at[0] and not os.path.exists(wait_at[1]):
        time.sleep(0.02)
    if training.step == remove_at[0]:
        os.unlink(remove_at[1])
    if training.step >= engine.next_stop:
        engine.at_boundary(training.step)
try:
    engine.finish(training.step)
finally:
    host.close()
print("trained", training.step, training.state)
