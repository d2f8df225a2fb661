"""What training on many GPUs will ask of the network between them, the disk and the loader: a sum.

python benchmarks/plan.py dit_b_2 dit_xl_2
python benchmarks/plan.py mamba_b_2 --share 0.2 --images 64

Nothing is run. FLOPs and parameters are those of the network, counted; what the hardware does is
taken from data sheets and assumed below. ImageNet at 256 x 256, as latents: 4 x 32 x 32.
"""

import argparse

import torch

from tread_zoo import create, create_backbone
from tread_zoo.evaluation.flops import training_flops

PEAK = 989e12  # FLOP/s of an H100 SXM in bf16, dense
LINKS = {8: 450e9, 64: 400e9, 1024: 400e9}  # bytes/s: NVLink one way; 8 NICs of 400 Gb/s a machine
REACHED = 0.8  # assumed part of a link's rate
HOP = 3e-6  # assumed seconds from one GPU of a ring to the next
SAVED = 0.45e9  # measured bytes/s of a core that writes a checkpoint and its checksums
IMAGE = 2 * 8 * 32 * 32 * 2  # bytes: an image's moments and its mirrored copy's, float16
STEPS, BATCH = 400_000, 256  # experiment=imagenet256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backbones", nargs="+")
    parser.add_argument("--share", type=float, default=0.4, help="of the peak that a step reaches")
    parser.add_argument("--images", type=int, default=32, help="of a GPU in a step")
    args = parser.parse_args()
    rate = args.share * PEAK
    costs, plans = [], []
    for name in args.backbones:
        with torch.device("meta"):
            network = create_backbone(name, input_size=32, in_channels=4, num_classes=1000)
        size = sum(p.numel() for p in network.parameters())
        for way in ("none", "tread"):
            flops = training_flops(network, create("routing", way), STEPS)
            hours = flops * STEPS * BATCH / rate / 3600
            costs.append((name, way, f"{size / 1e6:.1f}", f"{flops / 1e9:.1f}", f"{hours:.1f}"))
            step = flops * args.images / rate
            plans += [
                (name, way, *plan(size, network.num_blocks, num, step, args.images))
                for num in LINKS
            ]
    print_table("backbone | routing | M parameters | GFLOPs an image | GPU-hours", costs)
    columns = "ms a step | DDP: GB, ms | FSDP2: GB, ms | s to save | images/s | GB/s read"
    print_table(f"backbone | routing | GPUs | {columns}", plans)


def plan(size: int, num_blocks: int, num: int, step: float, images: int) -> tuple[object, ...]:
    """Return a row for `num` GPUs: the computation of a step, what each GPU sends in it and how
    long that takes, a checkpoint, and what the loaders of all GPUs read in a second."""
    others, link = (num - 1) / num, REACHED * LINKS[num]
    # A ring sums in 4 bytes: once around to add up, once to hand round.
    summed = 2 * 4 * size * others
    # Weights are gathered twice, in 2 bytes as DiT's are (scans' in 4), gradients summed in 4.
    sharded = (2 + 2 + 4) * size * others
    wait = (num - 1) * HOP  # once around a ring, however little it carries
    reduce = summed / link + 2 * wait  # in few buckets
    gather = sharded / link + 3 * (num_blocks + 1) * wait
    speed = num * images / step
    return (
        num,
        f"{1e3 * step:.0f}",
        f"{summed / 1e9:.1f}, {1e3 * reduce:.0f}",
        f"{sharded / 1e9:.1f}, {1e3 * gather:.0f}",
        f"{16 * size / SAVED:.0f}",
        f"{speed:,.0f}",
        f"{speed * IMAGE / 1e9:.1f}",
    )


def print_table(columns: str, rows: list[tuple[object, ...]]) -> None:
    print(f"| {columns} |\n|{'---|' * len(columns.split('|'))}")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


if __name__ == "__main__":
    main()
