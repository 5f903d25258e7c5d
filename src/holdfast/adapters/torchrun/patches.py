"""torchrun, so that whoever started it learns that its ranks were preempted and did not crash.

torchrun leaves with 1 whatever its ranks said. A cluster's restart policy looks at the exit code: 143 for a
preemption costs a job nothing, 1 is a failure that counts. So a torchrun whose ranks left after a just-in-time save,
or that was told to stop itself, leaves with their code. After the first rank has left, the others get the whole grace
period instead of torchrun's 30 s.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

from holdfast.adapters.torchrun.limits import be_patient
from holdfast.base.patching import PatchSet
from holdfast.config import Settings

TABLES: tuple[PatchSet, ...] = ()


def install(api: Any) -> None:
    """``api``: the module ``torch.distributed.launcher.api``."""
    launch = api.launch_agent
    if hasattr(launch, "__wrapped__"):
        return
    settings = Settings.load()
    be_patient(settings.grace_period)

    @functools.wraps(launch)
    def launch_agent(*arguments: Any, **options: Any) -> Any:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            return launch(*arguments, **options)
        except SignalException as error:
            if error.sigval == signal.SIGTERM:
                raise SystemExit(settings.exit_code) from None
            raise
        except ChildFailedError as error:
            # Of several, the first decides: those after it may have been ended by torchrun, or lost their peer.
            first = min(error.failures.values(), key=lambda failure: failure.timestamp)
            if first.exitcode == settings.exit_code:
                raise SystemExit(settings.exit_code) from None
            raise

    api.launch_agent = launch_agent
