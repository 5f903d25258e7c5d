"""A process that holds a location. Run by test_store_runs.py.

    python store_holder.py LOCATION RUN [LEASE_S] [grandchild]

Says "held" once it has it. Then, for each line on its input, does what it says.
"""

from __future__ import annotations

import os
import sys
import time

from holdfast.base.process import Owner
from holdfast.errors import LocationBusyError
from holdfast.store import Backend, open_backend
from holdfast.store.object import ObjectBackend
from holdfast.testing.backend_contract import manifest_for


def main(location: str, run: str, lease_s: str = "120", child: str = "") -> None:
    backend: Backend
    backend = ObjectBackend(location, lease_s=float(lease_s)) if "://" in location else open_backend(location)
    backend.acquire(Owner(run))
    if child:
        pid = os.fork()
        if pid == 0:
            # A loader's worker that outlives its rank: it inherits all that is open.
            time.sleep(60.0)
            os._exit(0)
        print("grandchild", pid, flush=True)
    print("held", flush=True)
    for line in sys.stdin:
        if line.startswith("commit"):
            step = int(line.split()[1])
            try:
                backend.begin(f"checkpoint-{step}")
                backend.commit(f"checkpoint-{step}", manifest_for(step, []).encode())
                print("committed", flush=True)
            except LocationBusyError as error:
                print("busy:", error, flush=True)
        elif line.startswith("leave"):
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
