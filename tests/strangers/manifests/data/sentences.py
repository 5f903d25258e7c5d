"""A data set of sentences as JSON lines or CSV: ``sentences.py FILE KIND [ROWS]``.

KIND ``text``: sentences; ``classes``: a sentence and its label; ``completion``: prompt and completion; ``preference``:
prompt, chosen and rejected.
"""

import csv
import json
import random
import sys
from pathlib import Path

from text_corpus import OBJECTS, SUBJECTS, VERBS


def row(kind: str, draw: random.Random) -> dict[str, str | int]:
    """One of them."""
    subject, verb, thing, other = (draw.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, OBJECTS))
    if kind == "text":
        return {"text": f"{subject} {verb} {thing} ."}
    if kind == "classes":
        return {"sentence": f"{subject} {verb} {thing} .", "label": int(verb in VERBS[:3])}
    if kind == "completion":
        return {"prompt": f"{subject} {verb}", "completion": f" {thing} ."}
    return {"prompt": f"{subject} {verb}", "chosen": f" {thing} .", "rejected": f" {other} : {other}"}


if __name__ == "__main__":
    path, kind, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 64
    draw = random.Random(f"{path.name} {kind}")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row(kind, draw) for _ in range(number)]
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(each) + "\n" for each in rows)
