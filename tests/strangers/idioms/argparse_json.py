"""argparse with --seed and --out, a summary.json with the arguments, curves and git-like run id at the end."""

import argparse
import hashlib
import json
import pathlib
import random

import numpy as np
import torch


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


def run(args):
    set_seed(args.seed)
    x = torch.from_numpy(np.random.randn(256, args.features).astype("float32"))
    y = torch.from_numpy(np.random.randint(0, 2, 256))
    model = torch.nn.Sequential(torch.nn.Linear(args.features, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.lr)
    curve = []
    order = np.arange(256)
    for epoch in range(args.epochs):
        np.random.shuffle(order)
        accs = []
        for start in range(0, 256, args.batch_size):
            idx = order[start : start + args.batch_size]
            out = model(x[idx])
            loss = torch.nn.functional.cross_entropy(out, y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accs.append((out.argmax(1) == y[idx]).numpy().mean())
        curve.append({"epoch": epoch, "loss": loss.item(), "acc": float(np.mean(accs))})
        print(json.dumps(curve[-1]))
    return model, curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--features", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--optimizer", default="Adam")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args = parser.parse_args()
    run_id = hashlib.md5(json.dumps(vars(args), default=str).encode()).hexdigest()[:6]
    model, curve = run(args)
    folder = args.out / run_id
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")
    summary = {"args": {k: str(v) for k, v in vars(args).items()}, "curve": curve, "final": curve[-1]["loss"]}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    print("wrote", folder / "summary.json")
