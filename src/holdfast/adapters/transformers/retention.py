"""Which checkpoints of a Trainer stay, and what its settings about the best one and the hub need from them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.adapters.transformers.resume import Start, download
from holdfast.config import Settings, settings_table
from holdfast.engine.saving import Saver
from holdfast.errors import StoreError
from holdfast.runtime.session import Session
from holdfast.store import Backend
from holdfast.store.checkpoints import Checkpoint, open_checkpoint, retain, whole
from holdfast.store.local import LocalBackend
from holdfast.store.manifest import Manifest, checkpoint_name

log = logging.getLogger("holdfast")

_OUTPUT = "train_output"
"""In the manifest of a finished run: what ``train`` returned."""


def finished_at(manifest: Manifest) -> int | None:
    """The step at which the run was complete that this checkpoint belongs to; None: it was not."""
    if not manifest.complete:
        return None
    return max(manifest.step, int(manifest.extra.get(_OUTPUT, {}).get("global_step", 0)))


def output_of(manifest: Manifest) -> dict[str, Any]:
    return dict(manifest.extra.get(_OUTPUT, {}))


def _as_named(folder: str, output_dir: str) -> str:
    """The folder with the name that the script gives it, which may be relative, if it lies in the output folder."""
    inside = os.path.relpath(os.path.realpath(folder), os.path.realpath(output_dir))
    if inside == os.curdir:
        return output_dir
    return folder if inside.startswith(os.pardir) else os.path.join(output_dir, inside)


class Keeper:
    """Carries out ``save_total_limit`` and all that concerns the best checkpoint."""

    def __init__(self, trainer: Any, settings: Settings, saver: Saver | None, session: Session) -> None:
        self._trainer = trainer
        self._saver = saver
        self._session = session
        self._backend = session.backends[0]
        self.run_dir = self._backend.uri
        if isinstance(self._backend, LocalBackend):
            self.run_dir = _as_named(self._backend.root, trainer.args.output_dir)
        """Where the Trainer is told that its checkpoints lie."""
        asked = any(os.environ.get(variable) for variable in settings_table()["keep"].env)
        self._limit = settings.keep if asked else None
        self._keep_unasked = settings.keep
        self.best_before: str | None = None
        """The best checkpoint of the state that this attempt goes on with, until the Trainer has it."""

    # ------------------------------------------------------------------ which ones stay

    def retire(self, backend: Backend) -> Sequence[str]:
        """Remove what ``save_total_limit``, else ``HOLDFAST_KEEP``, does not allow; the best and the newest stay.

        Without either the Trainer keeps everything that it saves. What holdfast adds when the run is interrupted is
        then removed, but for the last few.
        """
        found = list(whole([backend]))
        best = self._trainer.state.best_model_checkpoint or self.best_before
        protected = {checkpoint.name for checkpoint in found[:1]} | ({os.path.basename(best)} if best else set())
        limit = self._trainer.args.save_total_limit
        limit = limit if limit is not None and limit > 0 else self._limit
        if limit is not None:
            spare = len(found) - max(limit, len(protected & {checkpoint.name for checkpoint in found}))
            removable = [checkpoint.name for checkpoint in reversed(found) if checkpoint.name not in protected]
            doomed = removable[: max(0, spare)]
        else:
            ours = [checkpoint for checkpoint in found if checkpoint.manifest.reason in ("jit", "rescue")]
            doomed = [item.name for item in ours[self._keep_unasked :] if item.name not in protected]
        if not doomed:
            return ()
        return retain(backend, 1, {checkpoint.name for checkpoint in found} - set(doomed))

    def tidy(self) -> None:
        """On rank 0, at the start: interruptions add checkpoints, and have no time to remove any."""
        for backend in self._session.taken if self._saver is not None and self._saver.rank == 0 else ():
            try:
                self.retire(backend)
            except StoreError as error:
                log.warning("could not remove old checkpoints: %s", error)

    # ------------------------------------------------------------------ the best one

    def note_best(self) -> None:
        """As the Trainer does before it saves: the best checkpoint is known by its folder."""
        trainer = self._trainer
        state, best = trainer.state, trainer.state.best_global_step
        if best and trainer.args.save_strategy.value in ("steps", "epoch", "best"):
            path = f"{self.run_dir.rstrip('/')}/{checkpoint_name(best)}"
            if best == state.global_step or self._is_there(checkpoint_name(best)):
                state.best_model_checkpoint = path

    def _is_there(self, name: str) -> bool:
        try:
            return any(name in backend.names() for backend in self._session.backends)
        except StoreError:
            return False

    def best_of(self, start: Start) -> str | None:
        """The best checkpoint that a resumed state names, where the Trainer would not find it: in object storage."""
        if start.path is None or isinstance(self._backend, LocalBackend):
            return None
        with open(os.path.join(start.path, "trainer_state.json"), encoding="utf-8") as file:
            best = json.load(file).get("best_model_checkpoint")
        return best if isinstance(best, str) and best.startswith(self.run_dir) else None

    @contextlib.contextmanager
    def best_at_hand(self) -> Iterator[None]:
        """While the block runs, the best checkpoint's folder is one of this machine."""
        state = self._trainer.state
        best = state.best_model_checkpoint
        wanted = self._trainer.args.load_best_model_at_end and best is not None
        if not wanted or os.path.isdir(best):
            yield
            return
        checkpoint = self._find(os.path.basename(best))
        if checkpoint is None:
            log.warning("the best checkpoint, %s, is not there any more: the model stays as it is", best)
            state.best_model_checkpoint = None
            yield
            return
        state.best_model_checkpoint = download(checkpoint, self._session.token)
        try:
            yield
        finally:
            state.best_model_checkpoint = best

    def _find(self, name: str) -> Checkpoint | None:
        for backend in self._session.backends:
            with contextlib.suppress(StoreError):
                if (checkpoint := open_checkpoint(backend, name)) is not None:
                    return checkpoint
        return None

    # ------------------------------------------------------------------ the hub, and the end

    def push(self, name: str) -> None:
        """Let the Trainer upload a checkpoint that is committed."""
        committed = self._saver.committed if self._saver is not None else None
        if committed is None or committed.name != name:
            return
        if not isinstance(self._backend, LocalBackend):
            log.warning("%s is not pushed to the hub: checkpoints in %s have no local folder", name, self.run_dir)
            return
        self._trainer._push_from_checkpoint(os.path.join(self.run_dir, name))

    def finished(self, output: Any) -> None:
        """Note at rest what ``train`` returned; with ``save_total_limit=1`` only the best checkpoint stays."""
        saver = self._saver
        if saver is None or saver.rank != 0 or saver.committed is None or saver.committed_at is None:
            return
        best = self._trainer.state.best_model_checkpoint
        known: Mapping[str, Any] = {
            "global_step": output.global_step,
            "training_loss": float(output.training_loss),
            "metrics": {key: value for key, value in output.metrics.items() if isinstance(value, int | float | str)},
            "best_model_checkpoint": best,
        }
        last, backend = saver.committed, saver.committed_at
        try:
            only_best = self._trainer.args.save_total_limit == 1 and best is not None
            if only_best and os.path.basename(best) != last.name:
                checkpoint = self._find(os.path.basename(best))
                if checkpoint is not None and checkpoint.backend is backend:
                    self._amend(backend, checkpoint.manifest, known)
                    for other in whole([backend]):
                        if other.name != checkpoint.name:
                            backend.discard(other.name)
                    return
            saver.committed = self._amend(backend, last, known)
        except StoreError as error:
            log.warning("the end of the run could not be noted in full: %s", error)

    @staticmethod
    def _amend(backend: Backend, manifest: Manifest, known: Mapping[str, Any]) -> Manifest:
        changed = dataclasses.replace(manifest, complete=True, extra={**manifest.extra, _OUTPUT: dict(known)})
        backend.amend(changed.name, changed.encode())
        return changed
