"""The wrappers that last as long as the driver's process: a run config takes ``jit_checkpoint_config=``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from holdfast.adapters.ray.callback import JITCheckpointCallback, JITCheckpointConfig, is_enabled
from holdfast.errors import ConfigError


def jit_checkpoint_config(_: object) -> type[JITCheckpointConfig]:
    return JITCheckpointConfig


def run_config_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: Any, *args: Any, jit_checkpoint_config: JITCheckpointConfig | None = None, **fields: Any
    ) -> None:
        original(self, *args, **fields)
        if jit_checkpoint_config is None:
            return
        if not isinstance(jit_checkpoint_config, JITCheckpointConfig):
            raise ConfigError(
                f"jit_checkpoint_config={jit_checkpoint_config!r} is not accepted; it must be a JITCheckpointConfig"
            )
        if is_enabled(os.environ, jit_checkpoint_config):
            self.callbacks = [*self.callbacks, JITCheckpointCallback(jit_checkpoint_config)]

    return __init__
