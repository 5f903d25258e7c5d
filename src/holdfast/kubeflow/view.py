"""A live view of a job: in a notebook a bar that moves, elsewhere a line that is written again."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from typing import Any

from holdfast.kubeflow.jobs import COMPLETE, FAILED, PAUSED, Progress, patient, where

_COLOURS = {COMPLETE: "#2e7d32", FAILED: "#c62828", PAUSED: "#f9a825"}


def as_html(now: Progress) -> str:
    """The job as a few lines of HTML. Everything in it may come from a training that nobody trusts."""
    percent = min(100.0, max(0.0, now.percent or 0.0))
    colour = _COLOURS.get(now.state, "#1565c0")
    file = now.file
    checkpointing = file.get("checkpointing") or {}
    facts = {
        "step": f"{now.step} of {now.total_steps}" if now.total_steps else now.step,
        "epoch": f"{file['epoch']} of {file['totalEpochs']}" if file.get("totalEpochs") else file.get("epoch"),
        "loss": file.get("loss"),
        "learning rate": file.get("learningRate"),
        "ETA": now.eta,
        "resumed from": now.resumed_from,
        "newest checkpoint": (now.latest_checkpoint or "").rstrip("/").rpartition("/")[2] or None,
        "checkpoints": checkpointing.get("checkpointsCreated"),
        "updated": file.get("lastUpdateTime"),
    }
    cells = " · ".join(f"{name} <b>{html.escape(str(value))}</b>" for name, value in facts.items() if value is not None)
    return (
        f'<div style="font-family:sans-serif;max-width:60em"><b>{html.escape(now.name)}</b> '
        f'<span style="color:{colour}">{html.escape(now.state)}</span> {percent:.1f} %'
        f'<div style="background:#ddd;height:8px;border-radius:4px;margin:4px 0">'
        f'<div style="background:{colour};width:{percent:.1f}%;height:8px;border-radius:4px"></div></div>'
        f"<small>{cells}</small></div>"
    )


def watch(name: str, *, client: Any = None, every_s: float = 2.0, timeout_s: float | None = None) -> Progress:
    """Show the job until it is complete, paused or failed; returns its last progress.

    ``timeout_s``: stop looking after so many seconds, whatever it does; None: never. TimeoutError if it could not be
    seen once.
    """
    jobs = where(name, client)
    return follow(lambda: jobs.progress(name), every_s, timeout_s)


def follow(
    look: Callable[[], Progress], every_s: float = 2.0, timeout_s: float | None = None, *, quiet: bool = False
) -> Progress:
    """As :func:`watch`, of whatever ``look`` sees. ``quiet``: nothing is shown."""
    show = _nowhere if quiet else _notebook() or _terminal()
    limit = None if timeout_s is None else time.monotonic() + timeout_s
    seen, last = patient(look), None
    while True:
        now = seen()
        late = limit is not None and time.monotonic() > limit
        if now is not None:
            last = now
            over = late or now.state in (COMPLETE, FAILED, PAUSED)
            show(now, over)
            if over:
                return now
        elif late:
            if last is None:
                raise TimeoutError(f"the job is out of reach after {timeout_s:.0f} s")
            return last
        time.sleep(every_s)


def _nowhere(now: Progress, over: bool) -> None:
    pass


def _notebook() -> Any:
    """How to show something in the notebook that this runs in; None: it does not run in one."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import HTML, display

    if get_ipython() is None or not hasattr(get_ipython(), "kernel"):
        return None
    shown: list[Any] = []

    def show(now: Progress, over: bool) -> None:
        value = HTML(as_html(now))
        if shown:
            shown[0].update(value)
        else:
            shown.append(display(value, display_id=True))

    return show


def _terminal() -> Any:
    live = sys.stdout.isatty()
    last: list[str] = [""]

    def show(now: Progress, over: bool) -> None:
        line = "".join(letter if letter.isprintable() else " " for letter in str(now))
        if live:
            print(f"\r\x1b[K{line}", end="\n" if over else "", flush=True)
        elif line != last[0]:
            print(line, flush=True)
        last[0] = line

    return show
