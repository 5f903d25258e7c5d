"""Backward passes without an optimizer: some train, and some do not."""

import sys

import torch
import torch.nn as nn

F = nn.functional
torch.manual_seed(5)
x = torch.randn(60, 6)
y = x.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def loss_of(inputs=x):
    return F.mse_loss(model(inputs), y)


def module():
    """Parameters of a module, under no_grad, with momentum."""
    speeds = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(12):
        loss = loss_of()
        loss.backward()
        with torch.no_grad():
            for p, speed in zip(model.parameters(), speeds, strict=True):
                speed.mul_(0.9).add_(p.grad)
                p -= 0.05 * speed
                p.grad.zero_()
        print(f"step {step} loss {loss.item():.8f}")


def data():
    """Through .data, in several backward passes a step, by the signs of the gradients."""
    for step in range(12):
        for p in model.parameters():
            p.grad = None
        for part in range(3):
            F.mse_loss(model(x[part * 20 : part * 20 + 20]), y[part * 20 : part * 20 + 20]).backward()
        for p in model.parameters():
            p.data += -0.01 * p.grad.sign()
        print(f"step {step} loss {loss_of().item():.8f}")


def bare():
    """Tensors of no module."""
    global model
    del model
    weight, bias = torch.zeros(6, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    for step in range(12):
        loss = F.mse_loss(x @ weight + bias, y)
        loss.backward()
        with torch.no_grad():
            for p in (weight, bias):
                p.sub_(0.1 * p.grad)
                p.grad.zero_()
        print(f"step {step} loss {loss.item():.8f}")


def foreach():
    """Gradients from torch.autograd.grad, used in place."""
    for step in range(12):
        loss = loss_of()
        slopes = torch.autograd.grad(loss, model.parameters())
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), slopes, alpha=-0.05)
        print(f"step {step} loss {loss.item():.8f}")


def functional():
    """New parameters in each step, and a module that is called with them."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for step in range(12):
        loss = F.mse_loss(torch.func.functional_call(model, weights, x), y)
        slopes = torch.autograd.grad(loss, weights.values())
        weights = {
            name: (p - 0.05 * slope).detach().requires_grad_()
            for (name, p), slope in zip(weights.items(), slopes, strict=True)
        }
        print(f"step {step} loss {loss.item():.8f}")


def innocent():
    """No training at all."""
    image = x.clone().requires_grad_()
    for _ in range(3):  # a saliency map
        loss_of(image).backward()
        print(f"saliency {image.grad.abs().sum().item():.8f}")
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(4):  # an adversarial example
        loss = loss_of(x + delta)
        loss.backward()
        delta.data = (delta + 0.1 * delta.grad.detach().sign()).clamp(-0.3, 0.3)
        delta.grad.zero_()
        print(f"adversarial {loss.item():.8f}")
    for step in range(3):  # does a saliency map depend on the weights?
        model.zero_grad()
        loss_of(image).backward()
        nn.init.normal_(model[0].weight)
        model[2].reset_parameters()
        print(f"random {step} {image.grad.abs().sum().item():.8f}")
    for _ in range(3):  # gradients of inputs, without a backward pass of their own
        (slope,) = torch.autograd.grad(loss_of(image), image)
        print(f"slope {slope.sum().item():.8f}")
    image = x.clone().requires_grad_()
    for _ in range(4):  # an adversarial example, each time a new tensor
        (slope,) = torch.autograd.grad(loss_of(image), image)
        image = (image + 0.1 * slope.sign()).detach().requires_grad_()
        print(f"adversarial {slope.sum().item():.8f}")
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.5, 0.5)
    loss_of().backward()
    print(f"norm {sum(p.grad.norm().item() for p in model.parameters()):.8f}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
