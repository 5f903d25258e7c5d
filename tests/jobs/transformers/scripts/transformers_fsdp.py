"""The training of transformers_train.py with FSDP2 on CPUs.

accelerate shards on accelerators alone, and on CPUs silently trains with DDP instead. Everything below that one
decision works on CPUs too, so here it is taken otherwise.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType

_init = PartialState.__init__


def _as_on_accelerators(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_XPU


PartialState.__init__ = _as_on_accelerators
runpy.run_path(str(Path(__file__).with_name("transformers_train.py")), run_name="__main__")
