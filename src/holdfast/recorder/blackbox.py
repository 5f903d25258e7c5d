"""What is left of a rank that was killed: its random state and position, in shared memory.

A survivor holds the dead rank's parameters, since data parallelism keeps a copy on each, but not its
random state. So each rank keeps that in a small file in shared memory, which outlives the process: at
every boundary the raw words of its generators are copied there, with no allocation and no system call.

Each file has two slots for boundaries, two for moments inside steps with even numbers and two for those with odd
ones, used in turn: what is noted inside a step leaves the end of the step before it in place, however often that is.
A slot's sequence number is written last, and cleared first: a process that dies while it writes a slot leaves the one
before it valid.

The layout of the generators in memory is not a public interface of torch, CPython and NumPy. It is found
by looking for the generator's own words and proved, by drawing numbers and decoding, before it is used;
where the proof fails the public calls are used, which are slower. All words are copied each time: to find
out whether they have changed would take longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.recorder.boxes import HEADER, MAGIC, SLOT, SLOTS
from holdfast.recorder.shared import lasting_map, leave, read_left, tell_of

_MT_BYTES = 624 * 4
_TORCH_HEAD, _TORCH_TAIL = 20, 32
# The sequence number; kind, step, epoch, passes, delivered; whether NumPy has a spare normal, as it lies in its
# memory, and which; Python's spare normal, and whether there is one.
_RECORD = struct.Struct("@QQQQQQi4xddQ")
_STEP, _DELIVERED = 2, 5
_AT_NUMPY_SPARE, _NUMPY_SPARE = 48, struct.Struct("@i4xd")
_AT_CUDA = 96
_CUDA = struct.Struct("@QQQ")  # whether it is used; its generator's seed and offset, which are all of its state
_ALL = slice(None)
_AT_TORCH = 128
_AT_PYTHON = _AT_TORCH + 5120
_AT_NUMPY = _AT_PYTHON + 2560


@dataclass(frozen=True, slots=True)
class Record:
    """One remembered moment of a rank."""

    kind: int
    step: int
    """The step whose end this record describes."""
    epoch: int
    passes: int
    delivered: int
    random: dict[str, Any]


def _torch_words() -> memoryview | None:
    """The words of torch's CPU generator and what goes with them, as raw memory; None if its place is not proved."""
    address = torch.default_generator._cdata
    words = _legacy_words(torch.get_rng_state())
    offset = ctypes.string_at(address, 3072).find(words)
    if offset < _TORCH_HEAD:
        return None
    size = _TORCH_HEAD + _MT_BYTES + _TORCH_TAIL
    view = memoryview((ctypes.c_char * size).from_address(address + offset - _TORCH_HEAD)).cast("B")
    saved = torch.get_rng_state()
    try:
        for count, dtype in ((7, torch.float32), (1, torch.float32), (1, torch.float64)):
            torch.rand(count)
            torch.randn(1, dtype=dtype)
            torch.set_rng_state(torch.get_rng_state())  # leaves rubbish where no value is kept
            if not torch.equal(_torch_state(bytes(view)), torch.get_rng_state()):
                return None
        return view
    finally:
        torch.set_rng_state(saved)


def _legacy_words(state: torch.Tensor) -> bytes:
    words = struct.unpack_from("<624Q", state.numpy().tobytes(), 24)
    return struct.pack("<624I", *words)


def _torch_state(raw: bytes) -> torch.Tensor:
    """torch's own serialised form of raw generator memory."""
    seed, left, seeded, following = struct.unpack_from("<Qi?3xI", raw, 0)
    words = struct.unpack_from("<624I", raw, _TORCH_HEAD)
    # Behind the words: optional<float> and optional<double>, the spare halves of Box-Muller pairs.
    spare_float, has_float = struct.unpack_from("<f?", raw, _TORCH_HEAD + _MT_BYTES + 4)
    spare_double, has_double = struct.unpack_from("<d?", raw, _TORCH_HEAD + _MT_BYTES + 12)
    blob = struct.pack("<QiiQ", seed, left, int(seeded), following) + struct.pack("<624Q", *words)
    blob += struct.pack("<dddi", 0.0, spare_double if has_double else 0.0, 0.0, int(has_double))
    blob += struct.pack("<f?7x", spare_float if has_float else 0.0, has_float)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def _python_words() -> memoryview | None:
    """The words of Python's shared generator: index, then 624 words; None if they are not where expected."""
    instance: Any = vars(random)["_inst"]
    saved = random.getstate()
    words = saved[1]
    base = ctypes.string_at(id(instance), object.__sizeof__(instance))
    offset = base.find(struct.pack("<624I", *words[:624]))
    if offset < 4:
        return None
    view = memoryview((ctypes.c_char * (4 + _MT_BYTES)).from_address(id(instance) + offset - 4)).cast("B")
    random.random()
    proved = struct.unpack("<i624I", view) == (random.getstate()[1][624], *random.getstate()[1][:624])
    random.setstate(saved)
    return view if proved else None


