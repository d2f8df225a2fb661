"""What the host does to draw a step, and whether that grows with the number of ranks.

python benchmarks/host.py

Milliseconds of one core, and the number of operations that a GPU would be given. The batch is one
image: the same operations as for 256, with next to nothing of the work that is the device's. Ranks
are simulated in one process, as the last of them.
"""

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tread_zoo import create_backbone
from tread_zoo.config import make_config
from tread_zoo.data.dataset import PIXELS
from tread_zoo.data.latents import LatentCodec
from tread_zoo.registry import create
from tread_zoo.training.loop import draw_step

REPEATS = 50
LATENTS = LatentCodec("mean_logvar", True, "standardize", (0.0,) * 4, (1.0,) * 4, None)
CASES = {  # name: (codec, an image as stored)
    "moments of latents, 32 x 32": (LATENTS, torch.zeros(1, 2, 8, 32, 32)),
    "pixels, 256 x 256": (PIXELS, torch.zeros(1, 3, 256, 256, dtype=torch.uint8)),
}


class Count(TorchDispatchMode):
    """Counts operations, views left out."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def setup_of(codec: Any, shape: tuple[int, ...]) -> Any:
    """Return what `draw_step` reads of a run's parts: a DiT-XL/2 with TREAD's route."""
    training = {"num_steps": 1000, "horizontal_flip": True}
    config = make_config(backbone="dit_xl_2", training=training)
    _, channels, side, _ = codec.model_shape(shape)
    with torch.device("meta"):
        backbone = create_backbone(
            "dit_xl_2", input_size=side, in_channels=channels, num_classes=1000,
            patch_size=side // 16,
        )  # fmt: skip
    return SimpleNamespace(
        config=config, training=config.training, num_steps=1000, backbone=backbone,
        routing=backbone.build_routing(), objective=create("objective", "flow"),
        data=SimpleNamespace(codec=codec),
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    print("| draws of a step | operations | 1 rank | 8 ranks | 64 ranks |\n|---|---|---|---|---|")
    for name, (codec, image) in CASES.items():
        setup = setup_of(codec, tuple(image.shape))
        batch = (image, torch.zeros(1, dtype=torch.int64))
        with Count() as count:
            draw_step(setup, batch, 0, 0, torch.device("cpu"))
        cells = [str(count.number)]
        for num_ranks in (1, 8, 64):
            times = []
            for step in range(REPEATS):
                begin = time.perf_counter()
                draw_step(setup, batch, step, num_ranks - 1, torch.device("cpu"))
                times.append(time.perf_counter() - begin)
            cells.append(f"{1000 * sorted(times)[REPEATS // 2]:.2f} ms")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
