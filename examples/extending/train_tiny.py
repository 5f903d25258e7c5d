"""A script for tinytrain as its users write it; holdfast is not mentioned in it."""

from __future__ import annotations

import argparse
import hashlib

import torch
from tinytrain.trainer import Trainer
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    inputs = torch.randn(4_000, 16)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = Trainer(model, torch.optim.AdamW(model.parameters()), loader, torch.nn.functional.mse_loss)
    history = trainer.fit(arguments.epochs)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(history, hashlib.sha256(weights).hexdigest()[:16])


if __name__ == "__main__":
    main()
