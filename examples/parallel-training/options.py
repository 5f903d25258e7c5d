"""What both trainings can be told, and how they refuse what they cannot do: the option, its value, what is accepted."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import data
import model


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number in a range, for ``type=`` of an argument."""
    accepted = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not accepted; it must be {accepted}")
        return number

    return parse


def rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; it must be a number above 0 and up to 1")
    return number


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training. Two that agree in all of this, and in their images, do the same work."""

    epochs: int
    batch_size: int
    """Of all workers together."""
    learning_rate: float
    patience: int
    """Epochs without a better validation loss after which training stops."""
    seed: int
    filters: int
    model: str
    """As ``module:function``."""
    cpus: int
    """Cores, and threads of TensorFlow, of each process."""
    gpus: int
    """Of each process; others are not seen."""
    pin: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of a training, whichever it is."""
    add = parser.add_argument
    add("--epochs", type=whole(1), default=10, help="at most so many (default 10)")
    add("--batch-size", type=whole(1), default=128, help="images in a step, of all workers together (default 128)")
    add("--save-path", default="results", help="folder for the results (default: results)")
    add("--data", default="auto", metavar="NAME", help=f"{', '.join(data.NAMES)}, or M:F (default: auto)")
    add("--data-path", metavar="FILE", help="cifar-10-python.tar.gz, or another archive of that form")
    add("--data-url", metavar="URL", help="where to fetch it")
    add("--data-sha256", metavar="HEX", help="checksum of the file (default: that of the original)")
    add("--images", type=whole(1), help="for training and validation (default: all)")
    add("--test-images", type=whole(1), help="for the accuracy at the end (default: all)")
    add("--learning-rate", type=rate, default=1e-3, help="at the start (default 0.001)")
    add("--patience", type=whole(1), default=5, help="epochs without progress before training stops (default 5)")
    add("--seed", type=whole(0, 2**32 - 1), default=7, help="of everything that is drawn (default 7)")
    add("--filters", type=whole(1, 512), default=model.FILTERS, help="of the first block (default 64)")
    add("--model", default=model.OURS, metavar="M:F", help=f"a function that builds another (default: {model.OURS})")
    add("--cpus", type=whole(1), default=1, help="cores of each process (default 1)")
    add("--gpus", type=whole(0, 1), default=0, help="GPUs of each process (default 0)")
    add("--no-pin", action="store_true", help="do not bind each process to cores of its own")


def job_of(arguments: argparse.Namespace) -> Job:
    return Job(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        patience=arguments.patience,
        seed=arguments.seed,
        filters=arguments.filters,
        model=arguments.model,
        cpus=arguments.cpus,
        gpus=arguments.gpus,
        pin=not arguments.no_pin,
    )


def wanted_of(arguments: argparse.Namespace) -> data.Wanted:
    return data.Wanted(
        name=arguments.data,
        path=arguments.data_path,
        url=arguments.data_url,
        sha256=arguments.data_sha256,
        images=arguments.images,
        test_images=arguments.test_images,
        seed=arguments.seed,
    )


def check_batch(job: Job, images: data.Images, workers: int) -> None:
    """Raise where the batch cannot be made of these images by these workers."""
    if job.batch_size % workers:
        raise data.DataError(
            f"--batch-size={job.batch_size} is not accepted with --num-workers={workers}; it must be a multiple of it, "
            f"so that all workers do the same work"
        )
    if job.batch_size > len(images.x_train):
        raise data.DataError(
            f"--batch-size={job.batch_size} is not accepted with {len(images.x_train)} images for training; it must be "
            f"at most that"
        )
