"""Loggers' files and the checkpoints of ModelCheckpoint after a resume are those of an undisturbed run."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.jobs.lightning.drill import Spec, shared
from tests.jobs.lightning.test_lightning_resume import assert_same, fault, undisturbed

tensorboardX = pytest.importorskip("tensorboardX")


@pytest.fixture(scope="module")
def server():
    return shared()


def files(root: Path) -> list[str]:
    """What a fit has left, without holdfast's own and with one name for all event files."""
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted({re.sub(r"tfevents.*", "tfevents", str(path)) for path in paths if path.parts[0] != "holdfast"})


def rows(root: Path) -> list[dict[str, str]]:
    with (root / "lightning_logs/version_0/metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def events(root: Path) -> list[tuple[str, int, float]]:
    from tensorboardX.proto.event_pb2 import Event

    from holdfast.adapters.lightning.records import _events

    found = []
    for path in root.rglob("*tfevents*"):
        for _, data in _events(str(path)):
            event = Event.FromString(data)
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return sorted(found)


INTERRUPTED = {
    "at the end of an epoch": (fault(24, "epoch-end"), {}),
    "before a batch that follows a validation": (fault(13, "forward"), {}),
    "killed after a periodic save": (fault(17, "forward", action="KILL"), {"HOLDFAST_SAVE_EVERY": "10 steps"}),
}


@pytest.mark.parametrize("case", INTERRUPTED)
@pytest.mark.share(2)
def test_there_is_one_version_with_each_line_once_and_no_stale_checkpoint(server, tmp_path, case) -> None:
    one, env = INTERRUPTED[case]
    args = ["--logs"]
    plain = tmp_path / "plain"
    expected = server.run(Spec(str(plain), args, on=False)).results
    killed = one["action"] == "KILL"
    stopped = server.run(Spec(str(tmp_path / "run"), args, faults=[one], env=env, saved_first=killed))
    assert stopped.codes == [-9 if killed else 143], stopped.log
    again = server.run(Spec(str(tmp_path / "run"), args, env=env))
    assert_same(again, expected)
    wanted, found = plain / "root", tmp_path / "run/root"
    assert files(found) == files(wanted)
    assert rows(found) == rows(wanted)
    if not killed:  # what a killed process had not flushed is lost
        assert events(found) == events(wanted)


def test_a_fit_in_a_folder_named_by_the_clock_is_resumed_where_it_began(server, tmp_path) -> None:
    expected = undisturbed(server, tmp_path, ["--logs"])
    args = ["--logs", "--dated"]
    out = tmp_path / "run"
    assert server.run(Spec(str(out), args, faults=[fault(18, "forward")], patient=False)).codes == [143]
    (first,) = out.glob("2*")
    again = server.run(Spec(str(out), args))
    assert_same(again, expected)
    assert f"this command has begun its run in {first} and not finished it" in again.log
    (second,) = set(out.glob("2*")) - {first}
    assert second.resolve() == first
    assert files(first) == files(tmp_path / "undisturbed/root")
