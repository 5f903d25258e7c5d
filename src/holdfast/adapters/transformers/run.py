"""One call of ``Trainer.train`` under holdfast's protection, from the choice of a checkpoint to its end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from holdfast.adapters.transformers.attempt import Attempt
from holdfast.adapters.transformers.feed import calm
from holdfast.adapters.transformers.watch import FinishedBefore, Watch
from holdfast.config import Settings
from holdfast.errors import Preempted
from holdfast.runtime.unfinished import Command, location_of_run

_finished: dict[str, int] = {}
"""Number of training runs in a location that this process has seen the end of."""


def run(
    trainer: Any, resume_from_checkpoint: Any, trial: Any, ignore_keys: Any, train: Callable[[str | None], Any]
) -> Any:
    """Train, resuming from the newest checkpoint. ``train``: the Trainer's own, given the folder to resume from."""
    settings, location, command = _settings(trainer)
    attempt = Attempt(trainer, settings, resume_from_checkpoint, trial, ignore_keys, command)
    crashed = False
    try:
        attempt.begin()
        with Watch(attempt).watching():
            try:
                output = train(attempt.start.path if settings.checkpointing else attempt.asked)
                _finished[location] = _finished.get(location, 0) + 1
                return output
            except Preempted:
                raise
            except FinishedBefore:
                _finished[location] = _finished.get(location, 0) + 1
                return attempt.output_again()
            except BaseException as error:
                crashed = True
                _report(attempt, error)
                raise
    finally:
        attempt.close(crashed=crashed)


def _report(attempt: Attempt, error: BaseException) -> None:
    """The training run failed. It was preempted if it had been told to leave, and is saved."""
    notice, handler = attempt.engine.notice, calm()
    attempt.engine.crashed(error)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
    step = attempt.loop.step
    if notice is not None and attempt.host.saved_all(step) and isinstance(error, Exception):
        # A loader worker that died of the same signal, say.
        raise Preempted(attempt.settings.exit_code, step, notice) from error


def _settings(trainer: Any) -> tuple[Settings, str, Command | None]:
    """The settings of this call, the location as the script knows it, and what tells a run whose folder is dated."""
    settings = Settings.load()
    asked = settings.dir or trainer.args.output_dir
    location, command = asked, None
    if settings.dir is None:
        command = Command.of_this_process({**trainer.args.to_dict(), "model": type(trainer.model).__name__})
        if trainer.args.process_index == 0:
            location = location_of_run(asked, settings, command)
    finished = _finished.get(asked, 0)
    if finished:
        # A second training in the same place is another run: it must not take the first one's end for its own.
        location = f"{location.rstrip('/')}/train-{finished + 1}"
    return settings.replace(dir=location, enabled=True), asked, command
