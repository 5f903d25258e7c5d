"""Loops that look at gradients between the backward pass and the step, or inside of it, one each."""

import argparse
import functools
import hashlib
import random

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

F = nn.functional


def made(seed=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 3))
    x = torch.randn(60, 6)
    return model, x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def rows(x, y):
    places = torch.randint(len(x), (8,))
    return x[places], y[places]


def clamped():
    """The DQN tutorial: a policy and a target network, a memory, a loss module, gradients clamped by hand."""
    torch.manual_seed(2)
    random.seed(2)
    policy, target = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    target.load_state_dict(policy.state_dict())
    criterion = nn.SmoothL1Loss()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, amsgrad=True)
    memory, state = [], torch.randn(1, 4)
    for step in range(24):
        with torch.no_grad():
            action = policy(state).max(1).indices.view(1, 1) if random.random() > 0.3 else torch.tensor([[step % 2]])
        after = state.roll(int(action.item()) + 1, 1) + 0.1 * torch.randn(1, 4)
        memory.append((state, action, after, after.sum().view(1)))
        state = after
        states, actions, others, rewards = (torch.cat(part) for part in zip(*random.choices(memory, k=6), strict=True))
        values = policy(states).gather(1, actions)
        with torch.no_grad():
            expected = rewards + 0.9 * target(others).max(1).values
        loss = criterion(values, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        for parameter in policy.parameters():
            parameter.grad.data.clamp_(-0.1, 0.1)
        nn.utils.clip_grad_value_(policy.parameters(), 0.05)
        optimizer.step()
        weights = target.state_dict()
        for name, value in policy.state_dict().items():
            weights[name] = value * 0.05 + weights[name] * 0.95
        target.load_state_dict(weights)
        print(f"step {step} loss {loss.item():.8f} action {action.item()}")
    return policy


def norms():
    """Norms of gradients in the log, of the parameters that have any; layers that thaw; a part that nobody uses."""
    model, x, y = made()
    model.unused = nn.Linear(1, 1)
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    for step in range(20):
        if step == 6:
            for parameter in model[0].parameters():
                parameter.requires_grad_(True)
        a, b = rows(x, y)
        loss = criterion(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        found = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
        total = sum(value**2 for value in found.values()) ** 0.5
        optimizer.step()
        print(f"step {step} loss {loss.item():.8f} norm {total:.8f} of {' '.join(found)}")
    return model


def fused():
    """An optimizer for each parameter, which steps in the middle of the backward pass."""
    model, x, y = made()
    optimizers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}
    seen = []

    def step_now(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        seen.append(tuple(parameter.shape))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for step in range(20):
        a, b = rows(x, y)
        loss = nn.CrossEntropyLoss()(model(a), b)
        loss.backward()
        print(f"step {step} loss {loss.item():.8f} {len(seen)} {seen[-4:]}")
    return model


def fused_rnn():
    """The same with several modules, one of which has many parameters in one node; norms that hooks read."""
    torch.manual_seed(2)
    model = nn.ModuleList([nn.Embedding(12, 6), nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 12)])
    optimizers = {p: torch.optim.Adam([p], lr=1e-2, foreach=False) for p in model.parameters()}
    norms = {}

    def step_now(name, parameter):
        norms[name] = norms.get(name, 0.0) * 0.9 + parameter.grad.norm().item()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(step_now, name))
    for step in range(20):
        words = torch.randint(12, (4, 6))
        hidden, _ = model[1](model[0](words[:, :-1]))
        hidden.register_hook(lambda grad: norms.update(hidden=grad.norm().item()))
        loss = nn.CrossEntropyLoss()(model[2](hidden).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        print(f"step {step} loss {loss.item():.8f} {' '.join(f'{name} {norm:.8f}' for name, norm in norms.items())}")
    return model


def penalty():
    """WGAN-GP: the norm of a gradient is a part of the loss."""
    model, x, _ = made()
    generator = nn.Linear(3, 6)
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model, generator)]
    for step in range(16):
        real, fake = x[torch.randint(60, (8,))], generator(torch.randn(8, 3)).detach()
        mixed = (real + torch.rand(8, 1) * (fake - real)).requires_grad_()
        out = model(mixed)
        (slope,) = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True)
        loss = model(fake).mean() - model(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        optimizers[0].zero_grad()
        loss.backward()
        size = sum(p.grad.abs().sum().item() for p in model.parameters())
        optimizers[0].step()
        loss = -model(generator(torch.randn(8, 3))).mean()
        optimizers[1].zero_grad()
        loss.backward()
        size += sum(p.grad.abs().sum().item() for p in generator.parameters())
        optimizers[1].step()
        print(f"step {step} loss {loss.item():.8f} size {size:.6f}")
    return model


def features():
    """A network that is not trained between two that are, and one that gets no gradient through a detached answer."""
    model, x, y = made()
    frozen = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True)).requires_grad_(False)
    head, critic = nn.Linear(5, 3), nn.Linear(5, 1)
    optimizer = torch.optim.SGD([p for part in (model, head, critic) for p in part.parameters()], lr=0.05)
    for step in range(16):
        a, b = rows(x, y)
        fixed = frozen(a[:, :3])
        hidden = frozen(model(a))
        optimizer.zero_grad()
        value = F.mse_loss(critic(hidden.detach()), fixed.mean(1, keepdim=True))
        value.backward()
        there = [p.grad is not None for part in (model, head, critic) for p in part.parameters()]
        loss = nn.CrossEntropyLoss()(head(hidden), b)
        loss.backward()
        size = sum(p.grad.norm().item() for part in (model, head, critic) for p in part.parameters())
        optimizer.step()
        print(f"step {step} loss {loss.item():.8f} {value.item():.8f} size {size:.6f} {sum(there)}")
    return model


