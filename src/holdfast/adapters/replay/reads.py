"""What a script reads out of tensors: ``loss.item()``, ``float(x)``, ``if a < b``, ``.tolist()``, ``print(x)``.

A replayed loop computes nothing, so what it reads would be rubbish, and with it every mean, best value and early
stopping that follows from it. So what the script reads is kept, a dozen bytes a number, with the place in the code
that read it, and a replay gets it back: the script's own values come out as they were.

Only reads by the script count: those inside a module's call, an optimizer's step or a loader are not made in a replay.
Hooks that the script has set run in the backward passes of a replay where they can, so what they read is given back to
those that do, and nothing is concluded from those that do not. At each boundary the numbers are copied to a file beside
the black box, where there is one, so that a survivor finds those of a rank that was killed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import struct
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch

from holdfast.adapters.replay.patches import TENSOR_READS, TORCH
from holdfast.adapters.replay.trace import astray
from holdfast.base.patching import Applied
from holdfast.errors import StateError
from holdfast.recorder.shared import lasting_map, leave, longer_map, read_left, tell_of

log = logging.getLogger("holdfast")

LIMIT = 64 << 20
"""Bytes of arrays and lists that are kept. What comes after is unknown to a replay."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_REPLAYED = tuple(
    _TORCH + part for part in ("nn/modules/module.py", "nn/parallel/", "optim/", "utils/data/", "autograd/", "amp/")
)
_ON_BEHALF = tuple(_TORCH + part for part in ("_tensor.py", "optim/lr_scheduler.py", "utils/data/sampler.py"))
"""``format(x)``, ``numpy.asarray(x)``, ``scheduler.step(x)`` and ``list(sampler)`` read on behalf of their caller."""
_AROUND = os.path.join(os.path.dirname(__file__), "script.py")
"""Runs a script that is the function of a child process: what it calls is the script's."""

_PASSES = (_TORCH + os.path.join("autograd", "__init__.py"), _TORCH + os.path.join("autograd", "graph.py"))
"""Backward passes, which call hooks."""
_CALLS_HOOKS = (os.path.join(os.path.dirname(__file__), "answers.py"), ("_run_hooks", "_give"))
"""Functions that call hooks in a replay."""

_SCRIPT, _THROUGH, _LIBRARY, _PASS, _INSIDE = range(5)
_WHOLE = 2**53
"""Integers below this are exact as floats."""
_KINDS: dict[type, str] = {float: "f", int: "i", bool: "b"}

_HOOK = "hook:"
"""Before what a hook reads in a backward pass."""
_TEXT = "__repr__"
"""What ``print(x)`` reads. It is for people and decides nothing, so a replay does without it where it was not kept."""
_TEXTS = 8 << 20
"""Characters of text that are kept."""

Site = tuple[str, str, int, str, str]
"""Where something is read, the same wherever the script lies: file, function, place in its code; how, and what."""


def _kind_of(code: CodeType, around: str | None) -> int:
    name = code.co_filename
    if (
        name in _ON_BEHALF
        or name in (_AROUND, around)
        or (name.startswith(f"{_TORCH}amp/") and code.co_name == "get_scale")
    ):
        return _THROUGH
    if name in _PASSES:
        return _PASS
    if name == _CALLS_HOOKS[0] and code.co_name in _CALLS_HOOKS[1]:
        return _THROUGH
    if name.startswith((_OURS, *_REPLAYED)):
        return _INSIDE
    return _LIBRARY if name.startswith(_TORCH) else _SCRIPT


