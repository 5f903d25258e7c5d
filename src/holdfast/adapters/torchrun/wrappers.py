"""Replacements of torchrun's own functions; :mod:`.patches` says which, and what each is for."""

from __future__ import annotations

import signal
from typing import Any


class Wrappers:
    """Each method takes one of torchrun's functions and returns its replacement."""

    def __init__(self, wait_s: float, exit_code: int = 0) -> None:
        """``wait_s``: least time from the end of one rank to SIGKILL for the others. ``exit_code``: of preemptions."""
        self._wait_s = wait_s
        self._exit_code = exit_code

    def launch_agent(self, original: Any) -> Any:
        def launch_agent(*arguments: Any, **options: Any) -> Any:
            from torch.distributed.elastic.multiprocessing.api import SignalException
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

            try:
                return original(*arguments, **options)
            except SignalException as error:
                if error.sigval == signal.SIGTERM:
                    raise SystemExit(self._exit_code) from None
                raise
            except ChildFailedError as error:
                # Of several, the first decides: those after it may have been ended by torchrun, or lost their peer.
                first = min(error.failures.values(), key=lambda failure: failure.timestamp)
                if first.exitcode == self._exit_code:
                    raise SystemExit(self._exit_code) from None
                raise

        return launch_agent

    def close(self, original: Any) -> Any:
        def close(context: Any, death_sig: Any = None, timeout: int = 30) -> None:
            original(context, death_sig, max(timeout, round(self._wait_s)))

        return close
