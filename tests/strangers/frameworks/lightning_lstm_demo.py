"""Lightning's truncated backpropagation: ``LightningLSTM`` of its demos, with a hidden state across batches."""

import lightning as L
import torch
from lightning.pytorch.demos.lstm import LightningLSTM, SequenceSampler, SimpleLSTM
from lightning.pytorch.demos.transformer import WikiText2
from torch.utils.data import DataLoader


class SmallLSTM(LightningLSTM):
    def __init__(self, vocab_size):
        super().__init__(vocab_size=8)
        self.model = SimpleLSTM(vocab_size=vocab_size, ninp=16, nhid=16, nlayers=2)

    def train_dataloader(self):
        dataset = WikiText2()
        return DataLoader(dataset, batch_sampler=SequenceSampler(dataset, batch_size=4))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} train_loss {self.trainer.callback_metrics['train_loss']:.8f}")
        super().on_train_epoch_end()


L.seed_everything(3)
model = SmallLSTM(WikiText2().vocab_size)
L.Trainer(accelerator="cpu", max_epochs=3, enable_progress_bar=False).fit(model)