def hooked():
    """Hooks on parameters and on answers of modules, and a gradient of an answer that is kept."""
    model, x, y = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: (calls.append(name), grad * 0.5)[1])
    for step in range(16):
        a, b = rows(x, y)
        out = model(a)
        out.retain_grad()
        out.register_hook(lambda grad: calls.append("out"))
        loss = nn.CrossEntropyLoss()(out, b)
        optimizer.zero_grad()
        loss.backward()
        size = out.grad.norm().item()
        optimizer.step()
        print(f"step {step} loss {loss.item():.8f} {size:.8f} {len(calls)} {' '.join(calls[-5:])}")
    return model


def leftover():
    """Gradients that are looked at after the step, and never quite cleared."""
    model, x, y = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(16):
        a, b = rows(x, y)
        loss = nn.CrossEntropyLoss()(model(a), b)
        loss.backward()
        optimizer.step()
        size = sum(p.grad.norm().item() for p in model.parameters())
        print(f"step {step} loss {loss.item():.8f} {size:.8f}")
        for parameter in model.parameters():
            parameter.grad *= 0.5
    return model


class Blocks(nn.Module):
    """Recomputes its blocks in the backward pass."""

    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        for part in self.inner:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def recomputed(reentrant=False):
    """Gradient checkpointing inside of a model and around modules that the script calls."""
    model, x, y = made()
    blocks, first = Blocks(model, reentrant), nn.Linear(6, 6)
    optimizer = torch.optim.AdamW([*blocks.parameters(), *first.parameters()], lr=1e-2)
    for step in range(16):
        a, b = rows(x, y)
        a.requires_grad_(reentrant)
        loss = nn.CrossEntropyLoss()(blocks(checkpoint(first, a, use_reentrant=reentrant)), b)
        optimizer.zero_grad()
        loss.backward()
        norms = [p.grad.norm().item() for p in (*blocks.parameters(), *first.parameters())]
        optimizer.step()
        print(f"step {step} loss {loss.item():.8f} norm {sum(norms):.8f}")
    return blocks


def reentrant():
    """The older kind of checkpointing."""
    return recomputed(reentrant=True)


def compiled_by(compiler):
    model, x, y = made()
    fast = compiler(model, x[:8])
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(fast.parameters(), lr=1e-2)
    for step in range(16):
        a, b = rows(x, y)
        out = fast(a)
        loss = loss_of(out, b)
        optimizer.zero_grad()
        loss.backward()
        norm = sum(p.grad.norm().item() for p in fast.parameters())
        optimizer.step()
        if step % 5 == 4:
            fast.eval()
            with torch.no_grad():
                print(f"held out {loss_of(fast(x), y).item():.8f}")
            fast.train()
        print(f"step {step} loss {loss.item():.8f} norm {norm:.8f}")
    return fast


def scripted():
    """torch.jit.script, of a model and of a function."""
    return compiled_by(lambda model, _: torch.jit.script(model))


def traced():
    """torch.jit.trace."""
    return compiled_by(lambda model, example: torch.jit.trace(model.eval(), example).train())


def functional():
    """torch.func: one step by functional_call in an inner loop, one by a transform."""
    model, x, y = made()
    model[2].p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(parameters, a, b):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (a,)), b)

    for step in range(16):
        a, b = rows(x, y)
        fast = dict(model.named_parameters())
        slopes = torch.autograd.grad(loss_of(fast, a, b), tuple(fast.values()), create_graph=True)
        fast = {name: value - 0.1 * slope for (name, value), slope in zip(fast.items(), slopes, strict=True)}
        loss = loss_of(fast, *rows(x, y))
        optimizer.zero_grad()
        loss.backward()
        before = sum(p.grad.norm().item() for p in model.parameters())
        slopes = torch.func.grad(loss_of)({name: p.detach() for name, p in model.named_parameters()}, a, b)
        for name, parameter in model.named_parameters():
            parameter.grad += slopes[name]
        optimizer.step()
        print(f"step {step} loss {loss.item():.8f} norm {before:.8f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    trained = globals()[parser.parse_args().kind]()
    values = trained.state_dict().values()
    print(f"end {hashlib.sha256(b''.join(value.numpy().tobytes() for value in values)).hexdigest()}")
