"""A launcher that sets sys.argv and runs another file by runpy.run_path, as debuggers and profilers do."""

import runpy
import sys
import textwrap

TRAIN = """
import sys
import torch
torch.manual_seed(int(sys.argv[1]))
w = torch.nn.Parameter(torch.randn(5, 3))
optimizer = torch.optim.Adam([w], lr=0.02)
a = torch.randn(40, 5)
b = torch.randn(40, 3)
history = []
def main():
    for it in range(100):
        keep = torch.rand(40) < 0.8
        loss = ((a @ w - b)[keep] ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        if it % 25 == 24:
            print(it, sum(history[-25:]) / 25)
main()
"""

if __name__ == "__main__":
    with open("real_train.py", "w") as f:
        f.write(textwrap.dedent(TRAIN))
    sys.argv = ["real_train.py", "5"]
    result = runpy.run_path("real_train.py", run_name="__main__")
    print("weights", result["w"].sum().item(), "entries", len(result["history"]))
