"""A link `latest` switched at each checkpoint, temporary files renamed, `from os import remove`, tar, bytes paths.

What the script looks up by path, by name in `os`, in an open folder and through a link is one and the same file.
"""

import glob
import io
import os
import shutil
import tarfile
import tempfile
from os import remove

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(128, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

os.makedirs("first-epoch")
os.makedirs("checkpoints")
folder = os.open("checkpoints", os.O_RDONLY)
step, best = 0, float("inf")
for epoch in range(3):
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if loss.item() < best:
            best = loss.item()
            with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
                file.write(f"{step} {best:.6f}\n")
            os.replace(file.name, "best.txt")
        if step % 4 == 0:
            made = f"checkpoints/step-{step}"
            os.makedirs(made)
            torch.save({"step": step, "model": model.state_dict()}, f"{made}/model.pt")
            with open(os.fsencode(f"{made}/step.txt"), "wb") as file:
                file.write(b"%d" % step)
            for old in sorted(glob.glob("checkpoints/step-*"), key=lambda path: int(path.rpartition("-")[2]))[:-2]:
                shutil.rmtree(old)
            if os.path.lexists("latest"):
                remove("latest")
            os.symlink(made, "latest")
            with open("latest/step.txt") as file:
                assert file.read() == str(step)
            assert torch.load("latest/model.pt")["step"] == step
            os.close(os.open("marker", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=folder))
            os.rename("marker", f"marker-{step}", src_dir_fd=folder, dst_dir_fd=folder)
            if step > 4:
                os.unlink(f"marker-{step - 4}", dir_fd=folder)
    shutil.copytree("checkpoints", f"snapshot-{epoch}")
    if epoch:
        shutil.move(f"snapshot-{epoch - 1}", f"moved-{epoch - 1}")
    else:
        shutil.rmtree("first-epoch")
    with tarfile.open("steps.tar", "a") as tar:
        text = str(step).encode()
        member = tarfile.TarInfo(f"epoch-{epoch}")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
print(f"best {best:.6f}", sorted(os.listdir("checkpoints")))