def _numpy_words(numpy: Any) -> tuple[memoryview, memoryview] | None:
    """The words and position of NumPy's shared generator, and its spare normal with whether there is one."""
    shared = numpy.random.mtrand._rand
    saved = numpy.random.get_state(legacy=False)
    try:
        spare = 0.5 + 1 / 3
        numpy.random.set_state({**saved, "has_gauss": 1, "gauss": spare})
        offset = ctypes.string_at(id(shared), type(shared).__basicsize__).find(_NUMPY_SPARE.pack(1, spare))
        if offset < 0:
            return None
        address = shared._bit_generator.ctypes.state_address
        words = memoryview((ctypes.c_char * (_MT_BYTES + 4)).from_address(address)).cast("B")
        normal = memoryview((ctypes.c_char * _NUMPY_SPARE.size).from_address(id(shared) + offset)).cast("B")
        for count in (0, 1, 5, 4):  # with a spare normal and without
            numpy.random.random_sample(count)
            numpy.random.standard_normal(count)
            state = numpy.random.get_state(legacy=False)
            *key, position = struct.unpack("<624Ii", words)
            if key != state["state"]["key"].tolist() or position != state["state"]["pos"]:
                return None
            if _NUMPY_SPARE.unpack(normal) != (state["has_gauss"], state["gauss"]):
                return None
        return words, normal
    finally:
        numpy.random.set_state(saved)


def _has_mt19937(numpy: Any) -> bool:
    return numpy is not None and type(numpy.random.mtrand._rand._bit_generator).__name__ == "MT19937"


class _Slot:
    """Room for a record, and what the last one here said of things that seldom change."""

    __slots__ = ("epoch", "gauss", "numbers", "numpy", "numpy_spare", "other", "passes", "python", "sequence", "torch")

    def __init__(self, room: memoryview, sequence: int) -> None:
        self.numbers = room.cast("Q")
        self.torch = room[_AT_TORCH : _AT_TORCH + _TORCH_HEAD + _MT_BYTES + _TORCH_TAIL]
        self.python = room[_AT_PYTHON : _AT_PYTHON + 4 + _MT_BYTES]
        self.numpy = room[_AT_NUMPY : _AT_NUMPY + _MT_BYTES + 4]
        self.numpy_spare = room[_AT_NUMPY_SPARE : _AT_NUMPY_SPARE + _NUMPY_SPARE.size]
        self.sequence = sequence
        self.other = self
        self.epoch = self.passes = -1
        self.gauss: float | None = None


