"""A corpus of sentences with a simple grammar: ``text_corpus.py FILE [LINES [LAST_LINE]]``."""

import random
import sys
from pathlib import Path

SUBJECTS = ["the worker", "a loader", "the model", "one rank", "the scheduler", "a checkpoint"]
VERBS = ["reads", "writes", "follows", "waits for", "begins", "ends"]
OBJECTS = ["a batch", "the next step", "its shard", "all of the others", "the signal", "an epoch"]

if __name__ == "__main__":
    path, lines = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300
    draw = random.Random(f"{path.name} {lines}")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (" ".join(draw.choice(words) for words in (SUBJECTS, VERBS, OBJECTS)) for _ in range(lines))
    path.write_text("".join(f" {line} .\n" for line in (*text, *sys.argv[3:])))
