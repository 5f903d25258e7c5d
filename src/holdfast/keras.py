"""A Keras training that survives preemption, by one callback::

    from holdfast.keras import JITCheckpoint

    model.fit(x, y, epochs=10, callbacks=[JITCheckpoint("checkpoints")])

For Keras 3 and for tf-keras, whichever the model is made with. ``HOLDFAST_ENABLED=1`` in the environment does the same
for every ``fit`` of a script that is not changed at all: see ``docs/keras.md``.
"""

from __future__ import annotations

from holdfast.adapters.keras.training import JITCheckpoint, install_into_loaded

install_into_loaded()

__all__ = ["JITCheckpoint"]