class BlackBox:
    """This rank's records. ``note`` is on the hot path."""

    def __init__(self, path: str | None, rank: int) -> None:
        self.path = path
        size = HEADER + SLOTS * SLOT
        self._memory = lasting_map(path, size)
        self._memory[: len(MAGIC)] = MAGIC
        self._memory[64:80] = struct.pack("<QQ", rank, os.getpid())
        self._view = memoryview(self._memory)
        self._instance: Any = vars(random)["_inst"]
        self._torch = _torch_words()
        self._python = _python_words()
        self._numpy: memoryview | None = None
        self._numpy_spare: memoryview | None = None
        numpy = sys.modules.get("numpy")
        self._has_numpy = _has_mt19937(numpy)
        if self._has_numpy and (places := _numpy_words(numpy)) is not None:
            self._numpy, self._numpy_spare = places
        self._cuda: Any = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._cuda = torch.cuda.default_generators[torch.cuda.current_device()]
        self.fast = None not in (self._torch, self._python) and (self._numpy is not None or not self._has_numpy)
        # In the common case everything is copied from where it lies.
        self._raw: tuple[memoryview, memoryview, memoryview, memoryview] | None = None
        if self._torch and self._python and self._numpy and self._numpy_spare and self._cuda is None:
            self._raw = (self._torch, self._python, self._numpy, self._numpy_spare)
        # By kind and parity of the step, the slot whose turn it is: boundaries have one pair for all steps. The first
        # record has the number 1 and the slot with the odd numbers.
        self._turn: list[_Slot] = []
        for base in range(HEADER, HEADER + SLOTS * SLOT, SLOT):
            self._turn.append(_Slot(self._view[base : base + SLOT], -((base - HEADER) // SLOT % 2)))
        for even, odd in zip(self._turn[::2], self._turn[1::2], strict=True):
            even.other, odd.other = odd, even
        self._turn[::2] = self._turn[1::2]
        self.note = self._noter()
        """Remember this moment: kind, step, epoch, passes, delivered. Allocates nothing that lasts."""

    def _noter(self) -> Callable[[int, int, int, int, int], None]:
        # A closure, whose names are looked up more quickly than an object's attributes.
        turn, instance, raw, copy, everything = self._turn, self._instance, self._raw, self._copy, _ALL

        def note(kind: int, step: int, epoch: int, passes: int, delivered: int) -> None:
            place = kind + (step & 1) * kind
            slot = turn[place]
            turn[place] = slot.other
            sequence = slot.sequence = slot.sequence + 2
            numbers = slot.numbers
            numbers[0] = 0
            if raw is not None:
                (
                    slot.torch[everything],
                    slot.python[everything],
                    slot.numpy[everything],
                    slot.numpy_spare[everything],
                ) = raw
            else:
                copy(slot)
            gauss = instance.gauss_next
            if gauss is not slot.gauss or passes != slot.passes or epoch != slot.epoch:
                slot.gauss, slot.passes, slot.epoch = gauss, passes, epoch
                spare = _NUMPY_SPARE.unpack(slot.numpy_spare)
                _RECORD.pack_into(numbers, 0, 0, kind, 0, epoch, passes, 0, *spare, gauss or 0.0, gauss is not None)
            numbers[_STEP] = step
            numbers[_DELIVERED] = delivered
            numbers[0] = sequence  # last: until then it is no record

        return note

    def _copy(self, slot: _Slot) -> None:
        """The random state, by public calls where the place of the words is not known."""
        room = slot.numbers.cast("B")
        if self._torch is not None:
            slot.torch[_ALL] = self._torch
        else:
            raw = torch.get_rng_state().numpy().tobytes()
            room[_AT_TORCH : _AT_TORCH + len(raw)] = raw
        if self._python is not None:
            slot.python[_ALL] = self._python
        else:
            words = random.getstate()[1]
            struct.pack_into("<i624I", slot.python, 0, words[624], *words[:624])
        if self._numpy is not None and self._numpy_spare is not None:
            slot.numpy[_ALL] = self._numpy
            slot.numpy_spare[_ALL] = self._numpy_spare
        elif self._has_numpy:
            state = sys.modules["numpy"].random.get_state(legacy=False)
            struct.pack_into("<624Ii", slot.numpy, 0, *state["state"]["key"].tolist(), state["state"]["pos"])
            _NUMPY_SPARE.pack_into(slot.numpy_spare, 0, state["has_gauss"], state["gauss"])
        if self._cuda is not None:
            _CUDA.pack_into(room, _AT_CUDA, 1, self._cuda.initial_seed(), self._cuda.get_offset())

    def records(self) -> list[Record]:
        return _decode(self._view)

    def leave(self, name: str, data: bytes) -> None:
        """Replace what lies beside this box under ``name``. If that fails, nobody may take the records for complete."""
        if self.path is not None:
            try:
                leave(f"{self.path}.{name}", data)
            except OSError as error:
                self._memory[: len(MAGIC)] = bytes(len(MAGIC))
                tell_of(error, self.path)

    def remove(self) -> None:
        """The run does not need it any more."""
        if self.path is not None:
            for path in (self.path, f"{self.path}.position"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            with contextlib.suppress(OSError):  # other ranks' boxes are still there
                os.rmdir(os.path.dirname(self.path))


def read_box(path: str) -> tuple[int, int, list[Record]]:
    """Rank, process and records of a box that another process wrote; raises OSError or ValueError if unreadable."""
    data = memoryview(read_left(path))
    if len(data) != HEADER + SLOTS * SLOT or bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"{path} is no black box")
    rank, pid = struct.unpack_from("<QQ", data, 64)
    return rank, pid, _decode(data)


def _decode(view: memoryview) -> list[Record]:
    """All valid records, oldest first."""
    found: list[tuple[int, Record]] = []
    for slot in range(SLOTS):
        base = HEADER + slot * SLOT
        (sequence, kind, step, epoch, passes, delivered, *normals) = _RECORD.unpack_from(view, base)
        has_cuda, cuda_seed, cuda_offset = _CUDA.unpack_from(view, base + _AT_CUDA)
        numpy_has, numpy_spare, python_spare, python_has = normals
        if not sequence:
            continue
        words = struct.unpack_from("<i624I", view, base + _AT_PYTHON)
        state: dict[str, Any] = {
            "python": {
                "version": 3,
                "words": torch.tensor([*words[1:], words[0]], dtype=torch.int64),
                "gauss": python_spare if python_has else None,
            },
            "torch": _read_torch(view[base + _AT_TORCH : base + _AT_PYTHON]),
        }
        *key, position = struct.unpack_from("<624Ii", view, base + _AT_NUMPY)
        if any(key):
            state["numpy"] = {
                "key": torch.tensor(key, dtype=torch.int64),
                "pos": position,
                "has_gauss": numpy_has,
                "gauss": numpy_spare,
            }
        if has_cuda:
            state["cuda"] = torch.frombuffer(bytearray(struct.pack("<QQ", cuda_seed, cuda_offset)), dtype=torch.uint8)
        found.append((sequence, Record(kind, step, epoch, passes, delivered, state)))
    return [record for _, record in sorted(found, key=lambda item: item[0])]


def _read_torch(raw: memoryview) -> torch.Tensor:
    size = _TORCH_HEAD + _MT_BYTES + _TORCH_TAIL
    if any(raw[size : size + 64]):  # the slower, public form is longer than the raw one
        return torch.frombuffer(bytearray(raw[:5056]), dtype=torch.uint8)
    return _torch_state(bytes(raw[:size]))
