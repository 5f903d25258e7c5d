"""Lightning's starter: checkpoint, early stopping and learning rate callbacks, CSV log; fit, test, predict."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset, random_split


class LitClassifier(L.LightningModule):
    def __init__(self, hidden=24, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(hidden, 3)
        )

    def forward(self, x):
        return self.net(x)

    def _step(self, batch, name):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log(f"{name}_loss", loss, prog_bar=True)
        self.log(f"{name}_acc", (logits.argmax(-1) == y).float().mean())
        return loss

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._step(batch, "val")

    def on_validation_epoch_end(self):
        print(f"epoch {self.current_epoch} val_loss {self.trainer.callback_metrics['val_loss']:.8f}")

    def test_step(self, batch, batch_idx):
        self._step(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


if __name__ == "__main__":
    L.seed_everything(42)
    y = torch.randint(3, (240,))
    x = torch.randn(240, 8) * 1.5
    x[torch.arange(240), y] += 2
    train, val, test = random_split(TensorDataset(x, y), [160, 48, 32], generator=torch.Generator().manual_seed(1))
    checkpoint = ModelCheckpoint(
        dirpath="checkpoints", filename="{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    trainer = L.Trainer(
        max_epochs=12,
        accelerator="cpu",
        callbacks=[
            checkpoint,
            EarlyStopping(monitor="val_loss", patience=3, verbose=True),
            LearningRateMonitor(logging_interval="epoch"),
        ],
        logger=CSVLogger("logs", name="classifier"),
        log_every_n_steps=4,
        enable_progress_bar=False,
    )
    model = LitClassifier()
    trainer.fit(model, DataLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=16))
    print("best", checkpoint.best_model_path.rpartition("/")[2], f"{checkpoint.best_model_score:.8f}")
    trainer.test(model, DataLoader(test, batch_size=16), ckpt_path="best", verbose=False)
    print("test", {name: f"{value:.6f}" for name, value in trainer.callback_metrics.items()})
    predictions = trainer.predict(model, DataLoader(test, batch_size=16), return_predictions=True)
    print("predicted", torch.cat(predictions).tolist())
