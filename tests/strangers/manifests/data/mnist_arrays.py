"""Drawings of digits as one NumPy file: ``(x, y), (x_test, y_test) = numpy.load(FILE, allow_pickle=True)``.

``mnist_arrays.py FILE [TRAINING [TEST]]``.
"""

import sys

import numpy as np
from mnist_digits import images

if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    draw = np.random.default_rng(0)
    arrays = np.empty((2, 2), dtype=object)
    for part, number in enumerate((*map(int, numbers), *(1280, 256)[len(numbers) :])):
        labels = draw.permutation(np.arange(number) % 10).astype(np.uint8)
        arrays[part, 0], arrays[part, 1] = images(labels, draw), labels
    with open(path, "wb") as file:
        np.save(file, arrays, allow_pickle=True)
