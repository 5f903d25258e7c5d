"""The configuration of a small UNet2DModel: ``tiny_unet.py FILE [SIZE]``."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    config = {
        "_class_name": "UNet2DModel",
        "sample_size": int(sys.argv[2]) if len(sys.argv) > 2 else 16,
        "block_out_channels": [8, 16],
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "attention_head_dim": 4,
    }
    Path(sys.argv[1]).write_text(json.dumps(config))
