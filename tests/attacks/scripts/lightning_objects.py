"""A fit whose hyper-parameters hold what only a pickle can: python lightning_objects.py OUT [trusting|callback]."""

from __future__ import annotations

import functools
import os
import signal
import sys

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Mode:
    """A class of the script's own."""

    def __init__(self, name):
        self.name = name


class Net(L.LightningModule):
    def __init__(self, width, optimizer, mode):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, index):
        if self.global_step == 4 and not os.path.exists(f"{out}/stopped"):
            open(f"{out}/stopped", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())

    def on_load_checkpoint(self, checkpoint):
        print("had", sorted(checkpoint["hyper_parameters"]), checkpoint["hyper_parameters"]["mode"].name)


class Keeps(L.Callback):
    def state_dict(self):
        return {"mode": Mode("kept")}

    def load_state_dict(self, state):
        print("kept", state["mode"].name)


out, *words = sys.argv[1:]
torch.manual_seed(0)
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
    default_root_dir=out,
    callbacks=[Keeps()] if "callback" in words else [],
)
net = Net(4, functools.partial(torch.optim.Adam, lr=0.1), Mode("a"))
options = {"weights_only": False} if "trusting" in words else {}
trainer.fit(net, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4), **options)
print("sum", sum(parameter.double().sum().item() for parameter in net.parameters()))
