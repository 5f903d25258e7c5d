"""Training that survives preemption: saved just in time, resumed exactly.

Importing this package costs only the standard library: no torch, no threads, no signal handlers.
"""

from __future__ import annotations
