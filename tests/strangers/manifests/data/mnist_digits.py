"""MNIST's four files with drawings of our own: ``mnist_digits.py FOLDER [TRAINING [TEST]]``, into ``FOLDER/MNIST/raw``.

Each class is a bar of its own angle with noise, so that a small network learns something.
"""

import struct
import sys
from pathlib import Path

import numpy as np


def images(labels: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """28 by 28 pixels for each label."""
    y, x = np.mgrid[-14:14, -14:14] + 0.5
    angle = labels[:, None, None] * np.pi / 10
    distance = np.abs(x * np.sin(angle) - y * np.cos(angle))
    return np.clip(200 * (distance < 3) + draw.integers(0, 56, (len(labels), 28, 28)), 0, 255).astype(np.uint8)


def write(folder: Path, name: str, number: int, draw: np.random.Generator) -> None:
    """Images and labels as idx files."""
    labels = (np.arange(number) % 10).astype(np.uint8)
    draw.shuffle(labels)
    (folder / f"{name}-images-idx3-ubyte").write_bytes(
        struct.pack(">iiii", 2051, number, 28, 28) + images(labels, draw).tobytes()
    )
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, number) + labels.tobytes())


if __name__ == "__main__":
    raw = Path(sys.argv[1]) / "MNIST" / "raw"
    raw.mkdir(parents=True)
    training, test = (*map(int, sys.argv[2:]), *(1600, 256)[len(sys.argv) - 2 :])
    drawn = np.random.default_rng(0)
    write(raw, "train", training, drawn)
    write(raw, "t10k", test, drawn)
