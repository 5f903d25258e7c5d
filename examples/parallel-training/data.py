"""The images that both trainings learn from: 32×32 pixels, three colours, ten classes, unless they are a person's own.

What is used is never in doubt: CIFAR-10 is used only if its checksum is right, a generated stand-in says in capitals
that it is one, and both are written into the results. A dataset that was asked for by name is used or is an error;
only ``auto`` may fall back to the stand-in. ``module:function`` names a function that returns others.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

import own
import sources
from sources import Arrays, DataError

NAMES = ("auto", "cifar10", "fashion-mnist", "generated")
SHAPE, CLASSES = (32, 32, 3), 10
"""Of those that have a name here."""
VALIDATION_SHARE = 8
"""One image in so many of those for training is held out for validation."""
FEWEST = 16

__all__ = ["NAMES", "DataError", "Images", "Wanted", "batches", "form_of", "load"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which images a person asked for."""

    name: str = "auto"
    path: str | None = None
    url: str | None = None
    sha256: str | None = None
    images: int | None = None
    """For training and validation; None: all that there are."""
    test_images: int | None = None
    seed: int = 7


@dataclass(frozen=True, kw_only=True)
class Images:
    """What is trained on. Pixels are bytes; :func:`batches` scales them."""

    name: str
    source: str
    stand_in: bool
    """Generated instead of photographed: its accuracy says nothing about the real data."""
    classes: int
    x_train: Any
    y_train: Any
    x_validation: Any
    y_validation: Any
    x_test: Any
    y_test: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])

    def describe(self) -> dict[str, Any]:
        """For the results. Two trainings on the same images have the same digest."""
        digest = hashlib.sha256()
        for array in (self.x_train, self.y_train, self.x_validation, self.y_validation, self.x_test, self.y_test):
            digest.update(np.ascontiguousarray(array).tobytes())
        return {
            "name": self.name,
            "source": self.source,
            "stand_in": self.stand_in,
            "training_images": len(self.x_train),
            "validation_images": len(self.x_validation),
            "test_images": len(self.x_test),
            "shape": list(self.shape),
            "classes": self.classes,
            "sha256": digest.hexdigest(),
        }


def load(wanted: Wanted) -> Images:
    """The images, or a :class:`DataError` that says what is missing and how to get it."""
    name, source, arrays = _find(wanted)
    if name == "generated":
        print(_LOUD.format(why=source), file=sys.stderr, flush=True)
    rng = np.random.default_rng(wanted.seed)
    x, y = _some(arrays.x_train, arrays.y_train, wanted.images, "--images", rng)
    x_test, y_test = _some(arrays.x_test, arrays.y_test, wanted.test_images, "--test-images", rng)
    held_out = len(x) // VALIDATION_SHARE
    return Images(
        name=name,
        source=source,
        stand_in=name == "generated",
        classes=CLASSES if name in NAMES else 1 + int(max(arrays.y_train.max(), arrays.y_test.max())),
        x_train=x[held_out:],
        y_train=y[held_out:],
        x_validation=x[:held_out],
        y_validation=y[:held_out],
        x_test=x_test,
        y_test=y_test,
    )


def form_of(wanted: Wanted) -> tuple[tuple[int, ...], int]:
    """The shape of an image and the number of classes; known without a look at them where they have a name here."""
    if ":" not in wanted.name:
        return SHAPE, CLASSES
    images = load(wanted)
    return images.shape, images.classes


_LOUD = """
******************************************************************************
*  GENERATED IMAGES: a stand-in, NOT CIFAR-10. Its accuracy means nothing     *
*  outside of this comparison.                                                *
******************************************************************************
{why}
"""


