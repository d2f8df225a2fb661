"""Do networks that were trained on few images copy them?

PYTHONPATH=docs/comparison python docs/comparison/equal_cost/copies.py STUDY RUN...

Adds to STUDY.csv the share of samples that are nearer to a training image than to a held-out one,
by the distance of pixels. There are n training images, and n held-out ones are drawn, 20 times.
Prints this share for held-out images in the place of samples, which copy nothing.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from page import arm_of

from tread_zoo.data.dataset import ImageData
from tread_zoo.registry import create

SAMPLES, DRAWS = 500, 20


def share_of_copies(samples: torch.Tensor, train: torch.Tensor, others: torch.Tensor) -> float:
    """Return the share of samples that are nearer to an image of `train` than to one of `others`.
    All are [N, ...] with the same number of pixels."""
    near = [torch.cdist(samples.flatten(1), of.flatten(1)).amin(dim=1) for of in (train, others)]
    return float((near[0] < near[1]).float().mean())


def main(study: str, *runs: str) -> None:
    file = Path(__file__).with_name(f"{study}.csv")
    table = pd.read_csv(file)
    for run in map(Path, runs):
        config = json.loads((run / "config.json").read_text())
        out, step = run / "copies", json.loads((run / "score.json").read_text())["protocol"]["step"]
        command = f"tread-zoo sample checkpoint={run} num_images={SAMPLES} out={out}"
        subprocess.run(command.split(), check=True)
        samples = torch.from_numpy(np.load(out / "samples.npz")["arr_0"]).float()
        data: ImageData = create("data", config["data"])
        train, held_out = (
            torch.stack([item[0] for item in part]).float() for part in data.parts.values()
        )
        torch.manual_seed(0)
        shares, without = [], []
        for _ in range(DRAWS):
            others, rest = held_out[torch.randperm(len(held_out))].tensor_split([len(train)])
            shares.append(share_of_copies(samples, train, others))
            without.append(share_of_copies(rest[:SAMPLES], train, others))
        same = table.arm.str.startswith(arm_of(config)) & (table.seed == config["seed"])
        table.loc[same & (table.steps == step), "nearer_to_training"] = sum(shares) / DRAWS
        print(f"held-out images: {sum(without) / DRAWS:.3f}")
    table.to_csv(file, index=False, float_format="%.6g")


if __name__ == "__main__":
    main(*sys.argv[1:])
