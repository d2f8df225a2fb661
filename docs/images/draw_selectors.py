"""Draw the pictures of docs/images: selectors, scan orders, routes in the depth, long skips.

python docs/images/draw_selectors.py

It also prints a table of each selector, with the chance

- that the neighbour of a kept token is kept, beside it (left, right) and above or below,
- that the next token of the raster order and of the Hilbert curve is kept,
- that a bypassed token has no kept one among its 8 neighbours (a hole).

Nothing is trained. `norm` is shown for a made-up importance, which is larger towards the middle.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.patches import FancyArrowPatch
from PIL import Image
from torch import Tensor

from tread_zoo import create, create_backbone
from tread_zoo.contract.crossing import Layout
from tread_zoo.factory import add_routing
from tread_zoo.routing import ORDERS, Select, Stack, Step, make_scan, scan_order
from tread_zoo.routing.select import draw_gumbel
from tread_zoo.seeding import make_image_generator

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
METHODS: dict[str, Any] = {
    "tread": {}, "sprint": {}, "maskdit": {}, "microdit": {},
    "random_ltd": {}, "layer_drop": {"drop": 0.99}, "token_merging": {}, "mixture_of_depths": {},
}  # fmt: skip
COLUMNS = ("left, right", "up, down", "raster next", "hilbert next", "holes")
HERE, RATE = Path(__file__).parent, 0.5
SAMPLES, MEASURED = 3, 10_000  # samples of each selector in the picture, and in the table
NUM_BLOCKS = 12
DARK, LIGHT, RED, ORANGE, GREEN = "#0b55a0", "#dde8f5", "tab:red", "tab:orange", "tab:green"


def draw_route(selector: Any, batch: int, side: int, rate: float) -> Select:
    """Return a route of a network of 12 blocks with ids [batch, K]."""
    stack = Stack(NUM_BLOCKS, (side, side), widths=(1,), skips={})
    images, span = make_image_generator("draw", 0, images=range(batch)), stack.span()
    num_kept = stack.num_kept(rate)
    if selector != "norm":
        return stack.select(span, selector, num_kept, images)
    key = made_up_importance(side).log() + draw_gumbel(side * side, images)
    return Select(*span, key.topk(num_kept, dim=1).indices.sort(dim=1).values)


def draw_kept(selector: Any, batch: int, side: int, rate: float) -> Tensor:
    """Return which tokens stay, bool [batch, side, side]."""
    kept = torch.zeros(batch, side * side, dtype=torch.bool)
    ids = draw_route(selector, batch, side, rate).ids
    return kept.scatter(1, ids, True).view(batch, side, side)


def made_up_importance(side: int) -> Tensor:
    """Return an importance [1, side * side] that falls by e^4 from the middle to the corners."""
    square = torch.linspace(-1, 1, side).square()
    return (-2 * (square[:, None] + square)).exp().view(1, -1)


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
    columns = 3
    rows = -(-len(SELECTORS) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(8.2, 1.25 * rows))
    for axes in panels.flat:
        axes.axis("off")
    for axes, (name, selector) in zip(panels.flat, SELECTORS.items(), strict=False):
        kept = draw_kept(selector, SAMPLES, side, rate).float()
        with_gaps = F.pad(kept, (0, 1), value=float("nan"))
        strip = with_gaps.transpose(0, 1).flatten(1)[:, :-1]
        axes.imshow(strip, cmap="Blues", vmin=-0.15, vmax=1.2, interpolation="nearest")
        axes.set_title(name, fontsize=8, pad=2)
    save(figure, path)


def draw_orders(side: int, path: Path) -> None:
    """Write every scan order as a line from light to dark; serpentine8 at each of its layers."""
    cases = [(name, 0) for name in ORDERS if name != "serpentine8"]
    cases += [("serpentine8", index) for index in range(8)]
    figure, panels = plt.subplots(3, 4, figsize=(8.2, 6.4))
    for axes in panels.flat:
        axes.axis("off")
    for axes, (name, index) in zip(panels.flat, cases, strict=False):
        order = scan_order(name, (side, side), index)
        rows, columns = order // side, order % side
        axes.plot(columns, rows, color="0.7", linewidth=0.7)
        axes.scatter(columns, rows, c=range(len(order)), cmap="viridis_r", s=3)
        axes.plot(columns[0], rows[0], "o", color="tab:red", markersize=4)
        axes.set_aspect("equal")
        axes.invert_yaxis()
        axes.set_title(f"{name} {index}" if name == "serpentine8" else name, fontsize=8, pad=2)
    save(figure, path)


def draw_depth(side: int, rate: float, path: Path) -> None:
    """Draw which block sees which token of one image: a dark cell is a token in a block, a line is
    a token that bypasses."""
    route = draw_route("random", 1, side, rate)
    kept = set(route.ids[0].tolist())
    figure, axes = plt.subplots(figsize=(8.2, 3.6))
    for token in range(side * side):
        if token not in kept:
            axes.plot([route.start - 0.5, route.end - 0.5], [token, token], color=RED, linewidth=1)
        for block in range(NUM_BLOCKS):
            if token in kept or not route.start <= block < route.end:
                box = (block - 0.42, token - 0.36)
                axes.add_patch(plt.Rectangle(box, 0.84, 0.72, color=DARK))
    for edge, label in ((route.start, "start"), (route.end, "end")):
        axes.axvline(edge - 0.5, color="0.45", linestyle=":", linewidth=1)
        axes.text(edge - 0.5, -0.9, f"{label}={edge}", ha="center", va="bottom", fontsize=9)
    axes.set(xlim=(-0.6, NUM_BLOCKS - 0.4), ylim=(side * side - 0.3, -0.8), xlabel="block",
              ylabel="token", xticks=range(NUM_BLOCKS), yticks=[0, side * side - 1])  # fmt: skip
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    save(figure, path)


def draw_methods(path: Path) -> None:
    """Draw which block sees which token in one training step of each routing method."""
    torch.manual_seed(0)
    figure, panels = plt.subplots(2, 4, figsize=(8.2, 3.6))
    for axes, (name, options) in zip(panels.flat, METHODS.items(), strict=True):
        routing = create("routing", name, **options)
        axes.imshow(seen_by_block(routing), cmap="Blues", vmin=-0.15, vmax=1.2, aspect="auto")
        axes.set_title(name, fontsize=9, pad=3)
        axes.set(xticks=(), yticks=())
        axes.set_xticks([block - 0.5 for block in range(1, NUM_BLOCKS)], minor=True)
        axes.grid(which="minor", axis="x", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
        axes.spines[:].set_visible(False)
    save(figure, path)


def seen_by_block(routing: Any) -> Tensor:
    """Return which token runs in which block of an untrained DiT, [16 tokens, blocks]."""
    network = create_backbone("dit_tiny", input_size=8, in_channels=1, num_classes=10)
    stack, seen = Stack.of(network), torch.zeros(16, NUM_BLOCKS)
    add_routing(network, routing)
    run_block = network.run_block

    def record(index: int, streams: Any, condition: Any, layout: Layout, skip: Any) -> Any:
        seen[layout.positions()[0], index] = 1
        return run_block(index, streams, condition, layout, skip)

    network.run_block = record
    images = make_image_generator("draw", 0, images=range(1))
    routes = routing.draw(stack, images, Step(index=30, num_steps=100, seed=0))
    network(torch.randn(1, 1, 8, 8), torch.rand(1), torch.tensor([0]), routes=routes)
    return seen


def draw_gaps(side: int, rate: float, path: Path) -> None:
    """Draw the walk of a scan over the kept tokens of three selectors, with gaps in red."""
    figure, panels = plt.subplots(2, 3, figsize=(8.2, 5.9))
    for row, order in zip(panels, ("raster", "hilbert"), strict=True):
        for axes, name in zip(row, ("random", "rows", "blocks 2"), strict=True):
            ids = draw_route(SELECTORS[name], 1, side, rate).ids
            scan = make_scan(Layout((side, side), 0, ids), order, 0)
            walk = scan.permute(ids[..., None])[0, :, 0]
            rows, columns = (walk // side).tolist(), (walk % side).tolist()
            steps = scan.gaps()[0][0].tolist()
            for i in range(1, len(walk)):
                colour, width = (DARK, 2.2) if steps[i] == 1 else (RED, 1.1)
                axes.plot(columns[i - 1 : i + 1], rows[i - 1 : i + 1], color=colour, lw=width)
            axes.scatter(columns, rows, s=22, color=DARK, zorder=3)
            axes.imshow(torch.ones(side, side), cmap="Blues", vmin=0, vmax=12)
            axes.set_title(
                f"{name}, {order}: {sum(s > 1 for s in steps[1:])} gaps", fontsize=9, pad=3
            )
            axes.axis("off")
    save(figure, path)


def draw_skips(path: Path) -> None:
    """Write the long skips of a U-ViT over two routes, coloured by the tokens that they carry."""
    network = create_backbone("uvit_tiny", input_size=8, in_channels=1, num_classes=10)
    cases = {
        "made and used outside: whole": "0.6",
        "made and used inside: the kept tokens": DARK,
        "made before, used inside: gathered": GREEN,
        "made inside, used after: the others as at the start": ORANGE,
    }
    figure, (*panels, key) = plt.subplots(
        3, 1, figsize=(8.2, 4.6), gridspec_kw={"height_ratios": [5, 5, 1]}
    )
    for axes, (start, end) in zip(panels, ((2, 9), (5, 11)), strict=True):
        for block in range(network.num_blocks):
            inside = start <= block < end
            axes.add_patch(
                plt.Rectangle((block - 0.36, -0.5), 0.72, 1, color=DARK if inside else LIGHT)
            )
            axes.text(block, 0, block, ha="center", va="center", fontsize=8,
                       color="white" if inside else "0.3")  # fmt: skip
        for consumer, producer in network.skips.items():
            made, used = start <= producer < end, start <= consumer < end
            index = {(False, False): 0, (True, True): 1, (False, True): 2, (True, False): 3}
            arrow = FancyArrowPatch(
                (producer, 0.55), (consumer, 0.55), connectionstyle="arc3,rad=-0.33",
                arrowstyle="-|>", mutation_scale=9, color=list(cases.values())[index[made, used]],
                linewidth=1.6,
            )  # fmt: skip
            axes.add_patch(arrow)
        axes.text(-0.4, 3.2, f"route {start} … {end}", fontsize=9, va="center")
        axes.set(xlim=(-0.6, network.num_blocks - 0.4), ylim=(-0.7, 4.6))
        axes.axis("off")
    lines = [plt.Line2D([], [], color=colour, label=name) for name, colour in cases.items()]
    key.legend(handles=lines, fontsize=8, ncols=2, loc="center", frameon=False)
    key.axis("off")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure with few colours, as a small PNG."""
    buffer = BytesIO()
    figure.tight_layout(pad=0.4, w_pad=2.0, h_pad=1.0)
    figure.savefig(buffer, dpi=90)
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)


def main() -> None:
    matplotlib.use("Agg")
    draw_selectors(16, RATE, HERE / "selectors.png")
    draw_orders(16, HERE / "orders.png")
    draw_depth(4, RATE, HERE / "route.png")
    draw_methods(HERE / "methods.png")
    draw_gaps(8, RATE, HERE / "gaps.png")
    draw_skips(HERE / "skips.png")
    print(f"| 8x8, rate {RATE:g} | {' | '.join(COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for name, selector in SELECTORS.items():
        chances = survival(draw_kept(selector, MEASURED, 8, RATE))
        print(f"| {name} | {' | '.join(f'{chance:.2f}' for chance in chances)} |")


if __name__ == "__main__":
    main()
