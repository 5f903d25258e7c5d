"""No layer over the files outlives the process that used it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch  # noqa: F401  (the module below reads its place)

from holdfast.adapters.replay.files import _remove_stale_layers

_USER = """
import os, sys, tempfile
from holdfast.adapters.replay.files import _LAYER, _hold
folder = tempfile.mkdtemp(prefix=_LAYER, dir=sys.argv[1])
mark = _hold(folder)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_layer_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", _USER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        try:
            assert user.stdout is not None
            assert user.stdout.readline() == "held\n"
            _remove_stale_layers(str(tmp_path))
            assert len(os.listdir(tmp_path)) == 1
        finally:
            user.send_signal(signal.SIGKILL)
    _remove_stale_layers(str(tmp_path))
    assert os.listdir(tmp_path) == []
