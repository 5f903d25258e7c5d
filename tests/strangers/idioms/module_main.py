"""``python -m project.train``: a package with relative imports, whose __main__ block calls main(argv)."""

import argparse
import sys

import torch
from torch import nn

try:
    from .models import build
except ImportError:

    def build(width):
        return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def get_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120)
    return parser


def main(argv=None):
    args = get_parser().parse_args(argv)
    torch.manual_seed(args.width)
    model = build(args.width)
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(args.steps):
        x = torch.rand(32, 4)
        loss = (model(x).squeeze(1) - x.prod(1)).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            print("step", step, "loss", loss.item())
    print("done", __name__, __package__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
