"""Start, supervise, pause and resume a run on one machine: on torchrun, with no scheduler of our own."""
