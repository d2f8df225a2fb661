"""Does evaluation keep its extractor busy? Images per second, beside those of the bare extractor.

python scripts/benchmark_evaluation.py
python scripts/benchmark_evaluation.py extractor=inception-v3-compat image_size=[64,64] channels=3

Both go through the same random images, which lie in memory. The bare loop calls the extractor and
keeps the features; an evaluation reads and hashes the images, and gathers means and covariances,
too. They take turns, so that a machine whose speed drifts slows both. The last line is JSON.
"""

import json
import logging
import statistics
import time
from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors

logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark_evaluation")
@clear_errors
def main(config: DictConfig) -> None:
    import torch

    from tread_zoo.evaluation.extraction import extract
    from tread_zoo.evaluation.extractors import FEATURES, find_weights, open_extractor
    from tread_zoo.evaluation.metrics import needs_of
    from tread_zoo.evaluation.sources import TensorImages
    from tread_zoo.runtime import describe_device, resolve_device

    settings = as_keywords(config)
    device, batch_size = resolve_device(settings["device"]), settings["batch_size"]
    weights = find_weights(
        settings["extractor"],
        inception_weights=settings["inception_weights"],
        dinov2_weights=settings["dinov2_weights"],
    )
    shape = (settings["channels"], *settings["image_size"])
    weights.check_shape(shape)
    needs = needs_of(["fid", "kid"], generated=False)
    extractor = open_extractor(weights, needs.names, device)
    images = torch.randint(0, 256, (settings["num_images"], *shape), dtype=torch.uint8)

    def bare() -> None:
        torch.cat([extractor(part)[FEATURES].cpu() for part in images.split(batch_size)])

    def evaluation() -> None:
        extract(TensorImages(images), extractor, needs, batch_size=batch_size)

    def measure(loop: Callable[[], None]) -> float:
        began = time.perf_counter()
        loop()
        return len(images) / (time.perf_counter() - began)

    measure(bare)
    measure(evaluation)
    rounds = [(measure(bare), measure(evaluation)) for _ in range(settings["num_rounds"])]
    speeds = [statistics.median(column) for column in zip(*rounds, strict=True)]
    ratio = statistics.median(own / plain for plain, own in rounds)
    logger.info("%s, images %s, on %s", extractor.label, list(shape), describe_device(device))
    logger.info("bare extractor %9.1f images/s", speeds[0])
    logger.info("evaluation     %9.1f images/s, %.3f of it", speeds[1], ratio)
    record = {"extractor": extractor.label, "bare": speeds[0], "evaluation": speeds[1]}
    logger.info("%s", json.dumps({**record, "ratio": ratio}))


if __name__ == "__main__":
    main()
