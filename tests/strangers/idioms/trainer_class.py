"""A home-made Trainer: self.global_step, callbacks in a list, hooks by name, a plain config object."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    lr: float = 0.01
    max_steps: int = 110
    log_every: int = 20
    eval_every: int = 25
    hidden: list = field(default_factory=lambda: [24, 12])


class Callback:
    def on_step(self, trainer):
        pass

    def on_eval(self, trainer, metrics):
        pass


class Printer(Callback):
    def on_step(self, trainer):
        if trainer.global_step % trainer.config.log_every == 0:
            print(f"step {trainer.global_step} epoch {trainer.epoch} loss {trainer.smoothed:.6f}")

    def on_eval(self, trainer, metrics):
        print("eval", trainer.global_step, {k: round(v, 6) for k, v in metrics.items()})


class BestKeeper(Callback):
    def __init__(self):
        self.best, self.state = None, None

    def on_eval(self, trainer, metrics):
        if self.best is None or metrics["mse"] < self.best:
            self.best = metrics["mse"]
            self.state = {k: v.clone() for k, v in trainer.model.state_dict().items()}


class Trainer:
    def __init__(self, config, callbacks):
        self.config, self.callbacks = config, callbacks
        torch.manual_seed(0)
        x = torch.rand(300, 6)
        y = (x[:, :3] * x[:, 3:]).sum(1, keepdim=True)
        self.train_loader = DataLoader(TensorDataset(x[:240], y[:240]), 24, shuffle=True)
        self.val = x[240:], y[240:]
        sizes = [6, *config.hidden, 1]
        layers = []
        for a, b in zip(sizes, sizes[1:]):
            layers += [nn.Linear(a, b), nn.Tanh()]
        self.model = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        self.global_step = self.epoch = 0
        self.smoothed = None

    def call(self, hook, *args):
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    def train_step(self, batch):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        value = loss.item()
        self.smoothed = value if self.smoothed is None else 0.9 * self.smoothed + 0.1 * value

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        error = self.model(self.val[0]) - self.val[1]
        self.call("on_eval", {"mse": error.square().mean().item(), "mae": error.abs().mean().item()})
        self.model.train()

    def fit(self):
        while True:
            for batch in self.train_loader:
                self.train_step(batch)
                self.global_step += 1
                self.call("on_step")
                if self.global_step % self.config.eval_every == 0:
                    self.evaluate()
                if self.global_step >= self.config.max_steps:
                    return
            self.epoch += 1


keeper = BestKeeper()
trainer = Trainer(Config(), [Printer(), keeper])
trainer.fit()
trainer.model.load_state_dict(keeper.state)
trainer.evaluate()
print("best", keeper.best)
