"""pytorch/examples' dcgan: two optimizers, real and fake labels, fixed noise, a sample image written each epoch."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim

manualSeed = 17
random.seed(manualSeed)
torch.manual_seed(manualSeed)
nz = 8


def weights_init(m):
    if m.__class__.__name__.find("Linear") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.2)
        torch.nn.init.zeros_(m.bias)


netG = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(True), nn.Linear(32, 16), nn.Tanh())
netD = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1), nn.Sigmoid())
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, nz)
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
real_data = torch.sin(torch.linspace(0, 6, 16)) + 0.1 * torch.randn(160, 16)
dataloader = torch.utils.data.DataLoader(real_data, batch_size=16, shuffle=True)

for epoch in range(4):
    for i, data in enumerate(dataloader, 0):
        netD.zero_grad()
        label = torch.full((data.size(0),), 1.0)
        output = netD(data).view(-1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        noise = torch.randn(data.size(0), nz)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach()).view(-1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()

        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake).view(-1)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()
        if i % 3 == 0:
            print(
                f"[{epoch}/4][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} "
                f"D(x): {D_x:.4f} D(G(z)): {D_G_z1:.4f} / {D_G_z2:.4f}"
            )
    with torch.no_grad():
        np.save(f"fake_samples_epoch_{epoch:03d}.npy", netG(fixed_noise).numpy())
    torch.save(netG.state_dict(), f"netG_epoch_{epoch}.pth")
    torch.save(netD.state_dict(), f"netD_epoch_{epoch}.pth")
