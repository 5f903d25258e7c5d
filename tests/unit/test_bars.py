"""Messages and progress bars do not share a line."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("tqdm", reason="needs tqdm: pip install tqdm")

SCRIPT = """
import logging, sys
from tqdm.auto import tqdm
from holdfast.base.bars import keep_apart
log = logging.getLogger("holdfast")
keep_apart(log)
keep_apart(log)
{before}
log.warning("before any bar")
with tqdm(range(3), mininterval=0, miniters=1, file=sys.{file}) as bar:
    bar.update()
    log.warning("beside the bar")
    log.warning("at once again")
    bar.update(2)
log.warning("after the bar")
"""


def stderr_of(before: str = "", file: str = "stderr") -> str:
    script = SCRIPT.format(before=before, file=file)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, env={"HOLDFAST_ENABLED": "0"}
    )
    return done.stderr.decode()


@pytest.mark.parametrize("before", ["", "logging.basicConfig(format='%(message)s')"])
def test_a_message_beside_a_bar_has_a_line_of_its_own(before):
    lines = [line.rpartition("\r")[2] for line in stderr_of(before).split("\n")]
    messages = ["before any bar", "beside the bar", "at once again", "after the bar"]
    assert [line for line in lines if line in messages] == messages
    assert "" not in lines[:-1], "no line is empty"


def test_nothing_is_added_where_the_bar_or_the_messages_are_elsewhere(tmp_path):
    assert stderr_of(file="stdout") == "before any bar\nbeside the bar\nat once again\nafter the bar\n"
    stderr = stderr_of(f"log.addHandler(logging.FileHandler({str(tmp_path / 'log')!r})); log.propagate = False")
    assert stderr.count("\n") == 1
