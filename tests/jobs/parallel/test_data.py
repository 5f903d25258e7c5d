"""What is trained on is never in doubt: checksums are verified, and a stand-in is used only where it was allowed."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import io
import os
import pickle
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import data
import sources
from tests.jobs.parallel.example import EXAMPLE

assert Path(data.__file__).parent == EXAMPLE

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def batch(count: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, size=(count, 3072), dtype=np.uint8)
    return pickle.dumps({b"data": pixels, b"labels": [int(label) for label in rng.integers(0, 10, size=count)]})


def archive(folder: Path, contents: dict[str, bytes] | None = None) -> Path:
    """Of the form of CIFAR-10, with 20 images in each part."""
    contents = contents or {name: batch(20, seed) for seed, name in enumerate(BATCHES)}
    path = folder / "images.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def keras_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    return tmp_path / "keras"


def test_an_archive_with_the_right_checksum_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = archive(tmp_path)
    images = data.load(data.Wanted(name="cifar10", path=str(path), sha256=sha256(path)))
    assert (images.name, images.stand_in, images.shape) == ("cifar10", False, (32, 32, 3))
    assert (len(images.x_train), len(images.x_validation), len(images.x_test)) == (88, 12, 20)
    described = images.describe()
    assert sha256(path) in described["source"]
    assert "GENERATED" not in capsys.readouterr().err
    first = pickle.loads(batch(20, 5))
    pixel = first[b"data"][0].reshape(3, 32, 32)[:, 4, 7]
    assert any((image[4, 7] == pixel).all() for image in images.x_test)  # colours last


def test_a_wrong_checksum_is_an_error_that_names_both(tmp_path: Path) -> None:
    path = archive(tmp_path)
    with pytest.raises(data.DataError) as error:
        data.load(data.Wanted(name="cifar10", path=str(path)))
    for part in (str(path), sha256(path), sources.CIFAR10_SHA256, "--data-sha256"):
        assert part in str(error.value)


def test_a_checksum_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"--data-sha256='12' is not accepted; it must be 64 hexadecimal digits"):
        data.load(data.Wanted(path=str(archive(tmp_path)), sha256="12"))


@pytest.mark.parametrize("name", ["auto", "cifar10"])
def test_what_is_fetched_is_verified_and_otherwise_not_kept(tmp_path: Path, keras_home: Path, name: str) -> None:
    path = archive(tmp_path)
    with pytest.raises(data.DataError, match="SHA-256"):  # also where a stand-in would be allowed
        data.load(data.Wanted(name=name, url=path.as_uri()))
    with pytest.raises(data.DataError, match="cannot be fetched"):
        data.load(data.Wanted(name=name, url=(tmp_path / "nothing").as_uri()))
    assert not keras_home.exists()
    images = data.load(data.Wanted(name=name, url=path.as_uri(), sha256=sha256(path)))
    assert images.name == "cifar10"
    assert images.source == f"{path.as_uri()}, SHA-256 {sha256(path)}"


@pytest.mark.parametrize("original", [True, False])
def test_what_was_fetched_is_not_fetched_again(
    tmp_path: Path, keras_home: Path, monkeypatch: pytest.MonkeyPatch, original: bool
) -> None:
    path = archive(tmp_path)
    checksum = sha256(path)
    if original:
        monkeypatch.setattr(sources, "CIFAR10_SHA256", checksum)
    wanted = data.Wanted(name="cifar10", url=path.as_uri(), sha256=None if original else checksum)
    first = data.load(wanted)
    moved = path.rename(tmp_path / "away")
    kept = keras_home / "datasets" / ("cifar-10-python.tar.gz" if original else f"cifar-10-{checksum}.tar.gz")
    again = data.load(wanted)
    assert again.source == f"{kept}, SHA-256 {checksum}"
    assert again.describe()["sha256"] == first.describe()["sha256"]
    moved.rename(path)
    kept.write_bytes(b"half of it")
    assert data.load(wanted).source == first.source
    assert sha256(kept) == checksum


def test_what_is_damaged_is_an_error_even_with_its_own_checksum(tmp_path: Path) -> None:
    path = archive(tmp_path, {"data_batch_1": batch(20, 1)})
    with pytest.raises(data.DataError, match="it has no data_batch_2"):
        data.load(data.Wanted(path=str(path), sha256=sha256(path)))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(data.DataError, match="is not"):
        data.load(data.Wanted(path=str(path), sha256=sha256(path)))


@contextlib.contextmanager
def server(*answers: tuple[int, bytes, int]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and who asks. To each request a code, a content, and how long the server says that this is."""
    left, asked = list(answers), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            code, content, length = left.pop(0)
            self.send_response(code)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/images.tar.gz", asked
        listening.shutdown()


