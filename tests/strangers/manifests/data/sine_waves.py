"""Sine waves with random phases as ``torch.save`` writes them: ``sine_waves.py FILE [WAVES [LENGTH]]``."""

import sys

import numpy as np
import torch

if __name__ == "__main__":
    waves, length = (*map(int, sys.argv[2:]), *(20, 100)[len(sys.argv) - 2 :])
    phases = np.random.default_rng(2).integers(-80, 80, (waves, 1))
    torch.save(np.sin((np.arange(length) + phases) / 20), sys.argv[1])
