"""An ordinary Lightning script."""

from __future__ import annotations

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from record import Record, of_torch


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Recorder(L.Callback):
    def __init__(self, record: Record) -> None:
        self.record = record

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.record.begin(trainer.global_step + 1, of_torch(pl_module))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.record.end(trainer.global_step, of_torch(pl_module))


torch.set_num_threads(1)
L.seed_everything(7, verbose=False)
x = torch.randn(48, 8)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4, shuffle=True)
record = Record()
model = Net()
trainer = L.Trainer(
    default_root_dir="root",
    accelerator="cpu",
    devices=1,
    max_epochs=3,
    callbacks=[Recorder(record)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=1,
)
trainer.fit(model, loader)
record.close(of_torch(model))
