"""Is the loader fast enough? Images per second of each source, beside what a network trains.

python scripts/benchmark_loader.py
python scripts/benchmark_loader.py sources=[image_folder] workers=[0,2,4] image_size=64

Crops of two photographs that come with scikit-learn are written as PNG files, parquet files and so
on. For every source, number of files and number of workers, the loader alone and training steps
(forward, backward, AdamW; dense, fixed input) take turns, so that a machine whose speed drifts
slows both; `ratio` is the median of their ratios: above 1 training waits for its first batch only.
`cpu_us` is the processor time an image, which a busy machine changes little: a core reads a million
divided by it in a second. `open_s` is what it takes to open the source. The files have been read
before: what a cold disk or a network adds is not in the numbers. The last line is JSON.
"""

import io
import json
import logging
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

register_configs()
logger = logging.getLogger(__name__)

LINE = "%-13s %6s %8s %7s %9s %7s %7s"


@hydra.main(version_base="1.3", config_path="../configs", config_name="benchmark_loader")
@clear_errors
def main(config: DictConfig) -> None:
    from tread_zoo.data.build import SOURCES
    from tread_zoo.errors import unknown_name
    from tread_zoo.runtime import describe_device, resolve_device

    settings = as_keywords(config)
    for source in settings["sources"]:
        if source not in WRITERS:
            raise unknown_name("sources", source, WRITERS)
    pictures = crop_photographs(settings["num_items"], settings["image_size"])
    train = TrainingSteps(settings)
    logger.info(
        "%s on %s; batch %d, %d pixels a side", settings["backbone"]["name"],
        describe_device(resolve_device(settings["device"])), settings["batch_size"],
        settings["image_size"],
    )  # fmt: skip
    logger.info(LINE, "source", "files", "workers", "open_s", "images/s", "cpu_us", "ratio")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(settings["keep"] or temporary)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")  # read as datasets is imported
        for source in settings["sources"]:
            if source not in SOURCES:
                logger.info("%-13s not in this version", source)
                continue
            try:
                for row in measure_source(source, pictures, train, folder, settings):
                    rows.append(row)
                    logger.info(LINE, *(_short(value) for value in row.values()))
            except (ImportError, ValueError) as error:
                logger.info("%-13s not measured: %s", source, error)
    trained = {"images_per_s": median(train.speeds), "cpu_us": median(train.cpu_us)}
    logger.info("training: %(images_per_s).0f images/s, %(cpu_us).0f us CPU an image", trained)
    logger.info("%s", json.dumps({"rows": rows, "training": trained}))


