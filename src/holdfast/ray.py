"""Ray Train with just-in-time checkpoints, switched on in code::

    from holdfast.ray import JITCheckpointConfig, RunConfig

    TorchTrainer(train_func, run_config=RunConfig(jit_checkpoint_config=JITCheckpointConfig(enabled=True)))

Importing this lets ``ray.train.RunConfig`` take the config; ``RunConfig`` here is the same class. Environment
variables do the same without a change of code: see ``docs/ray.md``.
"""

from __future__ import annotations

import ray.train

from holdfast.adapters.ray.callback import JITCheckpointCallback, JITCheckpointConfig
from holdfast.adapters.ray.load import load
from holdfast.adapters.ray.patches import install

install(ray.train)
RunConfig = ray.train.RunConfig

__all__ = ["JITCheckpointCallback", "JITCheckpointConfig", "RunConfig", "load"]
