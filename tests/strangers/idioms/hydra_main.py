"""hydra.main by hand: a decorator that makes outputs/<date>/<time>, changes into it and leaves config and log there."""

import functools
import logging
import os
import sys
from datetime import datetime
from types import SimpleNamespace

import torch

log = logging.getLogger("train")


def main(config):
    def decorate(task):
        @functools.wraps(task)
        def run():
            cfg = dict(config)
            for arg in sys.argv[1:]:
                key, value = arg.split("=", 1)
                cfg[key] = type(cfg[key])(value)
            now = datetime.now()
            folder = os.path.join("outputs", now.strftime("%Y-%m-%d"), now.strftime("%H-%M-%S-%f"))
            os.makedirs(os.path.join(folder, ".hydra"))
            original = os.getcwd()
            os.chdir(folder)
            try:
                with open(".hydra/config.yaml", "w") as f:
                    f.writelines(f"{key}: {value}\n" for key, value in cfg.items())
                handler = logging.FileHandler("train.log")
                handler.setFormatter(logging.Formatter("[%(levelname)s] - %(message)s"))
                log.setLevel(logging.INFO)
                log.addHandler(handler)
                log.addHandler(logging.StreamHandler(sys.stdout))
                return task(SimpleNamespace(**cfg))
            finally:
                os.chdir(original)

        return run

    return decorate


@main({"lr": 0.05, "epochs": 5, "seed": 3})
def train(cfg):
    torch.manual_seed(cfg.seed)
    x = torch.linspace(-2, 2, 240).unsqueeze(1)
    y = x**3 + 0.2 * torch.randn_like(x)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.8)
    best = float("inf")
    for epoch in range(cfg.epochs):
        losses = []
        for a, b in loader:
            loss = torch.nn.functional.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean = sum(losses) / len(losses)
        log.info("epoch %d loss %.6f", epoch, mean)
        if mean < best:
            best = mean
            torch.save(model.state_dict(), "best.pt")
    model.load_state_dict(torch.load("best.pt"))
    log.info("best %.6f, weights %.6f", best, sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    train()
