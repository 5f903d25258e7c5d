"""WGAN-GP: five critic steps with autograd.grad(create_graph=True) for each step of the generator."""

import torch
from torch import autograd, nn, optim

torch.manual_seed(1)
DIM, LAMBDA, CRITIC_ITERS, BATCH = 16, 0.1, 5, 32
netG = nn.Sequential(nn.Linear(2, DIM), nn.ReLU(True), nn.Linear(DIM, 2))
netD = nn.Sequential(nn.Linear(2, DIM), nn.LeakyReLU(0.1), nn.Linear(DIM, DIM), nn.LeakyReLU(0.1), nn.Linear(DIM, 1))
optimizerD = optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizerG = optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
one = torch.tensor(1.0)


def inf_train_gen():
    while True:
        theta = 6.28318 * torch.rand(BATCH)
        yield torch.stack([theta.cos(), theta.sin()], 1) + 0.02 * torch.randn(BATCH, 2)


def calc_gradient_penalty(netD, real_data, fake_data):
    alpha = torch.rand(BATCH, 1).expand(real_data.size())
    interpolates = autograd.Variable(alpha * real_data + (1 - alpha) * fake_data, requires_grad=True)
    disc = netD(interpolates)
    gradients = autograd.grad(
        outputs=disc,
        inputs=interpolates,
        grad_outputs=torch.ones(disc.size()),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


data = inf_train_gen()
for iteration in range(30):
    for p in netD.parameters():
        p.requires_grad = True
    for iter_d in range(CRITIC_ITERS):
        real_data = next(data)
        netD.zero_grad()
        D_real = netD(real_data).mean()
        D_real.backward(-one)
        with torch.no_grad():
            noise = torch.randn(BATCH, 2)
        fake = netG(noise).detach()
        D_fake = netD(fake).mean()
        D_fake.backward(one)
        gradient_penalty = calc_gradient_penalty(netD, real_data, fake)
        gradient_penalty.backward()
        Wasserstein_D = D_real - D_fake
        optimizerD.step()
    for p in netD.parameters():
        p.requires_grad = False
    netG.zero_grad()
    G = netD(netG(torch.randn(BATCH, 2))).mean()
    G.backward(-one)
    optimizerG.step()
    if iteration % 5 == 4:
        print(f"{iteration} W {Wasserstein_D.item():.6f} GP {gradient_penalty.item():.6f} G {G.item():.6f}")
torch.save(netG.state_dict(), "netG.pt")
