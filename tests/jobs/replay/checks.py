"""What must be true of a plain script that was stopped and started again."""

from __future__ import annotations

import tempfile

from tests.jobs.replay import drill
from tests.kit.checks import assert_whole, last_completed_when_noticed

_known: dict[str, list[list[str]]] = {}


def uninterrupted(server: drill.Server, spec: drill.Spec) -> list[list[str]]:
    """What the script prints by itself, with holdfast off; run once for each kind."""
    matters = {name: value for name, value in spec.env.items() if not name.startswith(("HOLDFAST_", "PAUSE"))}
    key = repr((spec.script, spec.world, matters, spec.options))
    if key not in _known:
        folder = tempfile.mkdtemp(prefix="holdfast-plain-")
        outcome = server.run(spec.plain(dir=f"{folder}/run", env={**matters, "HOLDFAST_ENABLED": "0"}))
        assert outcome.codes == [0] * spec.world, outcome.log
        _known[key] = outcome.printed
    return _known[key]


def check(server: drill.Server, spec: drill.Spec, *, may_end: bool = False) -> drill.Outcome:
    """Interrupt, look at what is left, start again without faults, and compare all that was printed.

    ``may_end``: the notice comes so late that the run may end before it is heard.
    """
    expected = uninterrupted(server, spec)
    first = server.run(spec)
    assert set(first.codes) == {143} or (may_end and set(first.codes) <= {0, 143}), first.log
    newest = assert_whole(spec.dir)
    assert newest.step >= last_completed_when_noticed(spec.dir), first.log
    assert not newest.manifest.inexact
    for before, now in zip(expected, first.printed, strict=True):
        assert before[: len(now)] == now
    return go_on(server, spec)


def go_on(server: drill.Server, spec: drill.Spec) -> drill.Outcome:
    """The same command again: the replay prints what was printed, and the rest is as if nothing had happened."""
    again = server.run(spec.plain())
    assert again.codes == [0] * spec.world, again.log
    assert again.printed == uninterrupted(server, spec), again.log
    assert assert_whole(spec.dir).manifest.complete
    return again
