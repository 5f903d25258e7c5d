"""The run that a run of :mod:`tests.jobs.torch.drill` is compared with."""

from __future__ import annotations

import tempfile

from tests.jobs.torch import drill

_known: dict[str, drill.Outcome] = {}


def uninterrupted(server: drill.Server, spec: drill.Spec) -> drill.Outcome:
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
