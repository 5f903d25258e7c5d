"""Lightning's GAN tutorial: manual optimization with two optimizers that take turns, samples at each epoch's end."""

import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Signals(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(4)
        phase = torch.rand(200, 1, generator=generator)
        self.data = torch.utils.data.TensorDataset(torch.sin(6 * (torch.linspace(0, 1, 16) + phase)))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=10, shuffle=True)


class GAN(L.LightningModule):
    def __init__(self, latent_dim=6, lr=0.002, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 24), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(24, 1))
        self.validation_z = torch.randn(4, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(real.shape[0], self.hparams.latent_dim).type_as(real)
        ones, zeros = torch.ones(real.size(0), 1), torch.zeros(real.size(0), 1)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), ones)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(real), ones)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), zeros)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        betas = (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas)
        return [opt_g, opt_d], []

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics
        print(f"epoch {self.current_epoch} g_loss {metrics['g_loss']:.8f} d_loss {metrics['d_loss']:.8f}")
        with torch.no_grad():
            np.save(f"samples-{self.current_epoch}.npy", self(self.validation_z).numpy())


L.seed_everything(7)
trainer = L.Trainer(accelerator="cpu", max_epochs=4, enable_progress_bar=False)
trainer.fit(GAN(), Signals())
