"""A LightningModule that draws from generators of its own, one of them in an object that augments its batches."""

import os
import random

import lightning as L
import numpy as np
import torch


class Augment:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.drawn = 0

    def __call__(self, x):
        self.drawn += 1
        return x + 0.1 * float(self.rng.random()) * (-1) ** self.drawn


class Noisy(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.noise = torch.Generator().manual_seed(1)
        self.choices = [random.Random(5), random.Random(6)]
        self.augment = Augment(7)

    def training_step(self, batch, batch_idx):
        x = self.augment(batch[0]) + torch.randn(batch[0].shape, generator=self.noise)
        loss = (self.layer(x) - self.choices[batch_idx % 2].random()).pow(2).mean()
        if batch_idx % 4 == 3:
            print(f"epoch {self.current_epoch} batch {batch_idx} loss {loss.item():.8f} drawn {self.augment.drawn}")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


L.seed_everything(1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
trainer = L.Trainer(
    default_root_dir=os.getcwd(),
    max_epochs=3,
    accelerator="cpu",
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=4,
)
trainer.fit(Noisy(), torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
