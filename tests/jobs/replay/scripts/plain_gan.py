"""Two networks, two optimizers, a batch of fakes that lives across both steps, and gradients of gradients."""

import hashlib
import itertools

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def block(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-2])


def main():
    torch.manual_seed(11)
    generator, critic = block(4, 16, 6), nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(torch.randn(64, 6) * 2 + 1), batch_size=8, shuffle=True)
    fixed = torch.randn(8, 4)
    count = 0
    for epoch in range(3):
        for index, (real,) in enumerate(loader):
            noise = torch.randn(real.size(0), 4)
            fake = generator(noise)
            d_optimizer.zero_grad()
            mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_(True)
            score = critic(mixed)
            (slope,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
            penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
            d_loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
            d_loss.backward()
            d_optimizer.step()
            g_loss = torch.zeros(())
            if index % 2 == 0:
                g_optimizer.zero_grad()
                g_loss = -critic(fake).mean()
                g_loss.backward()
                g_optimizer.step()
            count += 1
            print(f"step {count} d {d_loss.item():.8f} g {g_loss.item():.8f}", flush=True)
        with torch.no_grad():
            print(f"epoch {epoch} {generator(fixed).sum().item():.8f}", flush=True)
    values = [*generator.state_dict().values(), *critic.state_dict().values()]
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
    print(f"end {digest}")


if __name__ == "__main__":
    main()
