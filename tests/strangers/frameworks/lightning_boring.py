"""Bug report templates for Lightning: ``BoringModel`` and ``BoringDataModule`` of ``lightning.pytorch.demos``."""

import os

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Reported(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", super().validation_step(batch, batch_idx)["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} {self.trainer.callback_metrics['train_loss']:.8f}")


def run():
    seed_everything(1)
    model = Reported()
    trainer = Trainer(
        default_root_dir=os.getcwd(),
        limit_train_batches=32,
        limit_val_batches=4,
        limit_test_batches=4,
        num_sanity_val_steps=0,
        max_epochs=4,
        accelerator="cpu",
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    data = BoringDataModule()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    print(f"weight {model.layer.weight.double().sum().item():.12f}")


if __name__ == "__main__":
    run()