class Seen:
    """What this process's script has read. One thread reads; others may ask for the content."""

    def __init__(self, path: str | None = None, *, around: str | None = None) -> None:
        """``path``: of the copy that outlives this process. ``around``: file of holdfast's that calls the script, where
        that is a function."""
        self.thread = threading.get_ident()
        self.sites: dict[Site, int] = {}
        self.numbers = array("i")
        """For each read its site."""
        self.values = array("d")
        """And what was read; the place in ``objects`` where that is no number."""
        self.objects: list[Any] = []
        self.lost: str | None = None
        """The first read that was too large to be kept."""
        self.foreign = False
        """Reads of an earlier process are not known, since they died with it: those of another rank stand for them."""
        self._size = self._texts = 0
        self._by_code: dict[tuple[int, int, str, type], int] = {}
        self._kinds: dict[int, int] = {}
        self._codes: dict[int, CodeType] = {}
        self._recalled: _Recalled | None = None
        self._mirror = _Mirror(path) if path is not None else None
        self._around = around

    def __len__(self) -> int:
        return len(self.values)

    # ------------------------------------------------------------------ the script reads

    def read(self, tensor: Any, how: str, real: Callable[[Any], Any], frame: FrameType | None) -> Any:
        """The value that the script gets. ``real`` reads it from the tensor."""
        if threading.get_ident() != self.thread:
            return real(tensor)
        reader, in_hook = self._reader(frame)
        if reader is None:
            return real(tensor)
        if in_hook:
            how = _HOOK + how
        if self._recalled is None:
            value = real(tensor)
        elif self._recalled.strict:
            return self._recalled.next(reader, how, lambda: real(tensor))
        else:
            value = self._recalled.next(reader, how, lambda: real(tensor))
        kind = type(value)
        if kind is float or kind is bool or (kind is int and -_WHOLE < value < _WHOLE):
            key = (id(reader.f_code), reader.f_lasti, how, kind)
            number = self._by_code.get(key)
            if number is None:
                self._codes[id(reader.f_code)] = reader.f_code
                number = self._by_code[key] = self._number((*_place_of(reader), how, _KINDS[kind]))
            self.values.append(value)
            self.numbers.append(number)
        elif kind is int and value.bit_length() < 64:
            number = self._number((*_place_of(reader), how, "h"))
            self.values.extend(divmod(value, 1 << 32))
            self.numbers.extend((number, number))
        else:
            self._keep_object(value, reader, how)
        return value

    def _reader(self, frame: FrameType | None) -> tuple[FrameType | None, bool]:
        """The frame of the script that reads, and whether it is in a hook of a backward pass.

        None if it is not the script, or not outside of all that is replayed.
        """
        # By identity: the hash of a code object is that of all its content.
        kinds = self._kinds
        reader: FrameType | None = None
        in_hook = False
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = kinds[id(code)] = _kind_of(code, self._around)
                self._codes[id(code)] = code
            if kind:
                if kind == _INSIDE or (reader is None and kind in (_LIBRARY, _PASS)):
                    return None, False
                in_hook = in_hook or kind == _PASS
            elif reader is None:
                reader = frame
            frame = frame.f_back
        return reader, in_hook

    def _keep_object(self, value: Any, reader: FrameType, how: str) -> None:
        place = _place_of(reader)
        size = _size_of(value)
        if how.removeprefix(_HOOK) == _TEXT:
            self._texts += size
            if self._texts > _TEXTS:
                return
        if self.lost is not None:
            return  # also what would fit: a replay gives the reads of a place in their order
        if self._size + size > LIMIT:
            self.lost = f"{how} in {place[1]} of {place[0]}"
            log.warning(
                "the script has read more than %d MiB of arrays and lists out of tensors (the last one is %s). What it "
                "reads of them from here on is not kept, and a resume does not know it: hand what follows from it, "
                "such as a score, to holdfast.track",
                LIMIT >> 20,
                self.lost,
            )
            return
        self._size += size
        self.objects.append(_copied(value))
        self.values.append(len(self.objects) - 1)
        self.numbers.append(self._number((*place, how, "o")))

    def _number(self, site: Site) -> int:
        return self.sites.setdefault(site, len(self.sites))

    def mark(self, events: int) -> None:
        """A boundary: what was read so far outlives this process."""
        if self._mirror is not None:
            self._mirror.update(events, self)

    # ------------------------------------------------------------------ a checkpoint, and a replay

    def content(self) -> dict[str, Any]:
        """All reads, as a checkpoint keeps them."""
        count = len(self.numbers)
        return {
            "numbers": torch.tensor(self.numbers[:count], dtype=torch.int32),
            "values": torch.tensor(self.values[:count], dtype=torch.float64),
            "sites": [list(site) for site in self.sites],
            "objects": list(self.objects),
            "lost": self.lost,
            "texts": self._texts,
            **({"partial": True, "foreign": True} if self.foreign else {}),
        }

    def recall(self, saved: dict[str, Any]) -> None:
        """From now on the script gets what it read before, until :meth:`arrive`."""
        self._recalled = _Recalled(saved)

    def arrive(self, count: int) -> None:
        """The loop is at the point that came after ``count`` reads: these belong to this run, and now values are real.

        What was read between the point and the save is read once more: what it was read from may be lost.
        """
        recalled = self._recalled
        assert recalled is not None
        recalled.relax(count)
        saved = recalled.saved
        self.sites = {tuple(site): number for number, site in enumerate(saved["sites"])}
        self._by_code.clear()
        self.numbers = array("i", saved["numbers"][:count].tolist())
        self.values = array("d", saved["values"][:count].tolist())
        self.objects = list(saved["objects"])
        if not recalled.left() or saved.get("foreign"):
            self._recalled = None
        self.foreign = bool(saved.get("foreign"))
        self._size = sum(_size_of(value) for value in self.objects)
        self._texts = saved.get("texts", 0)
        self.lost = saved["lost"]

    def remove(self) -> None:
        if self._mirror is not None:
            self._mirror.remove()


