"""Where images come from: CIFAR-10 in Keras' cache, in a file or behind a URL; Fashion-MNIST of Debian; a generator.

Nothing is unpacked before its checksum is known to be right, and the pickles of CIFAR-10 may hold arrays and nothing
else: to read them runs no code of theirs.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import pickle
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
"""Of the archive at that address, as Keras knows it too."""
_BATCHES_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""Of the files in the archive: Keras keeps them unpacked."""
_UNPACKED = ("cifar-10-batches-py-target/cifar-10-batches-py", "cifar-10-batches-py")
_ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-batches-py.tar.gz", "cifar-10-batches-py-target_archive")
FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
_TIMEOUT_S = 60.0
_TRIES = 3
AGAIN_S = 2.0
"""Before a download is tried again."""


class DataError(Exception):
    """The images cannot be used as asked. The message says why and what to do."""


class NotThereError(DataError):
    """Nobody has put them there yet."""


@dataclass(frozen=True)
class Arrays:
    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any


Found = tuple[str, Arrays]
"""In words where it came from, and what it is."""


def keras_cache() -> str:
    return os.path.join(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras"), "datasets")


# ------------------------------------------------------------------ CIFAR-10


def cifar10_cache() -> Found:
    """What Keras has downloaded before, verified."""
    cache = keras_cache()
    for name in _UNPACKED:
        folder = os.path.join(cache, name)
        if os.path.exists(os.path.join(folder, "test_batch")):
            parts = {}
            for batch, expected in _BATCHES_MD5.items():
                path = os.path.join(folder, batch)
                parts[batch] = _read(path)
                _check(path, "MD5", hashlib.md5(parts[batch], usedforsecurity=False).hexdigest(), expected)
            return f"Keras' cache, {folder}, MD5 verified", _from_batches(parts, folder)
    for name in _ARCHIVES:
        if os.path.exists(path := os.path.join(cache, name)):
            return cifar10_file(path, None)
    raise NotThereError(
        f"it is not in Keras' cache ({cache}); --data-url {CIFAR10_URL} fetches it, and --data-path names a copy of "
        f"that file"
    )


def cifar10_file(path: str, sha256: str | None) -> Found:
    expected = _checksum(sha256)
    content = _read(path)
    _check(path, "SHA-256", hashlib.sha256(content).hexdigest(), expected)
    return f"{path}, SHA-256 {expected}", _from_archive(content, path)


def cifar10_url(url: str, sha256: str | None) -> Found:
    """Fetched, verified, and only then put into Keras' cache, from where it is taken the next time."""
    expected = _checksum(sha256)
    if not url.startswith(("https://", "http://", "file://")):
        raise DataError(f"--data-url={url!r} is not accepted; it must begin with https://, http:// or file://")
    kept = os.path.join(keras_cache(), _ARCHIVES[0] if expected == CIFAR10_SHA256 else f"cifar-10-{expected}.tar.gz")
    with contextlib.suppress(OSError):  # it is fetched then
        with open(kept, "rb") as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() == expected:
            return f"{kept}, SHA-256 {expected}", _from_archive(content, kept)
    content = _fetch(url)
    _check(url, "SHA-256", hashlib.sha256(content).hexdigest(), expected)
    arrays = _from_archive(content, url)
    with contextlib.suppress(OSError):  # it is fetched again then
        _keep(content, kept)
    return f"{url}, SHA-256 {expected}", arrays


def _fetch(url: str) -> bytes:
    left = 1 if url.startswith("file://") else _TRIES
    while True:
        left -= 1
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                content: bytes = answer.read()
            return content
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if not left or refused:
                reason = getattr(error, "reason", error)
                raise DataError(f"--data-url={url!r} cannot be fetched: {reason}") from None
        time.sleep(AGAIN_S)


def _keep(content: bytes, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _checksum(sha256: str | None) -> str:
    expected = (sha256 or CIFAR10_SHA256).lower()
    if len(expected) != 64 or set(expected) - set("0123456789abcdef"):
        raise DataError(f"--data-sha256={sha256!r} is not accepted; it must be 64 hexadecimal digits")
    return expected


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _check(what: str, kind: str, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(
            f"{what} has the {kind} {found} instead of {expected}: it is damaged, not complete, or another file. "
            f"Fetch it again; if it is meant to be another archive of the same form, give its --data-sha256"
        )


def _from_archive(content: bytes, what: str) -> Arrays:
    parts = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:*") as archive:
            for member in archive:
                name = os.path.basename(member.name)
                if name in _BATCHES_MD5 and (file := archive.extractfile(member)) is not None:
                    parts[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{what} is not an archive like {CIFAR10_URL}: {error}") from None
    return _from_batches(parts, what)


def _from_batches(parts: dict[str, bytes], what: str) -> Arrays:
    missing = sorted(_BATCHES_MD5.keys() - parts.keys())
    if missing:
        raise DataError(f"{what} is not CIFAR-10 for Python: it has no {missing[0]}")
    training = [_batch(parts[name], f"{name} in {what}") for name in sorted(parts) if name != "test_batch"]
    x_test, y_test = _batch(parts["test_batch"], f"test_batch in {what}")
    x, y = zip(*training, strict=True)
    return Arrays(np.concatenate(x), np.concatenate(y), x_test, y_test)


def _batch(content: bytes, what: str) -> tuple[Any, Any]:
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        pixels = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = np.asarray(batch[b"labels"], dtype=np.uint8)
    except (pickle.UnpicklingError, KeyError, ValueError, TypeError, EOFError) as error:
        raise DataError(f"{what} is not a batch of CIFAR-10: {error}") from None
    if len(pixels) != len(labels) or labels.max(initial=0) > 9:
        raise DataError(f"{what} is not a batch of CIFAR-10: {len(pixels)} images, {len(labels)} labels up to 9")
    return np.ascontiguousarray(pixels), labels


class _ArraysOnly(pickle.Unpickler):
    _KNOWN = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"})

    def __init__(self, file: IO[bytes], **options: Any) -> None:
        super().__init__(file, **options)

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self._KNOWN:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}, and only arrays are read")


# ------------------------------------------------------------------ Fashion-MNIST


def fashion_mnist(folder: str = FASHION_MNIST) -> Found:
    """Debian's package; each image is put into the middle of 32×32 pixels, in three equal colours."""
    if not os.path.isdir(folder):
        raise NotThereError(
            f"--data='fashion-mnist' cannot be had: there is no {folder}; apt-get install dataset-fashion-mnist"
        )
    x_train, x_test = (_idx(folder, f"{part}-images-idx3-ubyte.gz", 3) for part in ("train", "t10k"))
    y_train, y_test = (_idx(folder, f"{part}-labels-idx1-ubyte.gz", 1) for part in ("train", "t10k"))
    return f"{folder}, from Debian's package", Arrays(_in_colour(x_train), y_train, _in_colour(x_test), y_test)


def _idx(folder: str, name: str, dimensions: int) -> Any:
    path = os.path.join(folder, name)
    try:
        content = gzip.decompress(_read(path))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from None
    shape = tuple(int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1, dimensions + 1))
    begin = 4 * (dimensions + 1)
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) - begin != int(np.prod(shape)):
        raise DataError(f"{path} is not an IDX file of bytes in {dimensions} dimensions")
    return np.frombuffer(content, dtype=np.uint8, offset=begin).reshape(shape)


def _in_colour(grey: Any) -> Any:
    padded = np.pad(grey, ((0, 0), (2, 2), (2, 2)))
    return np.repeat(padded[..., np.newaxis], 3, axis=3)


# ------------------------------------------------------------------ generated


def generated(count: int, test_count: int, classes: int, seed: int) -> Arrays:
    """A colour pattern for each class, moved about, darker or lighter, under noise: easy to learn, not trivial."""
    rng = np.random.default_rng([seed, 2])
    coarse = rng.normal(size=(classes, 8, 8, 3)).astype(np.float32)
    patterns = coarse.repeat(4, axis=1).repeat(4, axis=2)

    def some(number: int) -> tuple[Any, Any]:
        labels = (np.arange(number) % classes).astype(np.uint8)
        rng.shuffle(labels)
        pixels = np.empty((number, 32, 32, 3), np.uint8)
        for index, label in enumerate(labels):
            moved = np.roll(patterns[label], tuple(rng.integers(-3, 4, size=2)), axis=(0, 1))
            noise = rng.normal(size=moved.shape).astype(np.float32)
            picture = 127.5 + 35.0 * rng.uniform(0.5, 1.5) * moved + 25.0 * noise
            pixels[index] = np.clip(picture, 0, 255).astype(np.uint8)
        return pixels, labels

    x_train, y_train = some(count)
    return Arrays(x_train, y_train, *some(test_count))
