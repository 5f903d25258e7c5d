"""Mean teacher and distillation: a teacher that follows the student by EMA, a consistency weight that ramps up."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(27)
labelled = torch.randn(40, 6)
labels = (labelled[:, 0] > 0).long()
unlabelled = torch.randn(320, 6)
student = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 2))
teacher = copy.deepcopy(student)
for param in teacher.parameters():
    param.detach_()
optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)


def update_ema_variables(model, ema_model, alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for ema_param, param in zip(ema_model.parameters(), model.parameters()):
        ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


unlabelled_loader = torch.utils.data.DataLoader(unlabelled, batch_size=32, shuffle=True)
labelled_loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(labelled, labels), batch_size=8, shuffle=True
)
global_step = 0
for epoch in range(8):
    labelled_iter = iter(labelled_loader)
    student.train()
    teacher.train()
    meter = []
    for u in unlabelled_loader:
        try:
            x, y = next(labelled_iter)
        except StopIteration:
            labelled_iter = iter(labelled_loader)
            x, y = next(labelled_iter)
        logits = student(torch.cat([x, u + 0.1 * torch.randn_like(u)]))
        with torch.no_grad():
            soft = F.softmax(teacher(u + 0.1 * torch.randn_like(u)) / 2.0, dim=1)
        weight = 5 * math.exp(-5 * (1 - min(1, global_step / 50)) ** 2)
        consistency = F.kl_div(F.log_softmax(logits[8:] / 2.0, dim=1), soft, reduction="batchmean")
        loss = F.cross_entropy(logits[:8], y) + weight * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        global_step += 1
        update_ema_variables(student, teacher, 0.95, global_step)
        meter.append([loss.item(), consistency.item()])
    teacher.eval()
    with torch.no_grad():
        acc = (teacher(unlabelled).argmax(1) == (unlabelled[:, 0] > 0)).float().mean().item()
    loss_mean, cons_mean = torch.tensor(meter).mean(0).tolist()
    print(f"epoch {epoch} loss {loss_mean:.6f} consistency {cons_mean:.6f} teacher acc {acc:.4f}")
