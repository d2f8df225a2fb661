"""Does evaluation keep its extractor busy? Images per second, beside those of the bare extractor.

python scripts/benchmark_evaluation.py
python scripts/benchmark_evaluation.py extractor=inception-v3-compat random_weights=true \
    image_size=[256,256] channels=3 num_images=96 batch_size=32 num_rounds=5

Both go through the same random images, which lie in memory. The bare loop calls the network on
batches of them; an evaluation reads and hashes the images, keeps the features, and gathers means
and covariances, too. They take turns, so that a machine whose speed drifts slows both; on a CPU the
ratio is also given in processor time, which other work on the machine hardly touches. The last line
is JSON.
"""

import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

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
    shape = (settings["channels"], *settings["image_size"])
    needs = needs_of(["fid", "kid"], generated=False)
    with TemporaryDirectory() as folder:
        given = settings["inception_weights"]
        if settings["random_weights"]:
            given = str(_random_weights(settings["extractor"], given, Path(folder)))
        weights = find_weights(
            settings["extractor"],
            inception_weights=given,
            dinov2_weights=settings["dinov2_weights"],
        )
        weights.check_shape(shape)
        extractor = open_extractor(weights, needs.names, device)
    images = torch.randint(0, 256, (settings["num_images"], *shape), dtype=torch.uint8)
    batches = [extractor.prepare(part) for part in images.split(batch_size)]

    @torch.no_grad()
    def bare() -> None:
        for batch in batches:
            extractor.network(batch)[FEATURES].cpu()

    def evaluation() -> None:
        extract(TensorImages(images), extractor, needs, batch_size=batch_size)

    def measure(loop: Callable[[], None]) -> tuple[float, float]:
        """Return images per second, and per second of processor time."""
        began, worked = time.perf_counter(), time.process_time()
        loop()
        spent = time.perf_counter() - began, time.process_time() - worked
        return len(images) / spent[0], len(images) / spent[1]

    measure(bare)
    measure(evaluation)
    rounds = []
    for number in range(settings["num_rounds"]):  # each goes first in every second round
        order = (bare, evaluation) if number % 2 else (evaluation, bare)
        found = {loop: measure(loop) for loop in order}
        rounds.append((found[bare], found[evaluation]))
    speeds = [
        statistics.median(speed for speed, _ in column) for column in zip(*rounds, strict=True)
    ]
    ratio, worked = (
        statistics.median(own[kind] / plain[kind] for plain, own in rounds) for kind in (0, 1)
    )
    logger.info("%s, images %s, on %s", extractor.label, list(shape), describe_device(device))
    logger.info("bare extractor %9.1f images/s", speeds[0])
    logger.info("evaluation     %9.1f images/s, %.3f of it", speeds[1], ratio)
    record = {"extractor": extractor.label, "bare": speeds[0], "evaluation": speeds[1]}
    record |= {"ratio": ratio}
    if device.type == "cpu":
        logger.info("in processor time %.3f of it", worked)
        record |= {"ratio_of_processor_time": worked}
    logger.info("%s", json.dumps(record))


def _random_weights(extractor: str, given: str | None, folder: Path) -> Path:
    """Write random weights of Inception, which take as long as the real ones; return the file."""
    from tread_zoo.evaluation.features import INCEPTION_EXTRACTOR
    from tread_zoo.evaluation.random_inception import write_random_inception

    if extractor != INCEPTION_EXTRACTOR or given is not None:
        raise ValueError(
            f"random_weights=true with extractor={extractor!r} and inception_weights={given!r}: it "
            f"is for extractor={INCEPTION_EXTRACTOR!r} without a file of its own; leave it out."
        )
    return write_random_inception(folder / "random.pth")


if __name__ == "__main__":
    main()
