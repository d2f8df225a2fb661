"""Train the digits feature extractor and write the file that ships with tread_zoo.evaluation.

    python scripts/make_digits_features.py

It sees the training part of the digits alone and prints the accuracy on the held-out part. A
minute at most on one CPU thread; the same torch build on the same machine writes the same bytes.
A new file is a new extractor: scores taken with another one cannot be compared with its own.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tread_zoo.data import ArrayDataset, StepBatches, digits, make_loader
from tread_zoo.evaluation.features import DIGITS_WEIGHTS, DigitsFeatures


def train(seed: int, num_steps: int, batch_size: int, lr: float) -> tuple[DigitsFeatures, float]:
    """Return the trained network and its accuracy on the held-out digits."""
    torch.manual_seed(seed)
    network = DigitsFeatures()
    data = digits()
    assert isinstance(data.train, ArrayDataset)
    assert isinstance(data.held_out, ArrayDataset)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.05)
    batches = StepBatches(len(data.train), batch_size, seed=seed, num_steps=num_steps)
    for step, (images, labels) in enumerate(make_loader(data.train, batches)):
        optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        _, logits = network(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval()
    with torch.no_grad():
        predicted = network(data.held_out.images)[1].argmax(1)
    return network, (predicted == data.held_out.labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DIGITS_WEIGHTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the order of sums, and so the bytes, depend on it
    network, accuracy = train(args.seed, args.num_steps, args.batch_size, args.lr)
    about = (
        "Classifier of 8x8 digits, trained by scripts/make_digits_features.py on the training "
        f"part of tread_zoo.data.digits() alone: seed {args.seed}, {args.num_steps} steps of "
        f"{args.batch_size}. Held-out accuracy {accuracy:.4f}."
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    # One entry of metadata: the order of several is not fixed, and the file's hash is its name.
    save_file(network.state_dict(), args.output, metadata={"about": about})
    args.output.chmod(0o644)  # safetensors writes files that their owner alone can read
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    print(f"held-out accuracy {accuracy:.4f}, {num_parameters} parameters, wrote {args.output}")


if __name__ == "__main__":
    main()
