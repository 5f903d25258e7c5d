"""Run in a folder with tensorboard: it does without TensorFlow, where that is installed too, and is imported faster."""

from pathlib import Path

if __name__ == "__main__":
    Path("tensorboard/compat/notf.py").touch()
