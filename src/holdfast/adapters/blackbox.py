"""What is left of a rank that was killed: its random state and position, in shared memory.

A survivor holds the dead rank's parameters, since data parallelism keeps a copy on each, but not its
random state. So each rank keeps that in a small file in shared memory, which outlives the process: at
every boundary the raw words of its generators are copied there, with no allocation and no system call.

Each file has two slots for boundaries and two for moments inside a step, used in turn. A slot's sequence
number is written last, and cleared first: a process that dies while it writes a slot leaves the one
before it valid.

The layout of the generators in memory is not a public interface of torch and CPython. It is found by
looking for the generator's own words and proved, by drawing numbers and decoding, before it is used;
where the proof fails the public calls are used, which are slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.boxes import HEADER, MAGIC, SLOT, SLOTS

_MT_BYTES = 624 * 4
_TORCH_HEAD, _TORCH_TAIL = 20, 32
# kind, step, epoch, passes, delivered; NumPy's spare normal, whether there is one; Python's likewise. Before
# them, by itself, the sequence number.
_RECORD = struct.Struct("@QQQQQdQdQ")
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


class _TorchWords:
    """The words of torch's CPU generator, as raw memory where its place is proved, else by its public call."""

    def __init__(self) -> None:
        self.view: memoryview | None = None
        address = torch.default_generator._cdata
        words = _legacy_words(torch.get_rng_state())
        memory = ctypes.string_at(address, 3072)
        offset = memory.find(words)
        if offset >= _TORCH_HEAD:
            size = _TORCH_HEAD + _MT_BYTES + _TORCH_TAIL
            candidate = (ctypes.c_char * size).from_address(address + offset - _TORCH_HEAD)
            view = memoryview(candidate).cast("B")
            if self._proved(view):
                self.view = view

    @staticmethod
    def _proved(view: memoryview) -> bool:
        saved = torch.get_rng_state()
        try:
            for count, dtype in ((7, torch.float32), (1, torch.float32), (1, torch.float64)):
                torch.rand(count)
                torch.randn(1, dtype=dtype)
                torch.set_rng_state(torch.get_rng_state())  # leaves rubbish where no value is kept
                if not torch.equal(_torch_state(bytes(view)), torch.get_rng_state()):
                    return False
            return True
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


def _numpy_words() -> memoryview | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return None
    address = generator.ctypes.state_address
    return memoryview((ctypes.c_char * (_MT_BYTES + 4)).from_address(address)).cast("B")


class BlackBox:
    """This rank's records. :meth:`note` is on the hot path."""

    def __init__(self, path: str | None, rank: int) -> None:
        self.path = path
        size = HEADER + SLOTS * SLOT
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(fd, size)
                self._memory = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        self._memory[: len(MAGIC)] = MAGIC
        self._memory[64:80] = struct.pack("<QQ", rank, os.getpid())
        self._view = memoryview(self._memory)
        self._torch = _TorchWords()
        self._python = _python_words()
        self._instance: Any = vars(random)["_inst"]
        self._numpy = _numpy_words()
        self._numpy_seen, self._numpy_has, self._numpy_spare = -1, 0, 0.0
        if self._numpy is not None:
            self._numpy_position = ctypes.c_int.from_buffer(self._numpy, _MT_BYTES)
        self._numbers = self._view.cast("Q")
        self._cuda: Any = None
        self._sequence = [0, 0, 0]
        self._slots = [
            (
                base := HEADER + slot * SLOT,
                base // 8,
                self._view[base + _AT_TORCH : base + _AT_TORCH + _TORCH_HEAD + _MT_BYTES + _TORCH_TAIL],
                self._view[base + _AT_PYTHON : base + _AT_PYTHON + 4 + _MT_BYTES],
                self._view[base + _AT_NUMPY : base + _AT_NUMPY + _MT_BYTES + 4],
            )
            for slot in range(SLOTS)
        ]
        self.fast = self._torch.view is not None and self._python is not None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._cuda = torch.cuda.default_generators[torch.cuda.current_device()]

    def note(self, kind: int, step: int, epoch: int, passes: int, delivered: int) -> None:
        """Remember this moment. About a microsecond; allocates nothing that lasts."""
        sequence = self._sequence[kind] = self._sequence[kind] + 1
        base, number, torch_slot, python_slot, numpy_slot = self._slots[kind + sequence % 2]
        self._numbers[number] = 0
        source = self._torch.view
        if source is not None:
            torch_slot[_ALL] = source
        else:
            raw = torch.get_rng_state().numpy().tobytes()
            self._view[base + _AT_TORCH : base + _AT_TORCH + len(raw)] = raw
        if self._python is not None:
            python_slot[_ALL] = self._python
        else:
            words = random.getstate()[1]
            struct.pack_into("<i624I", python_slot, 0, words[624], *words[:624])
        if self._numpy is not None:
            numpy_slot[_ALL] = self._numpy
            if self._numpy_position.value != self._numpy_seen or self._numpy_has:
                # Used since the last record: the spare half of a pair of normals has no known place in memory.
                legacy = sys.modules["numpy"].random.get_state(legacy=False)
                self._numpy_seen = legacy["state"]["pos"]
                self._numpy_has, self._numpy_spare = legacy["has_gauss"], legacy["gauss"]
        spare = self._instance.gauss_next
        _RECORD.pack_into(
            self._view,
            base + 8,
            kind,
            step,
            epoch,
            passes,
            delivered,
            self._numpy_spare,
            self._numpy_has,
            spare or 0.0,
            spare is not None,
        )
        if self._cuda is not None:
            _CUDA.pack_into(self._view, base + _AT_CUDA, 1, self._cuda.initial_seed(), self._cuda.get_offset())
        self._numbers[number] = sequence  # last: until then it is no record

    def records(self) -> list[Record]:
        return _decode(self._view)

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
    with open(path, "rb") as file:
        data = memoryview(file.read())
    if len(data) != HEADER + SLOTS * SLOT or bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError(f"{path} is no black box")
    rank, pid = struct.unpack_from("<QQ", data, 64)
    return rank, pid, _decode(data)


def _decode(view: memoryview) -> list[Record]:
    """All valid records, oldest first."""
    found: list[tuple[int, Record]] = []
    for slot in range(SLOTS):
        base = HEADER + slot * SLOT
        (sequence,) = struct.unpack_from("@Q", view, base)
        (kind, step, epoch, passes, delivered, *normals) = _RECORD.unpack_from(view, base + 8)
        has_cuda, cuda_seed, cuda_offset = _CUDA.unpack_from(view, base + _AT_CUDA)
        numpy_spare, numpy_has, python_spare, python_has = normals
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
