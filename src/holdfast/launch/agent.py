"""torchrun, with a report of how each rank ended and without its tracebacks.

Run as ``python -m holdfast.launch.agent REPORT WAIT WORKERS -- COMMAND…``, in a process of its own, since it
imports torch. Three things differ from ``python -m torch.distributed.run``:

- torchrun leaves with 1 whatever the ranks said. Here the exit codes of all ranks go into the file
  REPORT, and the code of the rank that failed first becomes the process's own.
- After a rank has died, torchrun gives the others 30 s whatever is set. Here they get WAIT seconds, so
  that survivors with much to write can finish.
- The ranks are started through :mod:`holdfast.launch.leash`: they are told when this process is killed.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from holdfast.adapters.torchrun.patches import install_limit
from holdfast.launch.leash import leashed


def main(argv: list[str]) -> int:
    report, wait_s, workers = argv[0], float(argv[1]), argv[2]
    command = argv[argv.index("--") + 1 :]
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "LOGLEVEL" not in os.environ:  # the launcher says what happened, in one line
        for name in logging.root.manager.loggerDict:
            if name.startswith(("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher")):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    install_limit(wait_s)  # the exit codes of the ranks are reported here, not by the adapter
    program, *rest = leashed(os.getpid(), command)
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={workers}", "--max-restarts=0", "--no-python"]
    try:
        torchrun.run(torchrun.parse_args([*options, program, *rest]))
    except ChildFailedError as error:
        failures = error.failures
        _write(report, {rank: failure.exitcode for rank, failure in failures.items()})
        first = min(failures, key=lambda rank: failures[rank].timestamp)
        return int(failures[first].exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    _write(report, {})
    return 0


def _write(path: str, exit_codes: dict[int, int]) -> None:
    """``exit_codes``: those that are not 0; of a rank that a signal killed, the negative number of the signal."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({str(rank): code for rank, code in exit_codes.items()}, file)
    os.replace(temporary, path)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(128 - code if code < 0 else code)
