"""Lightning's tutorial on large models: the ``Transformer`` and ``WikiText2`` of ``lightning.pytorch.demos``."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer, WikiText2
from torch.utils.data import DataLoader, random_split


class LanguageDataModule(L.LightningDataModule):
    def prepare_data(self):
        WikiText2(download=True)

    def setup(self, stage):
        dataset = WikiText2()
        self.vocab_size = dataset.vocab_size
        generator = torch.Generator().manual_seed(42)
        self.train, self.val = random_split(dataset, [len(dataset) - 16, 16], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


class LanguageModel(L.LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size, nlayers=1, nhid=32, ninp=16, nhead=2)

    def training_step(self, batch):
        input, target = batch
        output = self.model(input, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch):
        input, target = batch
        self.log("val_loss", F.nll_loss(self.model(input, target), target.view(-1)))

    def on_validation_epoch_end(self):
        print(f"epoch {self.current_epoch} val_loss {self.trainer.callback_metrics['val_loss']:.8f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    L.seed_everything(42)
    data = LanguageDataModule()
    data.prepare_data()
    data.setup("fit")
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=3, gradient_clip_val=0.25, val_check_interval=0.5, enable_progress_bar=False
    )
    trainer.fit(LanguageModel(data.vocab_size), datamodule=data)
