"""Writes the text that the demos of Lightning would download."""

import os
import random

draw = random.Random(0)
words = "the of and in to was game song first born city river film year king league north album".split()
os.makedirs("data", exist_ok=True)
with open("data/wikitext-2.txt", "w") as file:
    for _ in range(200):
        start = draw.randrange(len(words))
        file.write(" ".join(words[(start + 5 * k + draw.randrange(2)) % len(words)] for k in range(18)) + " .\n")
