"""Early stopping by a score that another library calculates from all predictions in one go."""

import argparse
import hashlib

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def score_of(guesses, truth):
    """As a library would: it gets at the memory of tensors in its own way."""
    return float(np.corrcoef(np.from_dlpack(guesses), np.from_dlpack(truth))[0, 1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--track", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(8)
    x = torch.randn(args.rows, 5)
    y = x.sum(1).tanh() + 0.2 * torch.randn(args.rows)
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    state = {"best": -1.0, "bad": 0}
    if args.track:
        import holdfast

        holdfast.track(state)
    for epoch in range(args.epochs):
        model.train()
        for a, b in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            score = score_of(model(x), y)
        if args.track:
            score = holdfast.track(score)
        state["bad"] = 0 if score > state["best"] + 0.01 else state["bad"] + 1
        state["best"] = max(state["best"], score)
        print(f"epoch {epoch} loss {loss.item():.8f} score {score:.8f} best {state['best']:.8f}", flush=True)
        if state["bad"] == 2:
            print(f"stopped after {epoch}", flush=True)
            break
    if args.quiet:
        return
    values = model.state_dict().values()
    print(f"end {hashlib.sha256(b''.join(value.numpy().tobytes() for value in values)).hexdigest()}")


if __name__ == "__main__":
    main()
