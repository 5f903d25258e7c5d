"""What must be true of a run's folder, whatever happened to the run."""

from __future__ import annotations

import tempfile

import drill
from holdfast.store import open_backend
from holdfast.store.checkpoints import verify, whole

_known: dict[str, drill.Outcome] = {}


def assert_whole(folder: str, minimum: int = 1):
    """Everything visible is whole, byte for byte; returns the newest."""
    found = list(whole([open_backend(str(folder))]))
    assert len(found) >= minimum, f"{folder} holds {len(found)} whole checkpoints"
    for checkpoint in found:
        assert verify(checkpoint) == []
    return found[0]


def last_completed_when_noticed(folder: str) -> int:
    """The step that was completed when the first notice of the last attempt came."""
    events = drill.journal(folder)
    attempt = max(event["attempt"] for event in events)
    return min(
        event["step"]
        for event in events
        if event["event"] == "notice" and event["attempt"] == attempt and "step" in event
    )


def uninterrupted(server, spec: drill.Spec) -> drill.Outcome:
    """The same training without faults, run once for each kind."""
    what = (
        "world",
        "epochs",
        "samples",
        "batch",
        "workers",
        "accumulate",
        "dropout",
        "batchnorm",
        "augment",
        "stateful",
    )
    more = ("fsdp", "scaler", "evaluate_every", "isolate_evaluation", "width", "frozen", "device")
    shape = {name: getattr(spec, name) for name in (*what, *more)}
    key = repr(sorted(shape.items()))
    if key not in _known:
        _known[key] = server.run(drill.Spec(tempfile.mkdtemp(prefix="holdfast-plain-") + "/run", **shape))
        assert _known[key].codes == [0] * spec.world, _known[key].log
    return _known[key]
