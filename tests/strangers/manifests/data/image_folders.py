"""Pictures in folders: ``image_folders.py FOLDER [--classes N] [--train N] [--val N] [--test N] [--size N] [--flat]``.

For each part a folder with one folder per class, as torchvision's ImageFolder reads it; ``--flat``: without classes.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image


def picture(label: int, size: int, draw: np.random.Generator) -> Image.Image:
    """Stripes of a width for each class, with noise."""
    stripes = 80 * (np.arange(size) // (2 + 3 * label) % 2)[:, None, None] + draw.integers(0, 176, (size, size, 3))
    return Image.fromarray(stripes.astype(np.uint8))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for part, number in (("train", 16), ("val", 8), ("test", 0)):
        parser.add_argument(f"--{part}", type=int, default=number)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--flat", action="store_true")
    chosen = parser.parse_args()
    drawn = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        for number in range(getattr(chosen, part)):
            label = number % chosen.classes
            folder = chosen.folder / part / ("" if chosen.flat else f"class{label}")
            folder.mkdir(parents=True, exist_ok=True)
            picture(label, chosen.size, drawn).save(folder / f"{number:04}.png")
