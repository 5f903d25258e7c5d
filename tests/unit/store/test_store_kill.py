"""``kill -9`` at random moments of saving."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

KILLS = 200


def test_nothing_that_was_committed_is_lost_to_two_hundred_kills(tmpfs_path: Path) -> None:
    # In memory: what a killed process has written is there, whatever the disk; a fast one means more saves to hit.
    seed = random.randrange(1 << 32)
    script = Path(__file__).with_name("store_killed.py")
    command = [sys.executable, str(script), str(tmpfs_path / "run"), str(KILLS), str(seed)]
    print("seed", seed)
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, f"seed {seed}: {result.stderr[-3000:]}"
    outcome = json.loads(result.stdout)
    print(outcome)
    assert outcome["kills"] == KILLS
    assert outcome["during_save"] > KILLS / 4, "most kills missed the save"
    assert outcome["committed"] > 10, "the run did not get on"
