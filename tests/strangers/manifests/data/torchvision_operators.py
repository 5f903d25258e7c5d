"""Run in a folder with torchvision: its import works beside a torch of another build, without its C++ operators.

The wheel's C++ library is linked against CUDA. Where it does not load, the operators are declared and have no
implementation; data sets, transforms and models without them work.
"""

from pathlib import Path

DECLARED = """
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

if __name__ == "__main__":
    path = Path("torchvision/extension.py")
    path.write_text(path.read_text() + DECLARED)
