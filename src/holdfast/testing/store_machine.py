"""A model test of checkpoints at rest: random saves, crashes, damage and retention against a plain dictionary.

:class:`CheckpointMachine` is a Hypothesis state machine. Give it a backend and a way to damage what that
holds, and run its ``TestCase``::

    class MyMachine(CheckpointMachine):
        def open(self, power):
            return CrashingBackend(MyBackend(self.folder), power)

        def stored(self, folder, path): ...
        def store(self, folder, path, data): ...

    TestMyBackend = MyMachine.TestCase

What it holds against the backend after each step: a visible checkpoint has the bytes it was saved with,
unless the test damaged them; the newest that is not damaged is found; retention removes neither the
last whole one nor what a kept one refers to; a crash at any operation loses nothing that was committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.base.process import Owner
from holdfast.errors import CheckpointCorruptError, CheckpointExistsError, StoreError
from holdfast.store.base import MANIFEST, Backend, Sink
from holdfast.store.checkpoints import clean, open_checkpoint, retain, unfinished, verify, whole
from holdfast.store.manifest import FileEntry, Manifest, checkpoint_name, step_of
from holdfast.testing.backend_contract import adopt_file, manifest_for, read_back, write_file


class PowerCutError(BaseException):
    """The machine went dark. Not an Exception: nothing between the store and the test may handle it."""


@dataclass(slots=True)
class Power:
    """Fails after a given number of operations, and stays off."""

    left: int | None = None
    off: bool = False

    def use(self) -> None:
        """Called around each operation."""
        if self.left is not None:
            self.left -= 1
            self.off = self.off or self.left < 0
        if self.off:
            raise PowerCutError


class _CrashingSink(Sink):
    def __init__(self, inner: Sink, power: Power) -> None:
        self._inner = inner
        self._power = power

    def write(self, chunk: memoryview) -> None:
        self._power.use()
        self._inner.write(chunk)

    def finish(self) -> None:
        self._power.use()
        self._inner.finish()
        self._power.use()

    def abort(self) -> None:
        if not self._power.off:
            self._inner.abort()


class CrashingBackend(Backend):
    """A backend that stops in the middle: before an operation, or after it and before its caller knows."""

    def __init__(self, inner: Backend, power: Power) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.read_size = inner.read_size
        self._power = power

    def _do(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._power.use()
        result = operation(*args, **kwargs)
        self._power.use()
        return result

    def names(self) -> list[str]:
        return self.inner.names()

    def read_manifest(self, name: str) -> bytes | None:
        return self.inner.read_manifest(name)

    def sizes(self, name: str) -> dict[str, int]:
        return self.inner.sizes(name)

    def read_into(self, name: str, path: str, offset: int, buffer: memoryview) -> int:
        return self.inner.read_into(name, path, offset, buffer)

    def begin(self, name: str) -> None:
        self._do(self.inner.begin, name)

    def create(self, name: str, path: str, size: int) -> Sink:
        return _CrashingSink(self._do(self.inner.create, name, path, size), self._power)

    def adopt(self, name: str, path: str, source: str, source_path: str) -> dict[str, Any] | None:
        adopted: dict[str, Any] | None = self._do(self.inner.adopt, name, path, source, source_path)
        return adopted

    def put_part(self, name: str, part: str, data: bytes) -> None:
        self._do(self.inner.put_part, name, part, data)

    def claim_part(self, name: str, part: str, data: bytes) -> bool:
        return bool(self._do(self.inner.claim_part, name, part, data))

    def read_parts(self, name: str) -> dict[str, bytes]:
        return self.inner.read_parts(name)

    def commit(self, name: str, manifest: bytes) -> None:
        self._do(self.inner.commit, name, manifest)

    def amend(self, name: str, manifest: bytes) -> None:
        self._do(self.inner.amend, name, manifest)

    def discard(self, name: str, keep: Callable[[str], bool] | None = None) -> None:
        self._do(self.inner.discard, name, keep)

    def set_aside(self, name: str) -> None:
        self._do(self.inner.set_aside, name)

    def acquire(self, owner: Owner, *, wait_s: float = 0.0, takeover: bool = False) -> None:
        self.inner.acquire(owner, wait_s=wait_s, takeover=takeover)

    def grant(self) -> str:
        return self.inner.grant()

    def join(self, grant: str) -> None:
        self.inner.join(grant)

    def assure(self) -> None:
        self.inner.assure()

    def release(self) -> None:
        self.inner.release()

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()


@dataclass(slots=True)
class Blob:
    """The bytes of one stored file; checkpoints that share it share its fate."""

    data: bytes
    damaged: bool = False
    resized: bool = False


@dataclass(slots=True)
class Saved:
    """What the model knows of one checkpoint."""

    blobs: dict[str, Blob] = field(default_factory=dict)
    torn: bool = False
    """Its manifest cannot be read any more."""

    @property
    def intact(self) -> bool:
        return not self.torn and not any(blob.damaged for blob in self.blobs.values())

    @property
    def looks_whole(self) -> bool:
        """As far as the manifest and the sizes tell."""
        return not self.torn and not any(blob.resized for blob in self.blobs.values())

    def bytes(self) -> dict[str, bytes]:
        return {path: blob.data for path, blob in self.blobs.items()}


_PATHS = ("model.bin", "nested/optimizer.bin", "größe.bin")
_CONTENT = st.one_of(
    st.binary(max_size=40),
    st.integers(1, 3).map(lambda pages: bytes([pages]) * (pages * 4096)),
    st.integers(1, 250).map(lambda seed: bytes([seed]) * 5001),
)
_FILES = st.dictionaries(st.sampled_from(_PATHS), _CONTENT, min_size=1, max_size=2)
_CRASH = st.one_of(st.none(), st.integers(0, 24), st.integers(0, 60))
_CRASH_SOON = st.one_of(st.none(), st.integers(0, 5), st.integers(0, 40))
_AGAIN = st.one_of(st.none(), st.tuples(_FILES, _CRASH))


class CheckpointMachine(RuleBasedStateMachine):
    """Subclass it with :meth:`open`, :meth:`stored` and :meth:`store`."""

    shares_folders = False
    """Whether a checkpoint may refer to files in the folder of another (``ref``), which then cannot be begun anew."""

    def open(self, power: Power) -> Backend:
        """The place, as a process that has just started opens it; empty at first. Whatever it does uses ``power``."""
        raise NotImplementedError

    def stored(self, folder: str, path: str) -> bytes:
        """The bytes of a stored file, past the backend."""
        raise NotImplementedError

    def store(self, folder: str, path: str, data: bytes | None) -> None:
        """Change a stored file in place, past the backend; None removes it."""
        raise NotImplementedError

    @initialize(saves=st.lists(_FILES, max_size=4))
    def start(self, saves: list[dict[str, bytes]]) -> None:
        self.model: dict[int, Saved] = {}
        self.power_cuts = 0
        self.power = Power()
        self.backend = self.open(self.power)
        for step, content in enumerate(saves, start=1):
            self._save(step, content, True, None)

    # What a process may be doing when the power goes

    @contextlib.contextmanager
    def _until(self, crash: int | None) -> Iterator[None]:
        """Run the body; if the power goes, start again and see what is there."""
        self.power.left = crash
        try:
            yield
        except PowerCutError:
            self.power_cuts += 1
            self.restart()
        self.power.left = None

    def _see(self, step: int, candidates: list[Saved | None]) -> None:
        """After a crash, accept one of several states for a checkpoint; None: it is not there."""
        name = checkpoint_name(step)
        if self.backend.read_manifest(name) is None:
            assert None in candidates, f"{name} was committed and is gone"
            self.model.pop(step, None)
            return
        for saved in candidates:
            if saved is not None and self._is(name, saved):
                self.model[step] = saved
                return
        raise AssertionError(f"{name} is there and holds none of what it may hold")

    def _is(self, name: str, saved: Saved) -> bool:
        if not saved.intact:
            return True  # what it holds was our own doing
        checkpoint = open_checkpoint(self.backend, name)
        assert checkpoint is not None
        return verify(checkpoint) == [] and read_back(self.backend, checkpoint.manifest) == saved.bytes()

    # Saving

    @rule(ahead=st.integers(0, 3), content=_FILES, incremental=st.booleans(), crash=_CRASH, again=_AGAIN)
    def save(
        self,
        ahead: int,
        content: dict[str, bytes],
        incremental: bool,
        crash: int | None,
        again: tuple[dict[str, bytes], int | None] | None,
    ) -> None:
        """A save at a step never seen before, of changed files and of files adopted from the newest one.

        If it does not come to its end, the process that starts next may come to the same step with other bytes.
        """
        known = [step_of(name) or 0 for name in self.backend.names()]
        step = max([0, *known, *self.model]) + 1 + ahead
        self._save(step, content, incremental, crash)
        if again is not None and step not in self.model:
            self._save(step, again[0], incremental, again[1])

    @precondition(lambda self: bool(unfinished(self.backend)))
    @rule(data=st.data(), content=_FILES, incremental=st.booleans(), crash=_CRASH)
    def save_over(self, data: st.DataObject, content: dict[str, bytes], incremental: bool, crash: int | None) -> None:
        """A save at a step of which something is there that is not whole."""
        name = data.draw(st.sampled_from(sorted(unfinished(self.backend))))
        step = step_of(name)
        assert step is not None
        self._save(step, content, incremental, crash)

    def _save(self, step: int, content: dict[str, bytes], incremental: bool, crash: int | None) -> None:
        name = checkpoint_name(step)
        saved = Saved()
        referenced = any((entry.ref or "").startswith(f"{name}/") for entry in self._all_entries())
        committed = False
        with self._until(crash):
            base = next((found for found in whole([self.backend]) if found.step != step), None)
            try:
                self.backend.begin(name)
            except StoreError:
                assert self.shares_folders
                assert referenced, "begin was refused without a reason"
                return
            entries: list[FileEntry] = []
            if base is not None and incremental:
                for entry in base.manifest.files:
                    if entry.path not in content:
                        adopted = adopt_file(self.backend, name, base.name, entry)
                        assert adopted is not None
                        entries.append(adopted)
                        saved.blobs[entry.path] = self.model[base.step].blobs[entry.path]
            for path, data in content.items():
                entries.append(write_file(self.backend, name, path, data))
                saved.blobs[path] = Blob(data)
            manifest = manifest_for(step, entries)
            self.backend.commit(name, manifest.encode())
            committed = True
        self._see(step, [saved] if committed else [saved, None])

    def _all_entries(self) -> list[FileEntry]:
        """The files of all checkpoints that were committed, damaged or not, as far as a manifest says so."""
        found: list[FileEntry] = []
        for name in self.backend.names():
            with contextlib.suppress(CheckpointCorruptError):
                data = self.backend.read_manifest(name)
                found += Manifest.decode(data).files if data is not None else ()
        return found

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def begin_a_whole_one(self, data: st.DataObject) -> None:
        name = checkpoint_name(data.draw(st.sampled_from(sorted(self.model))))
        try:
            self.backend.begin(name)
        except CheckpointExistsError:
            return
        raise AssertionError(f"{name} is whole and was begun again")

    # Removing

    @precondition(lambda self: bool(self.model))
    @rule(keep=st.integers(1, 3), crash=_CRASH_SOON)
    def retain(self, keep: int, crash: int | None) -> None:
        candidates = sorted((step for step, saved in self.model.items() if saved.looks_whole), reverse=True)
        doomed = candidates[keep:]
        finished = False
        with self._until(crash):
            assert retain(self.backend, keep) == [checkpoint_name(step) for step in doomed]
            finished = True
        for step in doomed:
            self._see(step, [None] if finished else [self.model[step], None])

    @precondition(lambda self: bool(unfinished(self.backend)))
    @rule(crash=_CRASH_SOON)
    def clean(self, crash: int | None) -> None:
        expected = sorted(unfinished(self.backend))
        with self._until(crash):
            assert sorted(clean(self.backend)) == expected
            if not self.shares_folders:
                assert unfinished(self.backend) == []

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), crash=_CRASH_SOON, again=_AGAIN)
    def set_aside(
        self, data: st.DataObject, crash: int | None, again: tuple[dict[str, bytes], int | None] | None
    ) -> None:
        """Set one aside, and perhaps save the same step once more."""
        step = data.draw(st.sampled_from(sorted(self.model)))
        self._set_aside(step, crash)
        if again is not None and step not in self.model:
            self._save(step, again[0], False, again[1])

    def _set_aside(self, step: int, crash: int | None) -> None:
        finished = False
        with self._until(crash):
            self.backend.set_aside(checkpoint_name(step))
            finished = True
        self._see(step, [None] if finished else [self.model[step], None])

    # Damage

    @precondition(lambda self: any(saved.looks_whole and saved.blobs for saved in self.model.values()))
    @rule(data=st.data(), how=st.sampled_from(("flip", "truncate", "lengthen", "remove")))
    def damage(self, data: st.DataObject, how: str) -> None:
        steps = [step for step, saved in self.model.items() if saved.looks_whole and saved.blobs]
        step = data.draw(st.sampled_from(sorted(steps)))
        saved = self.model[step]
        path = data.draw(st.sampled_from(sorted(saved.blobs)))
        checkpoint = open_checkpoint(self.backend, checkpoint_name(step))
        assert checkpoint is not None
        entry = next(entry for entry in checkpoint.manifest.files if entry.path == path)
        folder, _, place = (entry.ref or f"{checkpoint.name}/{path}").partition("/")
        content = self.stored(folder, place)
        blob = saved.blobs[path]
        if how in ("flip", "truncate") and not content:
            return
        if how == "flip":
            at = data.draw(st.integers(0, len(content) - 1))
            bit = 1 << data.draw(st.integers(0, 7))
            self.store(folder, place, content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            blob.damaged = blob.damaged or content == blob.data
            # A second flip may mend the first.
            blob.damaged = self.stored(folder, place) != blob.data
            return
        if how == "remove" and not self.shares_folders:
            # Elsewhere the same file may have another name, under which it lives on.
            saved.blobs[path] = blob = Blob(blob.data)
        blob.damaged = blob.resized = True
        changed = {"truncate": content[:-1], "lengthen": content + b"\0", "remove": None}[how]
        self.store(folder, place, changed)

    @precondition(lambda self: any(not saved.torn for saved in self.model.values()))
    @rule(data=st.data(), part=st.floats(0.0, 0.99))
    def tear_manifest(self, data: st.DataObject, part: float) -> None:
        step = data.draw(st.sampled_from(sorted(step for step, saved in self.model.items() if not saved.torn)))
        content = self.stored(checkpoint_name(step), MANIFEST)
        self.store(checkpoint_name(step), MANIFEST, content[: int(len(content) * part)])
        self.model[step].torn = True

    @precondition(lambda self: bool(self.model))
    @rule()
    def restart(self) -> None:
        self.power = Power()
        self.backend = self.open(self.power)

    # What must hold after each of these

    @invariant()
    def all_that_is_visible_is_as_it_was_saved_and_the_newest_is_found(self) -> None:
        if not hasattr(self, "model"):
            return
        committed = {name for name in self.backend.names() if self.backend.read_manifest(name) is not None}
        assert committed == {checkpoint_name(step) for step in self.model}
        found = list(whole([self.backend]))
        looking_whole = [step for step, saved in self.model.items() if saved.looks_whole]
        assert [checkpoint.step for checkpoint in found] == sorted(looking_whole, reverse=True)
        loadable = []
        for checkpoint in found:
            saved = self.model[checkpoint.step]
            if verify(checkpoint) == []:
                loadable.append(checkpoint.step)
                assert read_back(self.backend, checkpoint.manifest) == saved.bytes()
        # The first of these is what a run resumes from.
        assert loadable == sorted((step for step, saved in self.model.items() if saved.intact), reverse=True)
