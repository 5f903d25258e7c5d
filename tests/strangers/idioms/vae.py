"""pytorch/examples' vae: reparameterisation by randn_like, train and test functions, a sample written each epoch."""

import os

import torch
from torch import nn, optim
from torch.nn import functional as F

torch.manual_seed(1)
os.makedirs("results", exist_ok=True)
images = torch.sigmoid(3 * torch.randn(240, 1, 6, 6).cumsum(2))
train_loader = torch.utils.data.DataLoader(images[:192], batch_size=16, shuffle=True)
test_loader = torch.utils.data.DataLoader(images[192:], batch_size=16, shuffle=False)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(36, 20)
        self.fc21 = nn.Linear(20, 4)
        self.fc22 = nn.Linear(20, 4)
        self.fc3 = nn.Linear(4, 20)
        self.fc4 = nn.Linear(20, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 36))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=5e-3)


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, data in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % 4 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/192] Loss: {loss.item() / len(data):.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / 192:.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for i, data in enumerate(test_loader):
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
            if i == 0:
                torch.save(torch.cat([data[:4].view(-1, 36), recon_batch[:4]]), f"results/reconstruction_{epoch}.pt")
    print(f"====> Test set loss: {test_loss / 48:.4f}")


for epoch in range(1, 5):
    train(epoch)
    test(epoch)
    with torch.no_grad():
        sample = model.decode(torch.randn(1024, 4))
        torch.save(sample, f"results/sample_{epoch}.pt")
