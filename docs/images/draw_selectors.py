"""Draw what every selector keeps and how every scan order runs, and measure neighbourhoods.

    python docs/images/draw_selectors.py                              # into docs/images
    python docs/images/draw_selectors.py --rate 0.75 --out /tmp/images

selectors.png has the kept tokens of a few samples of each selector, orders.png the curves. The
table that is printed has, for each selector, the chance

- that the neighbour of a kept token is kept, beside it (left, right) and above or below,
- that the next token of the raster order and of the Hilbert curve is kept,
- that a bypassed token has no kept one among its 8 neighbours (a hole).

Nothing is trained: `norm` is shown for a made-up importance, larger towards the middle.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.routing import ORDERS, PendingRoute, build_routing, scan_order
from tread_zoo.seeding import make_generator

SELECTORS: dict[str, Any] = {
    "random": "random",
    "rows": "rows",
    "blocks 2": {"name": "blocks", "size": 2},
    "blocks 4": {"name": "blocks", "size": 4},
    "segments 4": {"name": "segments", "length": 4},
    "segments 12": {"name": "segments", "length": 12},
    "serpentine 12": {"name": "segments", "length": 12, "order": "serpentine"},
    "hilbert 4": {"name": "segments", "length": 4, "order": "hilbert"},
    "hilbert 12": {"name": "segments", "length": 12, "order": "hilbert"},
    "structured": "structured",
    "norm": "norm",
}
COLUMNS = ("left, right", "up, down", "raster next", "hilbert next", "holes")
SAMPLES = 3  # of each selector in the picture


def draw_kept(selector: Any, batch: int, side: int, rate: float) -> Tensor:
    """Return which tokens stay, bool [batch, side, side]."""
    routing = build_routing("tread", num_blocks=12, selection_rate=rate, selector=selector)
    (route,) = routing.draw(batch, (side, side), make_generator("draw", 0))
    if isinstance(route, PendingRoute):
        route = route.resolve(made_up_importance(side).expand(batch, -1))
    kept = torch.zeros(batch, side * side, dtype=torch.bool)
    return kept.scatter(1, route.ids, True).view(batch, side, side)


def made_up_importance(side: int) -> Tensor:
    """Return an importance [1, side * side] that falls by e^4 from the middle to the corners."""
    place = torch.linspace(-1, 1, side)
    return (-2 * (place[:, None].square() + place.square())).exp().view(1, -1)


def survival(kept: Tensor) -> tuple[float, ...]:
    """Return the chances of `COLUMNS` for kept tokens [B, h, w]."""

    def together(now: Tensor, then: Tensor) -> float:
        return float((now & then).sum() / now.sum())

    flat, grid = kept.flatten(1), (kept.shape[1], kept.shape[2])
    curves = [flat[:, scan_order(name, grid)] for name in ("raster", "hilbert")]
    around = F.max_pool2d(kept[:, None].float(), 3, stride=1, padding=1)[:, 0] > 0
    return (
        together(kept[:, :, :-1], kept[:, :, 1:]),
        together(kept[:, :-1], kept[:, 1:]),
        *(together(curve[:, :-1], curve[:, 1:]) for curve in curves),
        together(~kept, ~around),
    )


def draw_selectors(side: int, rate: float, path: Path) -> None:
    """Write the kept tokens of every selector, dark, as a picture."""
    import matplotlib.pyplot as plt

    columns = 3
    rows = -(-len(SELECTORS) // columns)
    figure, places = plt.subplots(rows, columns, figsize=(8.2, 1.25 * rows))
    for place in places.flat:
        place.axis("off")
    for place, (name, selector) in zip(places.flat, SELECTORS.items(), strict=False):
        kept = draw_kept(selector, SAMPLES, side, rate).float()
        gap = torch.full((side, 1), float("nan"))
        strip = torch.cat([part for one in kept for part in (one, gap)][:-1], dim=1)
        place.imshow(strip, cmap="Blues", vmin=-0.15, vmax=1.2, interpolation="nearest")
        place.set_title(name, fontsize=8, pad=2)
    save(figure, path)


def draw_orders(side: int, path: Path) -> None:
    """Write every scan order as a line from light to dark; serpentine8 at each of its layers."""
    import matplotlib.pyplot as plt

    cases = [(name, 0) for name in ORDERS if name != "serpentine8"]
    cases += [("serpentine8", index) for index in range(8)]
    figure, places = plt.subplots(3, 4, figsize=(8.2, 6.4))
    for place in places.flat:
        place.axis("off")
    for place, (name, index) in zip(places.flat, cases, strict=False):
        order = scan_order(name, (side, side), index)
        rows, columns = order // side, order % side
        place.plot(columns, rows, color="0.7", linewidth=0.7)
        place.scatter(columns, rows, c=range(len(order)), cmap="viridis_r", s=3)
        place.plot(columns[0], rows[0], "o", color="tab:red", markersize=4)
        place.set_aspect("equal")
        place.invert_yaxis()
        place.set_title(f"{name} {index}" if name == "serpentine8" else name, fontsize=8, pad=2)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure with few colours, as a small PNG."""
    from io import BytesIO

    import matplotlib.pyplot as plt
    from PIL import Image

    buffer = BytesIO()
    figure.tight_layout(pad=0.4, w_pad=2.0)
    figure.savefig(buffer, dpi=90)
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--side", type=int, default=16, help="of the grid in the picture")
    parser.add_argument("--table-side", type=int, default=8, help="of the grid that is measured")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--num-samples", type=int, default=10000, help="that are measured")
    args = parser.parse_args(arguments)

    import matplotlib

    matplotlib.use("Agg")
    draw_selectors(args.side, args.rate, args.out / "selectors.png")
    draw_orders(args.side, args.out / "orders.png")
    print(f"| {args.table_side}x{args.table_side}, rate {args.rate:g} | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for name, selector in SELECTORS.items():
        chances = survival(draw_kept(selector, args.num_samples, args.table_side, args.rate))
        print(f"| {name} | {' | '.join(f'{chance:.2f}' for chance in chances)} |")
    print(f"written to {args.out}: selectors.png, orders.png")


if __name__ == "__main__":
    main()
