"""Read by every interpreter of a trial, since its folder is in PYTHONPATH."""

import os

import strangers_interrupt

if strangers_interrupt.COUNTER in os.environ:
    os.environ.setdefault(strangers_interrupt.TARGETS, str(os.getpid()))  # the first interpreter is the command
    strangers_interrupt.when_imported("torch", strangers_interrupt.arm)
    strangers_interrupt.seed()
