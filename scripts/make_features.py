"""Train a small classifier on labelled images; scores such as FID can then use its features.

tread-zoo make-features data=npz data.path=letters.npz data.pad_to=32 out=f.safetensors
tread-zoo evaluate checkpoint=runs/letters evaluation.extractor=f.safetensors

Use the classifier for images unlike those that Inception was trained on, or if Inception's weights
are not available. Scores are comparable only if they used the same classifier: each record of
scores names the classifier's file, with the hash of the weights.

The shipped classifiers were trained by: out=digits.safetensors data=digits num_steps=1200
batch_size=64 'layers=[[32,1,false],[64,1,true],[64,0,false]]' and by: out=fashion.safetensors
data=fashion_mnist data.pad_to=32 num_steps=1000
"""

import logging
import math
from pathlib import Path
from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from tread_zoo.cli import command
from tread_zoo.config import part_type
from tread_zoo.fields import OPTIONS, Device, check

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class FeaturesConfig:
    """What tread-zoo make-features trains.

    Args:
        plugins, data, device: see `RunConfig`.
        out: a .safetensors file, for evaluation.extractor.
        num_features: size of an image's feature vector; with `layers`, the last one's channels.
        layers: a list [channels, padding, whether a pooling follows] for each convolution; null is
            four convolutions, for images of 16 pixels and more.
        num_steps: number of training steps.
        batch_size: images per step.
        learning_rate: AdamW's rate at the start; it falls to 0 along a cosine.
        seed: seed of the initial weights and of the order of the images.
    """

    plugins: tuple[str, ...] = ()
    data: part_type("digits") = "digits"  # type: ignore[valid-type]
    out: str
    num_features: PositiveInt = 128
    layers: tuple[tuple[PositiveInt, NonNegativeInt, bool], ...] | None = None
    num_steps: PositiveInt = 1500
    batch_size: PositiveInt = 128
    learning_rate: NonNegativeFloat = 2e-3
    seed: int = 0
    device: Device = "auto"


@command("make_features", FeaturesConfig)
def main(settings: dict[str, Any]) -> None:
    import torch
    import torch.nn.functional as F

    from tread_zoo.data import StepBatches, make_loader
    from tread_zoo.evaluation.features import ClassifierFeatures, find_extractor, save_features
    from tread_zoo.evaluation.images import part_images
    from tread_zoo.evaluation.score import score
    from tread_zoo.registry import create
    from tread_zoo.runtime import resolve_device

    config = check(FeaturesConfig, settings)
    out = Path(config.out).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    data, device = create("data", config.data), resolve_device(config.device)
    if data.num_classes < 2:
        raise ValueError(f"data={data.name} has fewer than two classes to tell apart.")
    torch.manual_seed(config.seed)
    network = ClassifierFeatures(
        image_size=data.image_size,
        channels=data.channels,
        num_classes=data.num_classes,
        num_features=config.num_features,
        layers=config.layers,
    ).to(device)
    num_steps, rate = config.num_steps, config.learning_rate
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.05)
    batches = StepBatches(data.train, config.batch_size, seed=config.seed, num_steps=num_steps)
    for step, (images, labels) in enumerate(make_loader(data.train, batches)):
        optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        logits = network(images.to(device))["logits"]
        loss = F.cross_entropy(logits, labels.to(device), label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            logger.info("step %d/%d  loss %.3f", step + 1, num_steps, loss.item())
    about = f"trained on {data.name}, {num_steps} steps of {config.batch_size}"
    save_features(network.cpu(), out, about)
    if data.held_out is not None:
        held_out = part_images(data, data.held_out, "held_out")
        values = score(held_out, held_out, ["label_accuracy"], extractor=str(out))["values"]
        logger.info("held-out accuracy %.4f", values["label_accuracy"])
    count = sum(p.numel() for p in network.parameters())
    label = find_extractor(str(out)).label
    logger.info("%s: %d parameters, written to %s", label, count, out)


if __name__ == "__main__":
    main()
