"""try/except KeyboardInterrupt and a finally that saves, atexit for the log, sys.exit(main()) with a code."""

import atexit
import sys

import torch
import torch.nn as nn

lines = []


@atexit.register
def write_log():
    with open("run.txt", "w") as f:
        f.write("\n".join(lines) + "\n")


def main():
    torch.manual_seed(33)
    x = torch.randn(128, 3)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.05)
    epoch = -1
    try:
        for epoch in range(10):
            for batch in x[torch.randperm(128)].split(16):
                optimizer.zero_grad()
                loss = (model(batch) - batch.sort(1).values).square().mean()
                loss.backward()
                optimizer.step()
            lines.append(f"{epoch} {loss.item():.6f}")
            print(lines[-1])
    except KeyboardInterrupt:
        print("-" * 20)
        print("Exiting from training early")
    finally:
        if epoch == 9:
            torch.save(model.state_dict(), "final.pt")
    return 0 if epoch == 9 else 3


if __name__ == "__main__":
    sys.exit(main())
