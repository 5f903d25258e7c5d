"""What must be true of a Trainer's run, whatever happened to it."""

from __future__ import annotations

import json
import tempfile

from holdfast.store.manifest import step_of
from tests.jobs.transformers import drill
from tests.kit.checks import assert_whole
from tests.kit.jobs import journal

_known: dict[str, drill.Outcome] = {}

EVALUATE = {"eval_strategy": "steps", "eval_steps": 6}
SAVE = {"save_strategy": "steps", "save_steps": 4}


def fault(phase: str, step: int, rank: int = 0, **more) -> dict:
    return {"rank": rank, "step": step, "phase": phase, **more}


def steps_in(folder: str) -> list[int]:
    """Steps of the checkpoint folders, whole or not."""
    import os

    return sorted(step for name in os.listdir(folder) if (step := step_of(name)) is not None)


def without_holdfast(server: drill.Server, spec: drill.Spec) -> drill.Outcome:
    """The same training, uninterrupted and with transformers alone; run once for each kind."""
    key = json.dumps([spec.script, spec.world, spec.options, spec.args], sort_keys=True)
    if key not in _known:
        folder = tempfile.mkdtemp(prefix="holdfast-plain-") + "/run"
        _known[key] = server.run(spec.plain(dir=folder, env={"HOLDFAST_ENABLED": "0"}))
        assert _known[key].codes == [0] * spec.world, _known[key].log
    return _known[key]


def assert_same(outcome: drill.Outcome, plain: drill.Outcome) -> None:
    """Same parameters, optimizer and log, bit for bit."""
    assert outcome.result is not None, outcome.log
    assert outcome.result["digest"] == plain.result["digest"], outcome.log
    assert outcome.trained == plain.trained
    assert outcome.result["loss"] == plain.result["loss"]


def last_completed_when_noticed(folder: str) -> int:
    events = journal(folder)
    attempt = max(event["attempt"] for event in events)
    noticed = [
        event["step"]
        for event in events
        if event["event"] == "notice" and event["attempt"] == attempt and "step" in event
    ]
    return min(noticed)


def interrupt_and_resume(server: drill.Server, spec: drill.Spec, limit_s: float = 90.0) -> drill.Outcome:
    """Interrupt with a notice, look at what is left, go on, and compare; returns the interrupted attempt."""
    outcome = server.run(spec, limit_s)
    assert set(outcome.codes) == {143}, outcome.log
    assert "after train" not in outcome.log
    newest = assert_whole(spec.dir)
    assert newest.step >= last_completed_when_noticed(spec.dir), outcome.log
    assert not newest.manifest.inexact
    resumed = server.run(spec.plain(), limit_s)
    assert resumed.codes == [0] * spec.world, resumed.log
    assert f"resuming from {spec.dir}/{newest.name}, step {newest.step}" in resumed.log
    assert_same(resumed, without_holdfast(server, spec))
    return outcome
