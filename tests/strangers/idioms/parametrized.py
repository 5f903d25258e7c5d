"""Weight norm of both kinds, spectral norm, and an embedding that is tied to the output layer."""

import torch
import torch.nn as nn
from torch.nn.utils import parametrizations, spectral_norm


class Tied(nn.Module):
    def __init__(self, vocab=30, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.conv = parametrizations.weight_norm(nn.Conv1d(dim, dim, 3, padding=1))
        self.mix = spectral_norm(nn.Linear(dim, dim))
        self.rotate = parametrizations.orthogonal(nn.Linear(dim, dim, bias=False))
        self.out = nn.Linear(dim, vocab, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h + torch.relu(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return self.out(self.rotate(self.mix(h)))


torch.manual_seed(3)
model = Tied()
nn.init.normal_(model.embed.weight, std=0.2)
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
tokens = torch.randint(0, 30, (200, 10))
for epoch in range(5):
    model.train()
    for batch in torch.utils.data.DataLoader(tokens, batch_size=20, shuffle=True):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 30), batch[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        u = model.mix.weight_u.sum().item()
    print(f"epoch {epoch} loss {loss.item():.6f} u {u:.6f} tied {model.out.weight is model.embed.weight}")
torch.save(model.state_dict(), "tied.pt")
