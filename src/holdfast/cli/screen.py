"""Where a launcher shows how its run is going.

On a terminal: a status line at the bottom, and above it everything that the script prints, byte for
byte. The script writes to a terminal of its own, so that its colours and progress bars stay as they
are; while it stands in the middle of a line, the status line makes room. Anywhere else the script
writes where this process would, untouched, and the launcher says one line per event on stderr.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import shutil
import struct
import sys
import termios
import threading
import time
from typing import Any

from holdfast.base.words import shown
from holdfast.cli.output import human_seconds
from holdfast.launch.watch import View

_EVERY_S = 60.0


def open_screen(*, quiet: bool, progress: bool, as_json: bool) -> LiveScreen | PlainScreen | JsonScreen:
    if as_json:
        return JsonScreen()
    if progress and not quiet and sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return LiveScreen()
    return PlainScreen(quiet=quiet, progress=progress)


def describe(view: View) -> list[str]:
    """The parts of a status line, the most important first."""
    parts = []
    if view.step is not None:
        parts.append(f"step {view.step}" + (f"/{view.total}" if view.total else ""))
    if view.epochs:
        parts.append(f"epoch {view.epoch}/{view.epochs}")
    if view.loss is not None:
        parts.append(f"loss {view.loss}")
    if view.eta and view.state == "running":
        parts.append(f"{view.eta} left")
    if view.saved_step is not None:
        age = view.saved_age_s
        ago = "" if age is None else f" {int(age)} s ago" if age < 120 else f" {human_seconds(age)} ago"
        parts.append(f"saved {view.saved_step}{ago}")
    if view.restarts:
        parts.append(f"{view.restarts} restart" + ("s" if view.restarts > 1 else ""))
    return parts


class PlainScreen:
    """One line per event."""

    def __init__(self, *, quiet: bool, progress: bool) -> None:
        self._quiet = quiet
        self._progress = progress and not quiet
        self._next = time.monotonic() + _EVERY_S
        self._step: int | None = None

    def stdio(self) -> tuple[int | None, int | None]:
        return None, None

    def say(self, event: str, text: str, **values: Any) -> None:
        if not self._quiet or event in ("gave_up", "warning"):
            with contextlib.suppress(OSError):
                print(f"holdfast: {shown(text)}", file=sys.stderr, flush=True)

    def show(self, view: View) -> None:
        if self._progress and view.state == "running" and time.monotonic() >= self._next and view.step != self._step:
            self._step = view.step
            self._next = time.monotonic() + _EVERY_S
            self.say("progress", ", ".join(describe(view)))

    def close(self) -> None:
        pass


class JsonScreen:
    """One JSON object per event on stdout; what the script prints there goes to stderr."""

    def stdio(self) -> tuple[int | None, int | None]:
        return sys.stderr.fileno(), None

    def say(self, event: str, text: str, **values: Any) -> None:
        line = {"time": round(time.time(), 3), "event": event, "message": text, **values}
        with contextlib.suppress(OSError):
            print(json.dumps(line), flush=True)

    def show(self, view: View) -> None:
        pass

    def close(self) -> None:
        pass


class LiveScreen:
    """A status line below the script's own output."""

    def __init__(self) -> None:
        self._out = sys.stdout.fileno()
        self._lock = threading.Lock()
        self._line = ""
        self._drawn = False
        self._at_start = True
        self._size = (0, 0)
        self._master, self._slave = pty.openpty()
        mode = termios.tcgetattr(self._slave)
        mode[1] &= ~termios.OPOST  # the real terminal turns line ends into what it needs
        termios.tcsetattr(self._slave, termios.TCSANOW, mode)
        self._resize()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._relay, name="holdfast-screen", daemon=True)
        self._thread.start()

    def stdio(self) -> tuple[int | None, int | None]:
        return self._slave, self._slave

    def say(self, event: str, text: str, **values: Any) -> None:
        # The script's last words come first.
        until = time.monotonic() + 0.2
        while select.select([self._master], [], [], 0)[0] and time.monotonic() < until:
            time.sleep(0.01)
        with self._lock:
            self._erase()
            line = "" if self._at_start else "\n"
            self._write(f"{line}{_styled('holdfast:', 'bold cyan')} {shown(text)}\n".encode(errors="replace"))
            self._at_start = True
            self._draw()

    def show(self, view: View) -> None:
        self._resize()
        line = _status(view, self._size[0] - 1)
        with self._lock:
            if line != self._line or not self._drawn:
                self._erase()
                self._line = line
                self._draw()

    def close(self) -> None:
        self._closing.set()
        os.close(self._slave)
        self._thread.join(2.0)
        with self._lock:
            self._erase()
            self._line = ""
        os.close(self._master)

    def _relay(self) -> None:
        while True:
            try:
                ready = select.select([self._master], [], [], 0.1)[0]
                data = os.read(self._master, 65536) if ready else b""
            except OSError:  # nobody holds the other end any more
                return
            if data:
                with self._lock:
                    self._erase()
                    self._write(data)
                    self._at_start = data.endswith((b"\n", b"\r"))
                    self._draw()
            elif self._closing.is_set():
                return

    def _erase(self) -> None:
        if self._drawn:
            self._write(b"\r\x1b[2K")
            self._drawn = False

    def _draw(self) -> None:
        if self._line and self._at_start and not self._closing.is_set():
            self._write(self._line.encode(errors="replace"))
            self._drawn = True

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(OSError):  # the terminal was closed; the run goes on
            while view:
                view = view[os.write(self._out, view) :]

    def _resize(self) -> None:
        size = shutil.get_terminal_size()
        if tuple(size) != self._size:
            self._size = (size.columns, size.lines)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))


_COLOURS = {"running": "green", "paused": "yellow", "saving": "yellow", "waiting": "red"}


def _status(view: View, width: int) -> str:
    """One line of at most ``width`` columns."""
    parts = [view.state, *describe(view)]
    while len(parts) > 2 and len("  ".join(parts)) > width - 12:
        parts.pop()
    text = "  ".join(parts[1:])
    room = min(30, width - len(text) - len(view.state) - 11)
    bar = ""
    if view.percent is not None and room >= 8:
        filled = round(room * view.percent / 100)
        bar = (
            _styled("━" * filled, "green") + _styled("━" * (room - filled), "bright_black") + f" {view.percent:3.0f}%  "
        )
    return bar + _styled(view.state, _COLOURS.get(view.state, "cyan")) + "  " + text


def _styled(text: str, style: str) -> str:
    import io

    from rich.console import Console
    from rich.text import Text

    console = Console(file=io.StringIO(), force_terminal=True, width=1000)
    console.print(Text(text, style=style), end="")
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    return str(printed)
