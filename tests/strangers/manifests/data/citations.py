"""A graph of papers in the format of Cora: ``citations.py FOLDER [PAPERS]``."""

import random
import sys
from pathlib import Path

WORDS, CLASSES = 120, 4

if __name__ == "__main__":
    folder, papers = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1900
    folder.mkdir(parents=True)
    draw = random.Random(0)
    classes = [draw.randrange(CLASSES) for _ in range(papers)]
    with (folder / "cora.content").open("w") as file:
        for paper, label in enumerate(classes):
            words = [int(draw.random() < (0.2 if word % CLASSES == label else 0.03)) for word in range(WORDS)]
            file.write("\t".join([str(1000 + paper), *map(str, words), f"Class_{label}"]) + "\n")
    with (folder / "cora.cites").open("w") as file:
        pairs = {tuple(draw.sample(range(papers), 2)) for _ in range(4 * papers)}
        for one, other in sorted(pairs):
            if classes[one] == classes[other] or draw.random() < 0.1:
                file.write(f"{1000 + one}\t{1000 + other}\n")
