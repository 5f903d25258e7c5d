"""tinytrain: what ``Trainer.fit`` goes through, so that the fit of an unmodified script survives preemption.

The replacements are methods of the classes in :mod:`.wrappers`; those of the scope ``fit`` are in place on one trainer,
while its ``fit`` runs. Importing this module costs the standard library alone.
"""

from __future__ import annotations

from typing import Any

from holdfast.base.patching import Patch, PatchSet, Reads

TINYTRAIN = PatchSet(
    framework="tinytrain",
    oldest="1.0",
    newest="1.4",
    entry="tinytrain.trainer:Trainer.fit",
    patches=(
        Patch(target="tinytrain.trainer:Trainer.fit", wrap="fit", why="a fit begins and ends"),
        Patch(target="tinytrain.trainer:Trainer._epochs", wrap="epochs", why="the epochs that are left", scope="fit"),
        Patch(
            target="tinytrain.trainer:Trainer._batches", wrap="batches", why="the batches that are left", scope="fit"
        ),
        Patch(target="tinytrain.trainer:Trainer._step", wrap="step", why="the step boundary", scope="fit"),
    ),
    reads=(
        Reads("tinytrain.trainer:Trainer.model"),
        Reads("tinytrain.trainer:Trainer.optimizer"),
        Reads("tinytrain.trainer:Trainer.loader"),
        Reads("tinytrain.trainer:Trainer.history"),
    ),
)
TABLES = (TINYTRAIN,)


def install(module: Any) -> None:
    """``module``: ``tinytrain.trainer``, which was just imported."""
    from .wrappers import Wrappers

    TINYTRAIN.apply(Wrappers(TINYTRAIN))