def test_a_download_that_breaks_off_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "AGAIN_S", 0.0)
    content = (path := archive(tmp_path)).read_bytes()
    wanted = {"name": "cifar10", "sha256": sha256(path)}
    with server((200, b"half", 1000), (503, b"", 0), (200, content, len(content))) as (url, asked):
        assert data.load(data.Wanted(url=url, **wanted)).source.startswith(url)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("answer", "tries", "said"),
    [
        ((200, b"half", 1000), 3, "IncompleteRead"),
        ((503, b"", 0), 3, "Service Unavailable"),
        ((404, b"", 0), 1, "Not Found"),
    ],
)
def test_a_download_that_goes_on_failing_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes, int], tries: int, said: str
) -> None:
    monkeypatch.setattr(sources, "AGAIN_S", 0.0)
    failing = pytest.raises(data.DataError, match=f"cannot be fetched: {said}")
    with server(answer, answer, answer, answer) as (url, asked), failing:
        data.load(data.Wanted(name="cifar10", url=url))
    assert len(asked) == tries


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    contents = {name: pickle.dumps({b"data": Evil(), b"labels": []}) for name in BATCHES}
    path = archive(tmp_path, contents)
    with pytest.raises(data.DataError, match="only arrays are read"):
        data.load(data.Wanted(path=str(path), sha256=sha256(path)))
    assert not (tmp_path / "made").exists()


def test_cifar10_by_name_is_never_replaced(keras_home: Path) -> None:
    with pytest.raises(data.DataError) as error:
        data.load(data.Wanted(name="cifar10", images=64, test_images=32))
    assert str(keras_home) in str(error.value)
    assert sources.CIFAR10_URL in str(error.value)


def test_a_damaged_cache_of_keras_is_an_error_and_no_reason_for_a_stand_in(keras_home: Path) -> None:
    unpacked = keras_home / "datasets/cifar-10-batches-py-target/cifar-10-batches-py"
    unpacked.mkdir(parents=True)
    for seed, name in enumerate(BATCHES):
        (unpacked / name).write_bytes(batch(20, seed))
    with pytest.raises(
        data.DataError, match=r"data_batch_1 has the MD5 \w+ instead of c99cafc152244af753f735de768cd75f"
    ):
        data.load(data.Wanted(name="auto", images=64, test_images=32))


def test_without_cifar10_auto_says_loudly_that_it_generates(capsys: pytest.CaptureFixture[str]) -> None:
    images = data.load(data.Wanted(images=64, test_images=32))
    assert (images.name, images.stand_in, images.shape) == ("generated", True, (32, 32, 3))
    assert "GENERATED IMAGES: a stand-in, NOT CIFAR-10" in capsys.readouterr().err
    assert sorted(set(images.y_test.tolist())) == list(range(10))


def test_generated_images_follow_from_the_seed() -> None:
    first, again, other = (data.load(data.Wanted(images=64, test_images=32, seed=seed)) for seed in (1, 1, 2))
    assert first.describe() == again.describe()
    assert first.describe()["sha256"] != other.describe()["sha256"]


