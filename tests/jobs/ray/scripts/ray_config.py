"""The same training, with just-in-time checkpoints switched on in code."""

import ray_vanilla

from holdfast.ray import JITCheckpointConfig, RunConfig


def with_config(**fields):
    return RunConfig(**fields, jit_checkpoint_config=JITCheckpointConfig(enabled=True, kill_wait=0.2))


if __name__ == "__main__":
    ray_vanilla.RunConfig = with_config
    ray_vanilla.main()