def _find(wanted: Wanted) -> tuple[str, str, Arrays]:
    if wanted.name not in NAMES and ":" not in wanted.name:
        raise DataError(
            f"--data={wanted.name!r} is not accepted; it must be one of {', '.join(NAMES)}, or module:function for a "
            f"function of yours"
        )
    given = [option for option in ("path", "url", "sha256") if getattr(wanted, option) is not None]
    if given and wanted.name not in ("auto", "cifar10"):
        raise DataError(
            f"--data-{given[0]}={getattr(wanted, given[0])!r} goes with --data cifar10, not with {wanted.name}"
        )
    if wanted.path is not None and wanted.url is not None:
        raise DataError(f"--data-path={wanted.path!r} and --data-url={wanted.url!r} exclude each other; give one")
    if wanted.sha256 is not None and wanted.path is None and wanted.url is None:
        raise DataError(f"--data-sha256={wanted.sha256!r} belongs to a file; give --data-path or --data-url too")
    if ":" in wanted.name:
        return wanted.name, f"the function {wanted.name}", _own(wanted.name)
    if wanted.name == "fashion-mnist":
        return "fashion-mnist", *sources.fashion_mnist()
    if wanted.name == "generated":
        return "generated", "generated, as --data generated asks for", _generated(wanted)
    if wanted.path is not None:
        return "cifar10", *sources.cifar10_file(wanted.path, wanted.sha256)
    if wanted.url is not None:
        return "cifar10", *sources.cifar10_url(wanted.url, wanted.sha256)
    try:
        return "cifar10", *sources.cifar10_cache()
    except sources.NotThereError as missing:
        if wanted.name == "cifar10":
            raise
        return "generated", f"generated, since CIFAR-10 cannot be had: {missing}", _generated(wanted)


def _generated(wanted: Wanted) -> Arrays:
    count, test_count = wanted.images or 50_000, wanted.test_images or 10_000
    for option, number in (("--images", count), ("--test-images", test_count)):
        if number < FEWEST:
            raise DataError(f"{option}={number} is not accepted; it must be at least {FEWEST}")
    return sources.generated(count, test_count, CLASSES, wanted.seed)


def _own(name: str) -> Arrays:
    """What a function returns, looked at as closely as it can be."""
    try:
        function = own.find("--data", name, "mine:images")
    except own.OwnError as error:
        raise DataError(str(error)) from None
    refused = f"--data={name!r} is not accepted"
    try:
        returned = function()
    except Exception as error:
        raise DataError(f"{refused}: the function failed: {error!r}") from None
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        raise DataError(f"{refused}: it must return four arrays: x_train, y_train, x_test, y_test")
    x_train, y_train, x_test, y_test = map(np.asarray, returned)
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim != 4 or x.dtype != np.uint8 or x.shape[1:] != x_train.shape[1:]:
            raise DataError(
                f"{refused}: x_{part} has the shape {x.shape} and is of {x.dtype}; it must be (images, height, width, "
                f"colours), the last three as in x_train, and of uint8"
            )
        if y.shape != (len(x),) or y.dtype.kind not in "iu" or (len(y) and y.min() < 0):
            raise DataError(
                f"{refused}: y_{part} has the shape {y.shape} and is of {y.dtype}; it must have one whole number, "
                f"from 0 on, for each of the {len(x)} images"
            )
        if len(x) < FEWEST:
            raise DataError(f"{refused}: x_{part} has {len(x)} images; it must have at least {FEWEST}")
    return Arrays(x_train, y_train, x_test, y_test)


def _some(x: Any, y: Any, count: int | None, option: str, rng: np.random.Generator) -> tuple[Any, Any]:
    """So many of them, drawn by the seed."""
    count = len(x) if count is None else count
    if not FEWEST <= count <= len(x):
        raise DataError(
            f"{option}={count} is not accepted; it must be from {FEWEST} to {len(x)}, which is all there are"
        )
    chosen = rng.permutation(len(x))[:count]
    return x[chosen], y[chosen]


def batches(x: Any, y: Any, batch_size: int, *, shuffle_seed: int | None = None, threads: int = 1) -> Any:
    """A ``tf.data`` pipeline of whole batches; a strategy divides each of them among its workers.

    So with any number of workers a step sees the same images as with one, in the same order.
    """
    import tensorflow as tf

    def scaled(images: Any, labels: Any) -> Any:
        return tf.cast(images, tf.float32) / 127.5 - 1.0, tf.cast(labels, tf.int32)

    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    if shuffle_seed is not None:
        dataset = dataset.shuffle(len(x), seed=shuffle_seed)
    dataset = dataset.batch(batch_size).map(tf.autograph.experimental.do_not_convert(scaled))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.threading.private_threadpool_size = threads
    return dataset.with_options(options).prefetch(1)
