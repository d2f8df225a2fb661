"""Train a small classifier on labelled images, whose features measure distances between them.

python scripts/make_features.py data=npz data.path=fashion.npz data.pad_to=32 out=f.safetensors
python scripts/train.py data=npz data.path=fashion.npz evaluation.extractor=f.safetensors

For data that Inception says little about, or where its weights are not at hand. Scores taken with
one file compare with each other alone: each record names the file and the hash of its weights.
"""

import logging
import math

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors

logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../configs", config_name="make_features")
@clear_errors
def main(config: DictConfig) -> None:
    import torch
    import torch.nn.functional as F

    from tread_zoo.data import StepBatches, build_data, make_loader
    from tread_zoo.evaluation.evaluate import classifier_agreement
    from tread_zoo.evaluation.features import ClassifierFeatures, extractor_id, save_features
    from tread_zoo.evaluation.held_out import stack_part
    from tread_zoo.outputs import check_out_file
    from tread_zoo.runtime import resolve_device

    settings = as_keywords(config)
    out = check_out_file("out", settings["out"])
    data, device = build_data(**settings["data"]), resolve_device(settings["device"])
    torch.manual_seed(settings["seed"])
    network = ClassifierFeatures(
        image_size=data.image_size,
        channels=data.channels,
        num_classes=data.num_classes,
        num_features=settings["num_features"],
    ).to(device)
    num_steps, rate = settings["num_steps"], settings["learning_rate"]
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.05)
    batches = StepBatches(
        len(data.train), settings["batch_size"], seed=settings["seed"], num_steps=num_steps
    )
    for step, (images, labels) in enumerate(make_loader(data.train, batches)):
        optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        _, logits = network(images.to(device))
        loss = F.cross_entropy(logits, labels.to(device), label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            logger.info("step %5d  loss %.3f", step + 1, float(loss))
    about = f"trained on {data.name}, {num_steps} steps of {settings['batch_size']}"
    save_features(network.cpu(), out, about)
    if data.held_out is not None:
        right = classifier_agreement(str(out), *stack_part(data.held_out, len(data.held_out)))
        logger.info("held-out accuracy %.4f", right)
    count = sum(p.numel() for p in network.parameters())
    logger.info("%s: %d parameters, written to %s", extractor_id(out.stem, out), count, out)


if __name__ == "__main__":
    main()
