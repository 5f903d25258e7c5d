"""torchrun: its exit code, and the time that it leaves its ranks.

torchrun leaves with 1 whatever its ranks said. A cluster's restart policy looks at the exit code: 143 for a
preemption costs a job nothing, 1 is a failure that counts. So a torchrun whose ranks left after a just-in-time save,
or that was told to stop itself, leaves with their code. After the first rank has left, the others get the whole grace
period instead of torchrun's 30 s.

The launcher of holdfast reports the exit codes itself. It needs the limit alone: :func:`install_limit`.
"""

from __future__ import annotations

from typing import Any

from holdfast.base.patching import Patch, PatchSet, Reads

_LAUNCHER = "launcher"
_CLOSE = "torch.distributed.elastic.multiprocessing.api:PContext.close"
_PATIENCE = "surviving ranks get the grace period to save: torchrun kills them 30 s after one has ended"

TORCHRUN = PatchSet(
    framework="torch",
    oldest="2.6",
    newest="2.13.0",
    patches=(
        Patch(
            target="torch.distributed.launcher.api:launch_agent",
            wrap="launch_agent",
            why="leave with the exit code of a preempted rank, not with 1",
        ),
        Patch(target=_CLOSE, wrap="close", why=_PATIENCE),
        Patch(target=_CLOSE, wrap="close", why=_PATIENCE, scope=_LAUNCHER),
    ),
    reads=(
        Reads("torch.distributed.elastic.multiprocessing.api:SignalException"),
        Reads("torch.distributed.elastic.multiprocessing.errors:ChildFailedError"),
    ),
    entry="torch.distributed.launcher.api:elastic_launch.__call__",
)
TABLES = (TORCHRUN,)


def install(api: Any) -> None:
    """``api``: the module ``torch.distributed.launcher.api``."""
    from holdfast.adapters.torchrun.wrappers import Wrappers
    from holdfast.config import Settings

    settings = Settings.load()
    TORCHRUN.apply(Wrappers(settings.grace_period, settings.exit_code))


def install_limit(wait_s: float) -> None:
    """Leave torchrun's exit code to the caller. After one rank has ended, the others get ``wait_s``."""
    from holdfast.adapters.torchrun.wrappers import Wrappers

    TORCHRUN.undo()
    TORCHRUN.begin(_LAUNCHER, Wrappers(wait_s))