def test_fashion_mnist_is_read_from_where_debian_puts_it(tmp_path: Path) -> None:
    grey = np.arange(28 * 28 * 3, dtype=np.uint8).reshape(3, 28, 28)
    for part in ("train", "t10k"):
        head = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in grey.shape)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + grey.tobytes()))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x03\1\2\3"))
    _, arrays = sources.fashion_mnist(str(tmp_path))
    assert arrays.x_train.shape == (3, 32, 32, 3)
    assert (arrays.x_train[1, 2:30, 2:30, 0] == grey[1]).all()
    assert arrays.y_test.tolist() == [1, 2, 3]
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x09\1"))
    with pytest.raises(data.DataError, match="is not an IDX file"):
        sources.fashion_mnist(str(tmp_path))
    packed = gzip.compress(bytes(range(256)) * 8)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(packed[:10] + bytes(255 - byte for byte in packed[10:]))
    with pytest.raises(data.DataError, match="cannot be unpacked"):
        sources.fashion_mnist(str(tmp_path))
    with pytest.raises(data.DataError, match="apt-get install dataset-fashion-mnist"):
        sources.fashion_mnist(str(tmp_path / "nowhere"))


OWN = """
import numpy as np

def images():
    x = np.arange(40 * 12 * 20, dtype=np.uint8).reshape(40, 12, 20, 1)
    return x, np.arange(40) % 3, x[:16], np.arange(16) % 5

def broken():
    raise OSError("the disk is away")

def three():
    return images()[:3]

def grey():
    x, *others = images()
    return x[..., 0], *others

def floats():
    x, *others = images()
    return x / 255, *others

def other_size():
    x, y, _, y_test = images()
    return x, y, x[:16, :8], y_test

def negative():
    x, y, *others = images()
    return x, y - 1, *others

def short():
    x, y, *others = images()
    return x, y[:-1], *others

def few():
    x, y, x_test, y_test = images()
    return x, y, x_test[:3], y_test[:3]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("mine_data", None)


@pytest.mark.usefixtures("mine")
def test_images_of_ones_own_have_their_own_shape_and_classes() -> None:
    wanted = data.Wanted(name="mine_data:images", images=24)
    found = data.load(wanted)
    assert (found.name, found.shape, found.classes, found.stand_in) == ("mine_data:images", (12, 20, 1), 5, False)
    assert (len(found.x_train), len(found.x_validation), len(found.x_test)) == (21, 3, 16)
    described = found.describe()
    assert (described["shape"], described["classes"]) == ([12, 20, 1], 5)
    assert data.form_of(wanted) == ((12, 20, 1), 5)
    assert data.form_of(data.Wanted(name="cifar10")) == ((32, 32, 3), 10)  # nobody has to have it for that


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobodys:images", ": nobodys cannot be imported: ModuleNotFoundError"),
        ("mine_data:", "; it must be module:function, such as mine:images"),
        ("mine_data:nothing", ": mine_data has no function nothing"),
        ("mine_data:broken", ": the function failed: OSError('the disk is away')"),
        ("mine_data:three", ": it must return four arrays: x_train, y_train, x_test, y_test"),
        ("mine_data:grey", ": x_train has the shape (40, 12, 20) and is of uint8; it must be (images, height, width,"),
        ("mine_data:floats", ": x_train has the shape (40, 12, 20, 1) and is of float64; it must be"),
        ("mine_data:other_size", ": x_test has the shape (16, 8, 20, 1) and is of uint8; it must be"),
        ("mine_data:negative", ": y_train has the shape (40,) and is of int64; it must have one whole number, from 0"),
        ("mine_data:short", ": y_train has the shape (39,) and is of int64; it must have one whole number"),
        ("mine_data:few", ": x_test has 3 images; it must have at least 16"),
    ],
)
def test_images_of_ones_own_that_cannot_be_used_are_refused(name: str, said: str) -> None:
    with pytest.raises(data.DataError) as error:
        data.load(data.Wanted(name=name))
    assert str(error.value).startswith(f"--data={name!r} is not accepted{said}")
    with pytest.raises(data.DataError, match="--data-url='u' goes with --data cifar10, not with"):
        data.load(data.Wanted(name=name, url="u"))


@pytest.mark.skipif(not os.path.isdir(sources.FASHION_MNIST), reason="apt-get install dataset-fashion-mnist")
def test_fashion_mnist_of_debian() -> None:
    images = data.load(data.Wanted(name="fashion-mnist"))
    assert (len(images.x_train) + len(images.x_validation), len(images.x_test)) == (60_000, 10_000)
    assert images.stand_in is False
    assert np.bincount(images.y_test).tolist() == [1000] * 10