class _Recalled:
    """What an earlier process read, in order, for each site."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.saved = saved
        self.strict = True
        """Whether everything must be known."""
        self._kinds = [site[4] for site in saved["sites"]]
        self._numbers = array("i", saved["numbers"].tolist())
        self._values = array("d", saved["values"].tolist())
        self._failure: StateError | None = None
        # By place and not by site: what is read at one place may be an integer now and a float then.
        self._queues: dict[tuple[Any, ...], deque[int]] = {}
        places = [tuple(site[:4]) for site in saved["sites"]]
        for index, number in enumerate(self._numbers):
            self._queues.setdefault(places[number], deque()).append(index)

    def next(self, reader: FrameType, how: str, real: Callable[[], Any]) -> Any:
        place = _place_of(reader)
        if queue := self._queues.get((*place, how)):
            index = queue.popleft()
            kind, value = self._kinds[self._numbers[index]], self._values[index]
            if kind == "f":
                return value
            if kind == "h":
                return (int(value) << 32) + int(self._values[queue.popleft()])
            if kind == "o":
                return _copied(self.saved["objects"][int(value)])
            return int(value) if kind == "i" else bool(value)
        unknown = self.saved["lost"] or self.saved.get("partial")
        if not self.strict or unknown or how == _TEXT or how.startswith(_HOOK):
            return real()
        what = "it reads" if how == "track" else f"it reads {how} of"
        self._failure = astray(
            f"{what} a value at line {reader.f_lineno} of {place[0]}, in {place[1]}, that the run had not read there"
        )
        raise self._failure

    def left(self) -> int:
        return sum(map(len, self._queues.values()))

    def _left_by_the_loop(self) -> int:
        return sum(len(queue) for place, queue in self._queues.items() if not place[3].startswith(_HOOK))

    def relax(self, count: int) -> None:
        """The first ``count`` reads must be done; those that are left may be."""
        self.strict = False
        if self._failure is not None:  # the script has caught it
            raise self._failure
        for place, queue in self._queues.items():
            while place[3].startswith(_HOOK) and queue and queue[0] < count:
                queue.popleft()  # of a hook that does not run in a replay
        unknown = self.saved["lost"] or self.saved.get("partial")
        expected = sum(not site[3].startswith(_HOOK) for site in map(self._site, self._numbers[count:]))
        if self._left_by_the_loop() != expected and not unknown:
            raise astray("it has read less, or more, out of tensors than the run had")

    def _site(self, number: int) -> list[Any]:
        site: list[Any] = self.saved["sites"][number]
        return site


class _Mirror:
    """The numbers in shared memory, as far as the last boundaries."""

    _HEADER = 4096
    _RECORD = 12
    _MARK = struct.Struct("@QQQ")
    _MARKS = 8

    def __init__(self, path: str) -> None:
        self._path = path
        self._room = 4096
        self._written = 0
        self._sites = 0
        self._memory: mmap.mmap | None = lasting_map(path, self._size())
        """None: there was no room for all of them."""

    def _size(self) -> int:
        return self._HEADER + self._room * self._RECORD

    def update(self, events: int, seen: Seen) -> None:
        if self._memory is None:
            return
        count = len(seen.numbers)
        if count != self._written:
            try:
                self._copy(seen, count)
            except OSError as error:
                tell_of(error, self._path)
                self.remove()
                self._memory = None
                return
        base = events % self._MARKS * self._MARK.size
        self._MARK.pack_into(self._memory, base, 0, 0, 0)
        self._MARK.pack_into(self._memory, base, events + 1, count, 1)

    def _copy(self, seen: Seen, count: int) -> None:
        if count > self._room:
            while count > self._room:
                self._room *= 2
            self._memory = longer_map(self._path, self._size())
        assert self._memory is not None
        if len(seen.sites) != self._sites:
            lines = ["\t".join(map(str, site)) + "\n" for site in seen.sites]
            leave(f"{self._path}.sites", "".join(lines).encode())
            self._sites = len(seen.sites)
        begin = min(self._written, count)
        for index in range(begin, count):
            struct.pack_into(
                "<id", self._memory, self._HEADER + index * self._RECORD, seen.numbers[index], seen.values[index]
            )
        self._written = count

    def remove(self) -> None:
        for path in (self._path, f"{self._path}.sites"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    @classmethod
    def read(cls, path: str, events: int) -> dict[str, Any] | None:
        """What a rank that is dead had read before the boundary after ``events``; None if that is not known."""
        try:
            data = read_left(path)
            sites: list[list[Any]] = []
            with contextlib.suppress(FileNotFoundError):  # nothing was read so far
                for line in read_left(f"{path}.sites").decode().splitlines():
                    name, function, place, how, kind = line.split("\t")
                    sites.append([name, function, int(place), how, kind])
        except (OSError, ValueError):
            return None
        marks = [cls._MARK.unpack_from(data, slot * cls._MARK.size) for slot in range(cls._MARKS)]
        known = [(marked, count) for marked, count, whole in marks if whole and 0 < marked <= events + 1]
        if not known:
            return None
        count = max(known)[1]
        pairs = list(struct.iter_unpack("<id", data[cls._HEADER : cls._HEADER + count * cls._RECORD]))
        pairs = [pair for pair in pairs if pair[0] >= len(sites) or sites[pair[0]][3].removeprefix(_HOOK) != _TEXT]
        if any(number >= len(sites) or sites[number][4] == "o" for number, _ in pairs):
            return None  # lists and arrays died with it
        return {
            "numbers": torch.tensor([number for number, _ in pairs], dtype=torch.int32),
            "values": torch.tensor([value for _, value in pairs], dtype=torch.float64),
            "sites": sites,
            "objects": [],
            "lost": None,
        }


read_mirror = _Mirror.read


def _place_of(frame: FrameType) -> tuple[str, str, int]:
    code = frame.f_code
    return os.path.basename(code.co_filename), code.co_qualname, frame.f_lasti


def _size_of(value: Any) -> int:
    if isinstance(value, str):
        return 32 + len(value)
    if isinstance(value, list | tuple):
        return 16 + sum(_size_of(item) for item in value)
    return int(getattr(value, "nbytes", 32))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value.copy() if hasattr(value, "copy") else value


class Reading:
    """Puts :class:`Seen` between tensors and the script."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._applied: Applied | None = None

    def begin(self) -> None:
        if self._applied is not None:
            return
        _hide_from_compiler(Seen.read, Seen._reader, Seen._keep_object, Seen._number, _kind_of, _place_of)
        wrappers = {name: functools.partial(self._reader, name) for name in TENSOR_READS}
        self._applied = TORCH.begin("read", SimpleNamespace(**wrappers))

    def _reader(self, name: str, original: Any) -> Any:
        seen_read = self._seen.read
        frame_of = sys._getframe

        def read(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            if args or options:
                return seen_read(self, name, lambda tensor: original(tensor, *args, **options), frame_of(1))
            return seen_read(self, name, original, frame_of(1))

        _hide_from_compiler(read)
        return read

    def end(self) -> None:
        if self._applied is not None:
            self._seen.thread = 0  # of no thread: a wrapper that somebody keeps passes everything through
            self._applied.undo()
            self._applied = None


def _hide_from_compiler(*functions: Callable[..., Any]) -> None:
    """torch.compile must not look into these: what they do is not for a graph."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None:
        for function in functions:
            compiler.skip_code(function.__code__)
