"""A job in a notebook, with two buttons: pause and resume by a click."""

from __future__ import annotations

import contextlib
import html
import threading
from typing import Any

from holdfast.errors import HoldfastError, MissingExtraError
from holdfast.kubeflow import jobs
from holdfast.kubeflow.view import as_html


class Panel:
    """Shows a job and what can be done to it now. As the last value of a cell it is displayed.

    It looks after the job from a thread of its own until the job ends or :meth:`close` is called; a cell that is run
    meanwhile does not wait for it.
    """

    def __init__(self, name: str, *, client: Any = None, every_s: float = 2.0) -> None:
        try:
            import ipywidgets
        except ModuleNotFoundError as error:
            raise MissingExtraError("ipywidgets", "kubeflow", "holdfast.kubeflow.Panel") from error
        self._name = name
        self._jobs = jobs.where(name, client)
        self._every_s = every_s
        self._closed = threading.Event()
        self._looked = threading.Lock()
        self._away = False
        self.pause = ipywidgets.Button(description="Pause", icon="pause", tooltip="Save, and stop")
        self.resume = ipywidgets.Button(description="Resume", icon="play", tooltip="Go on from the newest checkpoint")
        self.view = ipywidgets.HTML()
        self.message = ipywidgets.HTML()
        self.pause.on_click(lambda _: self._do(lambda: self._jobs.pause(name), "Pausing: the job saves first"))
        self.resume.on_click(lambda _: self._do(lambda: self._jobs.resume(name), "Resuming"))
        self.box = ipywidgets.VBox([self.view, ipywidgets.HBox([self.pause, self.resume, self.message])])
        self.look()
        threading.Thread(target=self._follow, name=f"holdfast-panel-{name}", daemon=True).start()

    def look(self) -> jobs.Progress:
        """Show how the job is doing now."""
        with self._looked:
            now = self._jobs.progress(self._name)
            self.view.value = as_html(now)
            self.pause.disabled = now.state != jobs.RUNNING
            self.resume.disabled = now.state != jobs.PAUSED
            return now

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _do(self, action: Any, told: str) -> None:
        # Waiting for a save takes seconds: not in the thread that answers clicks.
        self.pause.disabled = self.resume.disabled = True
        self.message.value = told

        def act() -> None:
            try:
                action()
                self.message.value = ""
            except (HoldfastError, OSError) as error:
                self.message.value = html.escape(str(error))
            with contextlib.suppress(HoldfastError, OSError):
                self.look()

        threading.Thread(target=act, daemon=True).start()

    def _follow(self) -> None:
        while not self._closed.wait(self._every_s):
            try:
                state = self.look().state
                if self._away:
                    self.message.value, self._away = "", False
                if state in (jobs.COMPLETE, jobs.FAILED):
                    return
            except (HoldfastError, OSError) as error:  # deleted, or out of reach for the moment
                self.message.value, self._away = html.escape(str(error)), True
                self.pause.disabled = self.resume.disabled = True

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)