def measure_source(
    source: str,
    pictures: np.ndarray,
    train: "TrainingSteps",
    folder: Path,
    settings: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of files and of workers; pictures uint8 [N,H,W,3]."""
    from tread_zoo.data import build_data

    in_memory = source == "npz"
    for num_files in settings["files"][source]:
        where = folder / f"{source}_{num_files}"
        if not where.exists():
            where.mkdir(parents=True)
            WRITERS[source](pictures, where, num_files)
        given = {} if in_memory else {"image_size": settings["image_size"]}
        began = time.perf_counter()
        path = str(where / "set.npz" if in_memory else where)
        data = build_data(name=source, path=path, held_out=0.0, **given)
        opening = time.perf_counter() - began
        for workers in [0] if in_memory else settings["workers"]:
            yield {
                "source": source, "files": num_files, "workers": workers, "open_s": opening,
                **measure(data.train, workers, train, settings),
            }  # fmt: skip


def measure(
    dataset: Any, workers: int, train: "TrainingSteps", settings: dict[str, Any]
) -> dict[str, float | None]:
    """Return the loader's images per second, its processor time an image where it has no workers,
    and the ratio of its speed to that of training."""
    from tread_zoo.data import StepBatches, make_loader

    count, rounds, ahead = settings["num_batches"], settings["num_rounds"], 2 * workers
    plan = StepBatches(
        len(dataset),
        min(settings["batch_size"], len(dataset)),
        seed=0,
        num_steps=1 + rounds * (ahead + count),
    )
    loaded = make_loader(dataset, plan, workers)

    def load() -> int:
        return len(next(loaded)[0])

    load()  # starts the workers
    speeds, times, ratios = [], [], []
    for _ in range(rounds):
        for _ in range(ahead):  # read while training ran, so not counted
            load()
        speed, cpu_us = timed(load, count)
        speeds.append(speed)
        times.append(cpu_us)
        ratios.append(speed / train.round())
    return {
        "images_per_s": median(speeds),
        "cpu_us": None if workers else median(times),
        "ratio": median(ratios),
    }


class TrainingSteps:
    """Dense training steps of the backbone on a fixed batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from tread_zoo import create_backbone
        from tread_zoo.runtime import resolve_device, resolve_precision

        self.device = resolve_device(settings["device"])
        self.precision = resolve_precision(settings["precision"], self.device)
        self.network = create_backbone(
            input_size=settings["image_size"], in_channels=3, num_classes=10,
            **settings["backbone"],
        ).to(self.device)  # fmt: skip
        batch, side = settings["batch_size"], settings["image_size"]
        self.x = torch.randn(batch, 3, side, side, device=self.device)
        self.t = torch.rand(batch, device=self.device)
        self.y = torch.randint(10, (batch,), device=self.device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-4, fused=True)
        self.speeds: list[float] = []
        self.cpu_us: list[float] = []
        self.step()

    def step(self) -> int:
        """Do one; return the number of images."""
        import torch

        from tread_zoo.runtime import autocast

        with autocast(self.device, self.precision):
            out = self.network(self.x, self.t, self.y)
        (out.float() - self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return len(self.x)

    def round(self) -> float:
        """Do one more, and note it; return images per second."""
        speed, cpu_us = timed(self.step, 1)
        self.speeds.append(speed)
        self.cpu_us.append(cpu_us)
        return speed


def timed(step: Callable[[], int], count: int) -> tuple[float, float]:
    """Call `step`, which returns its number of images, `count` times.

    Returns:
        Images per second, and microseconds of this process's processor time an image.
    """
    began, began_cpu = time.perf_counter(), time.process_time()
    images = sum(step() for _ in range(count))
    cpu_us = 1e6 * (time.process_time() - began_cpu) / images
    return images / (time.perf_counter() - began), cpu_us


def crop_photographs(count: int, side: int) -> np.ndarray:
    """Return crops uint8 [count, side, side, 3] at fixed random places of real photographs."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    rng = np.random.default_rng(0)
    crops = []
    for index in range(count):
        photograph = photographs[index % len(photographs)]
        top, left = (rng.integers(0, length - side + 1) for length in photograph.shape[:2])
        crops.append(photograph[top : top + side, left : left + side])
    return np.stack(crops)


def _short(value: str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return str(value)


def _png(picture: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG")
    return stream.getvalue()


def _write_npz(pictures: np.ndarray, folder: Path, num_files: int) -> None:
    np.savez(folder / "set.npz", images=pictures)


def _write_pictures(pictures: np.ndarray, folder: Path, num_files: int) -> None:
    for index, picture in enumerate(pictures[:num_files]):
        (folder / f"{index:06d}.png").write_bytes(_png(picture))


def _write_parquet(pictures: np.ndarray, folder: Path, num_files: int) -> None:
    import datasets

    kind = datasets.Features({"image": datasets.Image()})
    for number, part in enumerate(np.array_split(pictures, num_files)):
        rows = [{"bytes": _png(picture), "path": None} for picture in part]
        table = datasets.Dataset.from_dict({"image": rows}, features=kind)
        table.to_parquet(folder / f"train-{number:06d}.parquet")


def _write_shards(pictures: np.ndarray, folder: Path, num_files: int) -> None:
    names = iter(range(len(pictures)))
    for number, part in enumerate(np.array_split(pictures, num_files)):
        with tarfile.open(folder / f"shard-{number:06d}.tar", "w") as archive:
            for picture in part:
                content = _png(picture)
                entry = tarfile.TarInfo(f"{next(names):08d}.png")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


WRITERS: dict[str, Callable[[np.ndarray, Path, int], None]] = {
    "npz": _write_npz,
    "image_folder": _write_pictures,
    "hf": _write_parquet,
    "webdataset": _write_shards,
}

if __name__ == "__main__":
    main()
