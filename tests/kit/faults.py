"""Faults in the ranks of a job that a fork server has forked."""

from __future__ import annotations

import os
from dataclasses import replace

from holdfast.testing import Fault, Injector
from tests.kit.fork_server import pids_in


class JobInjector(Injector):
    """An injector whose faults name other ranks in ``also``, not processes.

    Ranks become processes when a fault happens: the first rank runs before the last one is forked.
    """

    __slots__ = ("pids",)

    pids: str | os.PathLike[str]
    """The file with the processes of the job; see :func:`pids_in`."""

    def inject(self, fault: Fault) -> None:
        if fault.also:
            pids = pids_in(self.pids)
            fault = replace(fault, also=[pids[other] for other in fault.also])
        super().inject(fault)
